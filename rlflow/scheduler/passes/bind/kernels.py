"""What a plan says of the kernels that compute a model on accelerators, where there is a choice."""

from __future__ import annotations

from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.plan.plan import Instance, Plan

NAMES = {"flex": "FlexAttention", "blocks": "blocks of matrix products, slowly"}


def noting_kernels(plan: Plan, costs: Costs) -> Plan:
    """The plan with a note for attention that torch's varlen kernel does not compute."""
    for instance in plan.instances:
        text = attention_note(instance, costs)
        if text is not None:
            plan = plan.noting("attention", text)
    return plan


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
