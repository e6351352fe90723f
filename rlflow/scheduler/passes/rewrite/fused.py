"""Rewrite `one forward`: forwards of one model over the same rows become one.

Logits serve log-probs at every temperature, so nodes that differ in temperature or in the name
of their field share a pass through the model. Values need another head than log-probs, so the
two never share one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rlflow.graph.fields import Field
from rlflow.graph.graph import Node
from rlflow.graph.roles import Scoring
from rlflow.scheduler.context import Context
from rlflow.scheduler.passes.bind.bind import assignment
from rlflow.scheduler.passes.rewrite.edits import Made, rebound, scores_tokens, with_nodes
from rlflow.scheduler.plan.plan import Plan


def fused_forwards(plan: Plan, context: Context) -> Plan:
    """Let the first of several log-prob forwards make what all of them make.

    They agree in model, inputs and period, and the placement puts them alike. A forward that
    makes more than log-probs stays by itself.
    """
    groups: dict[object, list[Node]] = {}
    for node in plan.graph.nodes:
        if scores_tokens(node) and len(node.op.outputs) == 1 and node.loop is None:
            groups.setdefault(_key(node, context), []).append(node)
    fused: dict[str, Node] = {}
    moved: dict[Made, tuple[str, Field]] = {}
    for group in groups.values():
        if len(group) > 1:
            made = _names(group)
            fused[group[0].name] = _fused(group, made)
            moved |= {
                (node.name, node.op.outputs[0].name): (group[0].name, field)
                for node, field in zip(group, made, strict=True)
            }
            plan = plan.noting("one forward", _text(group))
    if not fused:
        return plan
    gone = {name for name, _ in moved} - set(fused)
    kept = (fused.get(node.name, node) for node in plan.graph.nodes if node.name not in gone)
    return with_nodes(plan, (rebound(node, moved) for node in kept))


def _key(node: Node, context: Context) -> object:
    """Equal for nodes that one pass of one instance serves."""
    others = repr([(key, value) for key, value in node.params if key != "temperature"])
    inputs = tuple(sorted((b.name, b.source, b.field.name) for b in node.inputs))
    op, where = replace(node.op, outputs=()), assignment(node, context.placement)
    return op, node.model, inputs, node.every, node.within, others, where


def _names(group: list[Node]) -> list[Field]:
    """What each node makes, under names that differ: numbered where another has the name."""
    taken: list[Field] = []
    for node in group:
        (field,) = node.op.outputs
        taken.append(replace(field, name=_free(field.name, [other.name for other in taken])))
    return taken


def _free(wanted: str, taken: Iterable[str]) -> str:
    names, number = set(taken), 2
    if wanted not in names:
        return wanted
    while f"{wanted}_{number}" in names:
        number += 1
    return f"{wanted}_{number}"


def _fused(group: list[Node], made: list[Field]) -> Node:
    """The first node, with a temperature for each of its outputs."""
    first = group[0]
    temperatures = tuple(float(node.as_a(Scoring).temperature) for node in group)
    fused = first.being(replace(first.as_a(Scoring), temperature=temperatures))
    return replace(fused, op=replace(first.op, outputs=tuple(made)))


def _text(group: list[Node]) -> str:
    first, *others = group
    names = " and ".join(node.name for node in others)
    given = dict.fromkeys(float(node.as_a(Scoring).temperature) for node in group)
    at = f", at temperatures {' and '.join(f'{t:g}' for t in given)}" if len(given) > 1 else ""
    return (
        f"{first.name} makes what {names} would make as well: one forward of {first.model} over "
        f"the same rows{at}"
    )
