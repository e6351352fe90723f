"""What pass `bind` says of rollouts that drop groups: who can, and what that does to the rows.

The choice is a matter of turns: engines in the workers of devices that each have all of the model
make theirs together. SGLang takes the groups in the order in which its engines answer.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.errors import Finding, PlanError
from rlflow.graph.graph import Node
from rlflow.graph.roles import Oversampled, SamplingOptions
from rlflow.graph.user.engines import SGLang
from rlflow.scheduler.context import Context
from rlflow.scheduler.costs.lengths import ResponseLengths
from rlflow.scheduler.plan.plan import Instance, Plan

RULE = "oversample"


def oversample(plan: Plan, context: Context) -> Plan:
    """The plan, with a note on every rollout that begins more groups than it makes.

    Raises PlanError (E293) where an engine cannot end with the first of them.
    """
    found = [(node, some.first_groups) for node, some in plan.graph.having(Oversampled)]
    if findings := [finding for node, _ in found for finding in _findings(plan, node)]:
        raise PlanError(*findings)
    for node, wanted in found:
        plan = plan.noting(RULE, _text(node, wanted, context))
    return plan


def _findings(plan: Plan, node: Node) -> Iterator[Finding]:
    """Why a rollout cannot end with the first groups."""
    run = plan.action(node.name)
    for got in _reasons(plan.instance(str(run.instance))):
        yield Finding(
            code="E293",
            what=f"{node.name} cannot drop groups that are late",
            where=node.where,
            got=got,
            expected="engines in the workers of devices that each have all of the model, or those "
            "of SGLang",
            fix="a rollout without first_groups=, of as many prompts as the batch has",
        )


def _reasons(instance: Instance) -> Iterator[str]:
    options = instance.options
    if options is None and instance.sharded:
        yield f"ranks share its weights, {instance.layout()}"
    if options is not None and not isinstance(options, SGLang):
        yield f"its engine is {options.title}"
    if isinstance(options, SGLang) and options.deterministic:
        yield "deterministic=True, and which groups an engine answers first is a matter of time"


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
