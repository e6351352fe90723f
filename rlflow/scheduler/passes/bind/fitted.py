"""What a plan has chosen of an instance so that it fits, said in its notes with what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlflow.graph.graph import Node
from rlflow.modelfiles.paging import MOST_ROWS
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.microbatches import instance_seconds, row_parts
from rlflow.scheduler.devices.cluster import amount
from rlflow.scheduler.passes.bind.contexts import context_note
from rlflow.scheduler.passes.bind.experts import experts_note
from rlflow.scheduler.passes.bind.pipelines import stages_note
from rlflow.scheduler.plan.plan import Instance, Plan
from rlflow.scheduler.plan.text import duration


def noting_fitted(
    plan: Plan,
    declared: Sequence[Instance],
    served: Mapping[str, Sequence[Node]],
    costs: Costs,
) -> Plan:
    """The plan with a note for whatever was chosen of itself so that an update fits.

    An optimizer's state that stays on the host, layers that are computed again and slots for fewer
    rows, with what `served` nodes take longer for it; and of ranks that share the sequence, of
    experts, or tokens of rows, that lie apart, and of stages.
    """
    before = {instance.name: instance for instance in declared}
    for part in plan.parts:
        offloaded = part.kind == "optimizer" and part.on_host
        if offloaded and before[part.instance].offload != "optimizer":
            text = f"{part.name}, {amount(part.on_host)} for each device, stays on the host"
            text += " and visits the device in a step: the update does not fit otherwise"
            plan = plan.noting("offload", text)
    for instance in plan.instances:
        nodes = served[instance.name]
        if instance.recomputes != before[instance.name].recomputes:
            plan = _noting_recomputed(plan, instance, nodes, costs)
        if instance.rows_at_once != MOST_ROWS:
            plan = _noting_rows(plan, instance, nodes, costs)
        if instance.ep > 1:
            plan = plan.noting("experts", experts_note(instance, nodes, costs))
        if instance.cp > 1:
            plan = plan.noting("context", context_note(instance, nodes, costs))
        if instance.pp > 1:
            plan = plan.noting("stages", stages_note(instance, nodes, costs))
        if instance.sequence:
            plan = plan.noting("sequence", _of_sequence(instance, nodes, costs))
        text = _of_gradients(instance, nodes, costs)
        plan = plan.noting("gradients", text) if text else plan
    return plan


def _of_gradients(instance: Instance, nodes: Sequence[Node], costs: Costs) -> str:
    """In which micro-batches ranks sum gradients, and what the other way takes; empty for one."""
    shape = costs.shapes[instance.model]
    updates = [node for node in nodes if node.op.use == "train" and node.averages is None]
    if shape is None or instance.shards == 1 or not updates:
        return ""
    passes = max(
        costs.roofline_of(node, instance, shape).passes(costs.load(node, row_parts(node, instance)))
        for node in updates
    )
    if (costs.cluster.is_cpu and not instance.reduces_last) or passes == 1:
        return ""
    each, last = (replace(instance, reduces_last=once) for once in (False, True))
    held = [max(costs.held(n, way, row_parts(n, way)) for n in updates) for way in (each, last)]
    spared = instance_seconds(each, updates, costs) - instance_seconds(last, updates, costs)
    more = f"{amount(held[1] - held[0])} more"
    less = f"{duration(spared)} less by estimate" if spared > 0 else "no less by estimate"
    over = f"fsdp={instance.fsdp} " + (f"x cp={instance.cp} " if instance.cp > 1 else "")
    what = f"gradients of {instance.name} are summed over {over}"
    if instance.reduces_last:
        what += f"once, in the last of {passes} micro-batches"
        return f"{what}: that holds {more} and takes {less}"
    text = f"{what}in each of {passes} micro-batches: to wait for the last "
    return f"{text}(gradient_sync='last') would hold {more} and take {less}"


def _of_sequence(instance: Instance, nodes: Sequence[Node], costs: Costs) -> str:
    """What ranks that share the sequence hold less, in the use that holds most, and take less."""
    whole = replace(instance, sequence=False)
    text = f"ranks of {instance.name} share the tokens of norms and residuals, between the blocks "
    text += f"that tp={instance.tp} cuts (sequence=True)"
    passed = [node for node in nodes if node.op.use != "rollout" and node.averages is None]
    if costs.shapes[instance.model] is None or not passed:
        return text
    held = [
        max(costs.held(node, each, row_parts(node, each)) for node in passed)
        for each in (whole, instance)
    ]
    more = instance_seconds(instance, nodes, costs) - instance_seconds(whole, nodes, costs)
    how = "longer" if more > 0 else "shorter"
    return f"{text}: {amount(held[0] - held[1])} less, {duration(abs(more))} {how} by estimate"


def _noting_recomputed(plan: Plan, instance: Instance, nodes: Sequence[Node], costs: Costs) -> Plan:
    shape = costs.shapes[instance.model]
    if shape is None:
        return plan
    first = instance.recompute_first
    what = f"the first {first} of {shape.layers} layers" if first else "all but attention"
    kept = replace(instance, recompute=False, recompute_first=None)
    text = f"a backward of {instance.name} computes {what} again, "
    text += f"{_longer(instance, kept, nodes, costs)} (recompute={instance.recomputes!r}): "
    return plan.noting("recompute", text + "the update does not fit otherwise")


def _noting_rows(plan: Plan, instance: Instance, nodes: Sequence[Node], costs: Costs) -> Plan:
    rows, most = instance.rows_at_once, replace(instance, rows_at_once=MOST_ROWS)
    text = f"rollouts of {instance.name} generate at most {rows} rows at once, "
    text += f"{_longer(instance, most, nodes, costs)}: keys and values of more do not fit"
    return plan.noting("rows at once", text)


def _longer(chosen: Instance, other: Instance, nodes: Sequence[Node], costs: Costs) -> str:
    """How much longer the nodes of an instance take as it was chosen than otherwise."""
    more = instance_seconds(chosen, nodes, costs) - instance_seconds(other, nodes, costs)
    return f"{duration(more)} longer by estimate"
