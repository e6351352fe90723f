"""Engines that hold linear layers in 8-bit floats: what keeps a model from being held so.

Knows sizes and options; no order.
"""

from __future__ import annotations

from rlflow.errors import Finding
from rlflow.graph.graph import Node
from rlflow.graph.placement import On
from rlflow.graph.roles import Drafted
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.models.quantised import BLOCK, misfits_blocks
from rlflow.scheduler.plan.engine_plan import EnginePlan


def float8_findings(node: Node, where: On, costs: Costs) -> list[Finding]:
    """E679 for a model that an engine cannot hold in float8, or that would not reach it so."""
    chosen = EnginePlan.chosen(where)
    if chosen.sglang is None or not chosen.in_float8:
        return []
    model, updates = costs.graph.model(str(node.model)), chosen.sglang.updates
    shape = costs.shapes[model.name]
    misfit = "" if shape is None else misfits_blocks(shape, where.tp or 1)
    staged = updates not in (None, "device") and model.lora is None
    reasons = {
        f"model {model.name!r} is in {model.dtype}": model.dtype != "bfloat16",
        misfit: bool(misfit),
        f"updates={updates!r}": staged,
        f"{node.drafter!r} drafts in it": node.role(Drafted) is not None,
        "it drafts by its options": chosen.drafts_by_options,
    }
    wrong = [reason for reason, holds in reasons.items() if holds]
    if not wrong:
        return []
    return [
        Finding(
            code="E679",
            what=f"{node.name}: {chosen.title} cannot hold {model.name!r} in float8",
            where=model.where,
            got=" and ".join(wrong),
            expected="a dense bfloat16 model, of whose queries, keys and feed-forward layer each "
            f"rank has a multiple of {BLOCK}; updates by the device, and no drafter",
            fix=f'"{model.name}.rollout": rf.on("{where.pool}", engine=rf.SGLang())',
        )
    ]
