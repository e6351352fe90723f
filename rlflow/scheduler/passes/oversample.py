"""What pass `bind` says of rollouts whose replicas make their turns together: who can, and how.

They drop groups that are late, or move rows to each other. Engines in the workers of devices that
each have all of the model make turns together. SGLang takes the groups in the order in which its
engines answer, and ends rows that move, which the other engine then reads again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from rlflow.errors import Finding, PlanError
from rlflow.graph.graph import Node
from rlflow.graph.roles import Balanced, Oversampled, SamplingOptions
from rlflow.graph.user.engines import SGLang
from rlflow.scheduler.context import Context
from rlflow.scheduler.costs.lengths import ResponseLengths
from rlflow.scheduler.costs.rows.balanced import MovedRow, moved_row
from rlflow.scheduler.devices.cluster import amount
from rlflow.scheduler.plan.plan import Instance, Plan
from rlflow.scheduler.plan.text import duration

RULE = "oversample"


def oversample(plan: Plan, context: Context) -> Plan:
    """The plan, with a note on every rollout that drops groups, or whose rows move, and how.

    Raises PlanError where an engine cannot end with the first groups (E293), or move rows (E296).
    """
    drops, moves = list(plan.graph.having(Oversampled)), list(plan.graph.having(Balanced))
    findings = [each for node, _ in drops for each in _cannot_drop(plan, node)]
    findings += [each for node, _ in moves for each in _cannot_move(plan, node)]
    if findings:
        raise PlanError(*findings)
    for node, some in drops:
        plan = plan.noting(RULE, _text(node, some.first_groups, context))
    for node, said in moves:
        plan = _with_moves(plan, node, said, context)
    return plan


def why_together(node: Node) -> str:
    """Why a rollout whose replicas make turns together is not cut in time, or shared out."""
    drops = node.role(Oversampled) is not None
    return "it drops groups that are late" if drops else "its replicas move rows to each other"


def _cannot_drop(plan: Plan, node: Node) -> Iterator[Finding]:
    """Why a rollout cannot end with the first groups."""
    by_clock = "which groups an engine answers first is a matter of time"
    for got in _reasons(plan.instance(str(plan.action(node.name).instance)), by_clock):
        yield Finding(
            code="E293",
            what=f"{node.name} cannot drop groups that are late",
            where=node.where,
            got=got,
            expected="engines in the workers of devices that each have all of the model, or those "
            "of SGLang",
            fix="a rollout without first_groups=, of as many prompts as the batch has",
        )


def _cannot_move(plan: Plan, node: Node) -> Iterator[Finding]:
    """Why the rows of a rollout cannot move from engine to engine."""
    by_clock = "which rows an engine ends, and after which token, is a matter of time"
    for got in _reasons(plan.instance(str(plan.action(node.name).instance)), by_clock):
        yield Finding(
            code="E296",
            what=f"rows of {node.name} cannot move",
            where=node.where,
            got=got,
            expected="engines in the workers of devices that each have all of the model, or those "
            "of SGLang",
            fix="a rollout without balance=",
        )


def _reasons(instance: Instance, by_clock: str) -> Iterator[str]:
    """Why an instance does neither; of what is asked `by_clock` says what its clock decides."""
    options = instance.options
    if options is None and instance.sharded:
        yield f"ranks share its weights, {instance.layout()}"
    if options is not None and not isinstance(options, SGLang):
        yield f"its engine is {options.title}"
    if isinstance(options, SGLang) and options.deterministic:
        yield f"deterministic=True, and {by_clock}"


def _with_moves(plan: Plan, node: Node, said: Balanced, context: Context) -> Plan:
    """The plan with how the rows of a rollout move, by what takes less, and a note that says so."""
    instance = plan.instance(str(plan.action(node.name).instance))
    costs, shape = context.costs, context.costs.shapes[instance.model]
    roof = None if shape is None else costs.roofline_of(node, instance, shape)
    row = None if roof is None else moved_row(roof, costs.load(node, instance.replicas))
    own = instance.engine_plan.own_process
    moves: Literal["cache", "reread"] = "reread" if own else "cache"
    moves = moves if row is None else row.shorter
    being = node.being(replace(said, moves=moves))
    nodes = tuple(being if each is node else each for each in plan.graph.nodes)
    plan = replace(plan, graph=replace(plan.graph, nodes=nodes))
    if instance.replicas == 1:
        return plan.noting(RULE, f"{node.name} has one replica, so no row moves")
    way = {"cache": "with their keys and values", "reread": "and are read again"}[moves]
    text = f"{node.name} evens the rows of its {instance.replicas} replicas after every "
    text += f"{said.every} turns; they move {way}"
    return plan.noting(RULE, text + ("" if row is None else _taken(row)))


def _taken(row: MovedRow) -> str:
    """What a row takes to move, and what that assumes."""
    again = duration(row.reread)
    if row.cache is not None:
        cache = f"{duration(row.cache)} by cache ({amount(row.size)})"
        return f": a row takes {cache}, {again} read again"
    text = f", as SGLang gives no keys and values out: a row of {row.tokens} tokens takes {again}, "
    return f"{text}if the other's cache has none of them; what the rounds take is not counted"


def _text(node: Node, wanted: int, context: Context) -> str:
    """What a reader of the plan should know of the rows that are left."""
    costs = context.costs
    begun, known = costs.begun(node), costs.lengths(node)
    dropped = begun - wanted
    groups = "group is" if dropped == 1 else "groups are"
    text = f"{node.name} begins {begun} groups and makes the {wanted} that are complete first; "
    text += f"the other {dropped} {groups} dropped, and count as drawn. Short responses are "
    return f"{text}favoured{_bias(known, costs.of_batch(node, known), node)}"


def _bias(sampled: ResponseLengths, kept: ResponseLengths, node: Node) -> str:
    """How much shorter the rows that are left are expected to be."""
    if node.as_a(SamplingOptions).ignore_eos or sampled.fixed:
        return "; here all have one length, and the first prompts are taken"
    return f": {kept.mean:.4g} tokens in the mean of {sampled.mean:.4g} that are sampled"
