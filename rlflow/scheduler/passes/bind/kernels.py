"""What a plan says of the kernels that compute a model on accelerators, where there is a choice."""

from __future__ import annotations

from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.plan.plan import Instance, Plan

NAMES = {"flex": "FlexAttention", "blocks": "blocks of matrix products, slowly"}


def noting_kernels(plan: Plan, costs: Costs) -> Plan:
    """The plan with notes on attention that torch's varlen kernel does not compute, and on TF32."""
    for instance in plan.instances:
        text = attention_note(instance, costs)
        if text is not None:
            plan = plan.noting("attention", text)
        if instance.tf32:
            plan = plan.noting("tf32", tf32_note(instance, plan, costs))
    return plan


def tf32_note(instance: Instance, plan: Plan, costs: Costs) -> str:
    """What TF32 changes of an instance, or why it changes nothing."""
    uses = " and ".join(instance.tf32)
    dtype = plan.graph.model(instance.model).dtype
    kind = costs.cluster.kind_of(instance.devices[0])
    if dtype != "float32":
        return f"{instance.name} ({uses}) is {dtype}, which TF32 does not change"
    if not kind.has_tf32:
        return f"{instance.name} ({uses}) runs on {kind.name}, which has no TF32: nothing changes"
    return (
        f"{instance.name} ({uses}) multiplies float32 numbers by TF32, 10 bits of a fraction "
        f"instead of 23: {kind.flops_tf32 / 1e12:.0f} Tflop/s at the most instead of "
        f"{kind.flops32 / 1e12:.0f}"
    )


def attention_note(instance: Instance, costs: Costs) -> str | None:
    """What computes attention of an instance, and why; None where that is the rule, or not known.

    Engines in processes of their own choose by themselves.
    """
    shape, engine = costs.shapes[instance.model], instance.engine_plan
    if shape is None or engine.own_process or engine.lies_inside:
        return None
    roof = costs.roofline(instance, shape)
    choice = roof.attention
    if choice.by not in NAMES:
        return None
    text = f"{instance.name} computes attention by {NAMES[choice.by]}: {choice.reason}"
    if instance.recomputes == "selective" and not roof.layers.keeps_attention:
        text += '; recompute="selective" keeps nothing of it, a backward computes it again'
    return text
