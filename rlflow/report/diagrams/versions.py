"""Which version of a model's weights each node of a graph reads or writes, in words.

Versions decide, not lines: whatever its place in the file, a node that reads weights in iteration i
reads those with which the iteration begins, v[i], and the updates of iteration i make v[i+1].
"""

from __future__ import annotations

from rlflow.report.charts.look import Document


def versions_of(graph: Document) -> dict[str, list[str]]:
    """For every node that uses weights which are learned, lines such as `reads v[i]`."""
    nodes = {node["name"]: node for node in graph["nodes"]}
    made: dict[str, list[str]] = {}
    for edge in graph["edges"]:
        source, target = nodes[edge["source"]], nodes[edge["target"]]
        own = source["model"] == target["model"]
        if edge["kind"] != "weights" or (own and target["use"] == "train"):
            continue
        whose = "" if own else f"{source['model']} "
        line = f"reads {whose}{_version(edge['distance'])}"
        if line not in made.setdefault(target["name"], []):
            made[target["name"]].append(line)
    for model in graph["models"]:
        writers = [n for n in nodes.values() if n["model"] == model["name"] and n["use"] == "train"]
        for number, node in enumerate(writers, 1):
            which = f", update {number} of {len(writers)}" if len(writers) > 1 else ""
            made.setdefault(node["name"], []).append(f"v[i] to v[i+1]{which}")
    return made


def _version(distance: int) -> str:
    """The version that is read so many iterations after the update that made it."""
    if distance <= 1:
        return "v[i]" if distance else "v[i+1]"
    return f"v[i-{distance - 1}] or newer"
