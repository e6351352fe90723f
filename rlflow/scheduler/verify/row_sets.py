"""Rules of the verifier: rows that are made of other rows are counted, and of one kind each.

Knows the graph and what ops declare; shares no code with the passes.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.graph.fields import Binding
from rlflow.graph.graph import Graph, Node
from rlflow.graph.rules.check import most_rows, num_prompts
from rlflow.scheduler.verify.happens_before import Facts

CHANGED = ("keep", "duplicate", "split", "replay")


def row_sets_are_counted(facts: Facts) -> Iterator[str]:
    """Who reads several row sets has each whole; who makes one says how many rows it has."""
    graph = facts.plan.graph
    for node in graph.nodes:
        parts = _parts(node)
        if len(parts) > 1 and node.op.dispatched != "first":
            yield f"{node.name} reads {len(parts)} row sets, and not all rows of them"
        for bounds in parts.values():
            sets = {graph.node(b.source).rows_of for b in bounds}
            if len(parts) > 1 and len(sets) > 1:
                yield f"{node.name} reads as one row set those of {' and '.join(map(str, sets))}"
        if node.op.hands_on and not node.ends_loop:
            yield from _hands_on(graph, node, parts)
        if node.op.name in CHANGED:
            yield from _is_bounded(graph, node)
        if node.op.name == "join":
            by, kept = dict(node.params)["by"], {b.field.name for b in parts.get(1, ())}
            if any(by not in {b.name for b in parts.get(part, ())} for part in (0, 1)):
                yield f"{node.name} joins by {by}, and does not read it of both row sets"
            if graph.node(node.sources[0]).rows_of != node.rows_of or not kept:
                yield f"{node.name} makes fields of other rows than those it joins them to"
        if node.op.name == "concat":
            yield from _adds_up(graph, node, parts)
        if node.op.chooses:
            yield from _are_some(graph, node)


def portions_are_whole(facts: Facts) -> Iterator[str]:
    """Parts of a rollout draw every prompt once, alike, and what puts them together has them all.

    One that helps is one update nearer to the newest weights than the others, if those are behind.
    """
    graph = facts.plan.graph
    parts: dict[str, list[Node]] = {}
    for node in graph.nodes:
        said = dict(node.params)
        if "portion_of" in said:
            parts.setdefault(said["portion_of"], []).append(node)
        elif node.op.name == "gather":
            parts.setdefault(node.name, [])
    for name, found in parts.items():
        found.sort(key=lambda node: node.param("from_prompt"))
        if not graph.has_node(name) or graph.node(name).op.name != "gather":
            yield f"nobody puts the parts of {name} together"
            continue
        yield from _tile(graph, name, found)
        whole = graph.node(name)
        for at, node in enumerate(found):
            read = [b.name for b in whole.inputs if (b.part, b.source) == (at, node.name)]
            if len(read) != len([b for b in whole.inputs if b.part == at]):
                yield f"{name} has as part {at} not {node.name}"
            if {n.name for n in graph.nodes if node.name in n.sources} != {name}:
                yield f"{node.name} draws a part of {name}, and others read it"
            behind = max(graph.staleness - bool(dict(node.params).get("helps")), 0)
            if graph.lag(node) != (behind if graph.updates(str(node.model)) else graph.lag(node)):
                yield f"{node.name} is {graph.lag(node)} updates behind, not {behind}"


def _tile(graph: Graph, name: str, parts: list[Node]) -> Iterator[str]:
    """Parts draw of the same prompts, one after the other, with the same options."""
    words = "portion_of", "from_prompt", "to_prompt", "of_prompts", "helps"
    following, like = 0, set()
    for node in parts:
        said = dict(node.params)
        source = graph.node(node.sources[0])
        bounds = dict(source.params).get("groups", (0, 0))
        if source.op.name != "split" or len(node.sources) > 1 or bounds[0] != following:
            yield f"{node.name} draws of {', '.join(node.sources)}, and prompt {following} is due"
        if said["from_prompt"] != following or num_prompts(graph, node) != bounds[1] - bounds[0]:
            yield f"{node.name} numbers its prompts from {said['from_prompt']}, not {following}"
        if said["to_prompt"] != bounds[1]:
            yield f"{node.name} draws prompts to {said['to_prompt']}, it has those to {bounds[1]}"
        following = bounds[1]
        options = tuple(sorted((k, str(v)) for k, v in said.items() if k not in words))
        due = node.model, node.every, node.within, node.op.body
        like.add((said["of_prompts"], options, due, source.inputs))
    total = {of for of, *_ in like}
    if len(like) != 1 or total != {following}:
        yield f"the parts of {name} differ, or draw {following} of {sorted(total)} prompts"


def _are_some(graph: Graph, node: Node) -> Iterator[str]:
    """Who drops groups that are late makes fewer than it begins, and as many as it says.

    Who moves rows makes all of them.
    """
    said, begun = dict(node.params), num_prompts(graph, graph.node(node.sources[0])) or 0
    wanted = said.get("first_groups", begun)
    if "first_groups" not in said and said.get("balance", 0) < 1:
        yield f"{node.name} makes all rows, and they do not move"
    if "first_groups" in said and not 0 < wanted < begun:
        yield f"{node.name} makes the first {wanted} of {begun} groups"
    if (num_prompts(graph, node), most_rows(graph, node)) != (wanted, wanted * said["n"]):
        yield f"{node.name} makes {wanted} groups, and its rows are counted otherwise"


def _parts(node: Node) -> dict[int, list[Binding]]:
    found: dict[int, list[Binding]] = {}
    for bound in node.inputs:
        found.setdefault(bound.part, []).append(bound)
    return found


def _hands_on(graph: Graph, node: Node, parts: dict[int, list[Binding]]) -> Iterator[str]:
    """What is read of a node that hands fields on, it has of each row set, or makes itself."""
    fill = dict(node.params).get("fill")
    made = {"group", "sample"} | {name for name, _ in getattr(fill, "values", ())}
    read = {b.field.name for other in graph.nodes for b in other.inputs if b.source == node.name}
    for part, bounds in parts.items():
        missing = sorted(read - made - {bound.name for bound in bounds})
        if missing:
            yield f"{node.name} hands on {', '.join(missing)}, which row set {part} lacks"
    if node.counts is None:
        yield f"{node.name} makes rows, and does not say how many"


def _adds_up(graph: Graph, node: Node, parts: dict[int, list[Binding]]) -> Iterator[str]:
    """Rows below each other are as many as all of them, and so are groups that are kept apart."""
    if node.counts is None:
        return
    sources = [graph.node(bounds[0].source) for bounds in parts.values()]
    rows = [most_rows(graph, source) or 0 for source in sources]
    groups = [num_prompts(graph, source) or 0 for source in sources]
    if node.counts.rows != sum(rows):
        yield f"{node.name} says {node.counts.rows} rows, it reads {' + '.join(map(str, rows))}"
    wanted = max(groups) if dict(node.params).get("groups") == "shared" else sum(groups)
    if node.counts.groups != wanted:
        yield f"{node.name} says {node.counts.groups} groups, it reads {wanted}"


def _is_bounded(graph: Graph, node: Node) -> Iterator[str]:
    """Who keeps, copies or divides rows makes as many as that gives of those that it reads."""
    said, source = dict(node.params), graph.node(node.sources[0])
    groups, rows = num_prompts(graph, source) or 0, most_rows(graph, source) or 0
    counts, each = node.counts, -(-rows // max(groups, 1))
    if counts is None:
        return
    if node.op.name == "duplicate":
        apart = said["groups"] == "apart" or all(b.name != "group" for b in node.inputs)
        wanted = (groups * said["times"] if apart else groups, rows * said["times"])
    elif node.op.name == "split":
        first, last = said["groups"]
        wanted = (last - first, (last - first) * each)
        if not 0 <= first < last <= groups:
            yield f"{node.name} takes groups {first} to {last} of {groups}"
    elif node.op.recalls:
        wanted = (said["sample"], said["sample"] * each)
        if counts.groups > groups * (said["keep"] + 1) or counts.least > groups:
            yield f"{node.name} draws {counts.groups} of {groups * (said['keep'] + 1)} groups"
    else:
        most = said.get("groups", groups)
        wanted = (most, min(most * each, rows))
        if counts.least != said.get("groups", said.get("at_least")) or counts.least > groups:
            yield f"{node.name} says at least {counts.least} groups of {groups}"
    if (counts.groups, counts.rows) != wanted:
        yield f"{node.name} says {counts.describe()}, it makes {wanted[0]} groups, {wanted[1]} rows"


def memories_are_in_order(facts: Facts) -> Iterator[str]:
    """Who keeps rows for later runs once an iteration, in one process, after the one before."""
    for node in facts.plan.graph.nodes:
        if not node.op.recalls:
            continue
        runs = facts.runs[node.name]
        known = runs[0].devices if runs[0].takes is None else runs[0].takes.devices
        alike = runs[0].takes is not None and len(runs[0].takes.parts) == 1
        lasting = alike and node.op.rows == "expand"
        if len(runs) > 1 or (len(known) > 1 and not lasting):
            yield f"{node.name} keeps rows in several processes, or of a part of them"
        if not facts.comes_before(runs[0].id, runs[0].id, 1):
            yield f"{node.name} may add to its rows before it has those of the iteration before"
        if node.every != 1 or node.loop is not None:
            yield f"{node.name} keeps rows, and does not run in every iteration"


def kept_rows_are_stated(facts: Facts) -> Iterator[str]:
    """The plan states once for each node that keeps rows how many: those of `keep` iterations."""
    graph, stated = facts.plan.graph, facts.plan.kept
    keeping = {node.name: node for node in graph.nodes if node.op.recalls}
    if sorted(kept.node for kept in stated) != sorted(keeping):
        names = [kept.node for kept in stated]
        yield f"{sorted(keeping)} keep rows, the plan states those of {names}"
        return
    for kept in stated:
        node = keeping[kept.node]
        rows_of = node if node.op.rows == "expand" else graph.node(node.sources[0])
        rows, keep = most_rows(graph, rows_of) or 0, node.param("keep")
        if kept.rows != keep * rows or kept.size < kept.rows:
            said = f"{kept.rows} rows in {kept.size} bytes"
            yield f"{kept.node} keeps {keep} iterations of {rows} rows, the plan states {said}"
