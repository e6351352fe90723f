"""What tensor parallelism cuts: a number of ranks that a model cannot be cut for, and what can be.

Knows widths alone; memory and rows come later.
"""

from __future__ import annotations

from rlflow.errors import Finding
from rlflow.graph.model import Model
from rlflow.scheduler.models.shapes import Shape
from rlflow.scheduler.plan.plan import Instance


def width_findings(instance: Instance, model: Model, shape: Shape) -> list[Finding]:
    """E213 where the ranks of an instance cannot cut its model.

    Ranks of an engine may be more than the key-value heads, which they then repeat.
    """
    engine = instance.engine_plan.in_process
    wrong = shape.uncut(instance.tp, repeats=engine)
    if not wrong:
        return []
    heads = "or is a multiple of the key-value heads, " if engine else ""
    expected = f"tp= that divides them, {heads}such as {_nearest(instance, shape)}"
    key, name, tp = model.name, "", _nearest(instance, shape)
    if instance.uses == ("rollout",):
        key = f"{model.name}.rollout"
    if engine:
        name = f', engine="{instance.engine}"'
    elif not shape.uncut(instance.tp, repeats=True):
        expected += "; engines in processes of their own repeat key-value heads on several ranks"
        if instance.uses == ("rollout",):
            name, tp = ', engine="sglang"', instance.tp
    line = f'"{key}": rf.on("{instance.pool}"{name}, tp={tp})'
    return [
        Finding(
            code="E213",
            where=model.where,
            what=f"{instance.name}: tp={instance.tp} does not divide the "
            f"{' and the '.join(wrong)} of {model.path}",
            got=f"{shape.heads} heads, {shape.kv_heads} key-value heads, "
            f"feed-forward width {_inside(shape)}",
            expected=expected,
            fix="" if instance.engine_plan.lies_inside else line,
        )
    ]


def _inside(shape: Shape) -> str:
    """The widths inside a layer, those of experts last."""
    of_experts = [f"{shape.expert_ffn} of each expert"] if shape.expert_ffn else []
    return " and ".join([*map(str, shape.sides), *of_experts])


def _nearest(instance: Instance, shape: Shape) -> int:
    """The most ranks, of those that divide the pool, that can cut the model; 1 at the least."""
    engine, count = instance.engine_plan.in_process, len(instance.devices)
    fitting = (n for n in range(instance.tp, 0, -1) if count % n == 0)
    return next(n for n in fitting if not shape.uncut(n, repeats=engine))
