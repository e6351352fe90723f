"""Loops folded: of the trips that a plan unrolls, pictures show one, also of loops in loops.

A graph or a plan whose loops are unrolled comes in as plain data and leaves as plain data
with the first trip alone. What reads any trip reads that one; what passes from one trip to
the next becomes an edge of kind `trip`. This file draws nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import networkx as nx

from rlflow.report.charts.look import Document, references_of

Names = Mapping[str, str]
NEXT_TRIP = "trip"
LATER = re.compile(r"(?:,| and) \S+#\d+(?:\.\d+)*")
Path = tuple[int, ...]


def folded_graph(graph: Document) -> Document:
    """A graph document with one trip of each loop; itself where no loop is unrolled."""
    trips = _paths_of_nodes(graph)
    names = {name: _first(name, path) for name, path in trips.items() if any(path)}
    if not names:
        return graph
    nodes = [
        {**node, "inputs": {key: _renamed(read, names) for key, read in node["inputs"].items()}}
        for node in graph["nodes"]
        if node["name"] not in names
    ]
    return {**graph, "nodes": nodes, "edges": list(_edges(graph["edges"], names, trips))}


def _paths_of_nodes(graph: Document) -> dict[str, Path]:
    """Which trip of each loop a node is of, from 0, the outermost first."""
    nodes = {node["name"]: node for node in graph["nodes"] if node.get("trip")}
    found: dict[str, Path] = {}
    for name in nodes:
        found[name], at = (), name
        while at in nodes:
            found[name], at = (nodes[at]["trip"][0], *found[name]), nodes[at]["loop"]
    return found


def _levels(action: Document) -> list[Document]:
    """The trips that an action is of, of the outermost loop first."""
    found, trip = [], action.get("trip")
    while trip:
        found.append(trip)
        trip = trip.get("within")
    return found[::-1]


def _edges(
    edges: Iterable[Document], names: Names, trips: Mapping[str, Path]
) -> Iterator[Document]:
    seen = set()
    for edge in edges:
        source, target = edge["source"], edge["target"]
        kind = NEXT_TRIP if _passes_on(trips, source, target, edge["distance"]) else edge["kind"]
        source, target = names.get(source, source), names.get(target, target)
        key = (source, target, kind, edge["distance"])
        looped = source == target and not edge["distance"]
        if key not in seen and not looped:
            seen.add(key)
            yield {**edge, "source": source, "target": target, "kind": kind}


def folded_plan(plan: Document) -> Document:
    """A plan document with the actions of one trip of each loop, numbered as in the whole plan.

    An action of a later trip alone, such as a transfer that the first one does not need, stays.
    Every action has a `number`; those that stand for several trips have the `trips` of their loop.
    """
    actions = {action["id"]: action for action in plan["actions"]}
    levels = {a["id"]: _levels(a) for a in plan["actions"] if a.get("trip")}
    trips = {name: tuple(trip["index"] for trip in found) for name, found in levels.items()}
    names = {
        name: first
        for name, path in trips.items()
        if any(path) and (first := _first(name, path)) in actions
    }
    counts = {name: prod(trip["of"] for trip in levels[name]) for name in names.values()}
    if not names:
        return _unfolded(plan)
    peaks: dict[str, int] = {}
    after: dict[str, list[Document]] = {}
    needed = _needed(plan)
    places = {name: place for place, name in enumerate(actions)}
    for name, action in actions.items():
        into = names.get(name, name)
        peaks[into] = max(peaks.get(into, 0), action["peak"] or 0)
        after.setdefault(into, []).extend(_waits(action, names, places, needed))
    kept = [
        {
            **action,
            "number": number,
            "peak": action["peak"] and peaks[action["id"]],
            "after": _each_once(after[action["id"]], action["id"]),
            "trips": counts.get(action["id"], 1),
            "reason": {**action["reason"], "text": LATER.sub("", action["reason"]["text"])},
        }
        for number, action in enumerate(plan["actions"], 1)
        if action["id"] not in names
    ]
    notes = [note for note in plan["notes"] if not _names_any(note["text"], names)]
    return {**plan, "actions": kept, "notes": notes}


def _unfolded(plan: Document) -> Document:
    numbered = enumerate(plan["actions"], 1)
    return {**plan, "actions": [{**a, "number": number, "trips": 1} for number, a in numbered]}


def _needed(plan: Document) -> set[tuple[str, str]]:
    """What waits within an iteration, less what longer paths imply."""
    dag = nx.DiGraph()
    waits = [(dep, action["id"]) for action in plan["actions"] for dep in action["after"]]
    dag.add_edges_from((dep["action"], name) for dep, name in waits if not dep["distance"])
    return set(nx.transitive_reduction(dag).edges)


def _waits(
    action: Document, names: Names, places: Mapping[str, int], needed: set[tuple[str, str]]
) -> Iterator[Document]:
    """What an action waits for; of what leads back to the next trip, what nothing else implies."""
    into = names.get(action["id"], action["id"])
    for dep in action["after"]:
        source = names.get(dep["action"], dep["action"])
        back = not dep["distance"] and places[source] >= places[into]
        implied = dep["kind"] == "device" or (dep["action"], action["id"]) not in needed
        if not (back and implied):
            yield {**dep, "action": source, "kind": NEXT_TRIP if back else dep["kind"]}


def _each_once(deps: Iterable[Document], name: str) -> list[Document]:
    """What an action waits for, each once, less what it would wait for itself."""
    found: dict[tuple[Any, ...], Document] = {}
    for dep in deps:
        if dep["action"] != name or dep["distance"]:
            found.setdefault((dep["action"], dep["kind"], dep["distance"]), dep)
    return list(found.values())


def _passes_on(trips: Mapping[str, Path], source: str, target: str, distance: int) -> bool:
    """Whether what leaves one trip enters a later one, of the innermost loop that both are in."""
    one, other = trips.get(source, ()), trips.get(target, ())
    both = min(len(one), len(other))
    return not distance and one[:both] < other[:both]


def _first(name: str, path: Path) -> str:
    """The name of the same node or action in the first trip of all loops that it is in."""
    copy = re.escape(".".join(str(index + 1) for index in path))
    return re.sub(rf"#{copy}(?![\d.])", "", name, count=1)


def _renamed(read: str | Iterable[str], names: Names) -> str | list[str]:
    moved = [
        f"{names.get(source, source)}.{field}"
        for source, _, field in (each.rpartition(".") for each in references_of(read))
    ]
    once = list(dict.fromkeys(moved))
    return once[0] if len(once) == 1 else once


def _names_any(text: str, names: Names) -> bool:
    return any(word.strip(",;:") in names for word in text.split())
