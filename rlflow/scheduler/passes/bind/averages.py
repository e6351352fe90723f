"""Models whose weights are averages of others' weights: where they may be placed.

An average is computed shard by shard, so it lies on the devices, and in the layout, in which the
averaged model is trained. This file refuses what contradicts that: a placement elsewhere, another
architecture, another tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlflow.errors import Finding
from rlflow.graph.graph import Graph
from rlflow.graph.placement import On, Placement
from rlflow.scheduler.models.shapes import Shape
from rlflow.scheduler.models.tokenizers import differences_of
from rlflow.scheduler.passes.bind.instances import AxisSizes, layout_of

SHOWN = 3
WIDTHS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")


def average_findings(
    graph: Graph,
    placement: Placement,
    pools: Mapping[str, tuple[int, ...]],
    chosen: Mapping[str, On],
) -> list[Finding]:
    """E273 for every placement of an average apart from the training of what it averages."""
    findings = []
    for node in graph.nodes:
        if node.averages is None:
            continue
        home = chosen[node.name]
        for key in (node.name, f"{node.model}.train"):
            said = placement.assign.get(key)
            if said is None or _lies(said, pools) == _lies(home, pools):
                continue
            findings.append(
                Finding(
                    code="E273",
                    what=f"{key!r} is placed on {said.describe()}, and {node.averages} is trained"
                    f" on {home.describe()}",
                    where=node.where,
                    expected="an average is taken where the model is trained; other uses of "
                    f"{node.model} may be placed anywhere",
                    fix=f'"{node.model}.forward": rf.on("{said.pool}")',
                )
            )
    return findings


def _lies(where: On, pools: Mapping[str, tuple[int, ...]]) -> tuple[str, AxisSizes]:
    return where.pool, layout_of(where, "train", pools)


def model_findings(
    graph: Graph, shapes: Mapping[str, Shape | None], near: Path | None
) -> list[Finding]:
    """E272 for every average of a model of another architecture or tokenizer.

    Models without files on this machine are not compared here.
    """
    findings = []
    for node in graph.nodes:
        if node.averages is None:
            continue
        average, source = graph.model(str(node.model)), graph.model(node.averages)
        found = _widths(shapes[average.name], shapes[source.name])
        found += differences_of(source.path, average.path, near)[:SHOWN]
        if found:
            findings.append(
                Finding(
                    code="E272",
                    what=f"{node.name!r} averages {source.name!r} into a model of other weights",
                    where=node.where,
                    got="\n".join(found),
                    expected=f"{average.name} and {source.name} of one architecture and tokenizer",
                    fix=f'rf.Model("{average.name}", "{source.path}", ...)',
                )
            )
    return findings


def _widths(average: Shape | None, source: Shape | None) -> list[str]:
    """The widths that differ, each in words."""
    if average is None or source is None:
        return []
    pairs = {name: (getattr(average, name), getattr(source, name)) for name in WIDTHS}
    return [
        f"{name} {mine} and {theirs}" for name, (mine, theirs) in pairs.items() if mine != theirs
    ]
