"""How many operators torch launches for a pass over all layers, as they were counted.

Of a Qwen3 and a Qwen3-MoE with grouped products in bfloat16, views left out, with what
`own_experts` or `dispatched_experts` does with tokens. Knows shapes, and no seconds.
"""

from __future__ import annotations

from rlflow.scheduler.models.shapes import Shape

# Of a forward and its backward.
LAYER, BESIDE = (54, 103), (31, 21)
OF_EXPERTS, OF_EXPERTS_APART = (79, 117), (118, 130)


def operators(shape: Shape, times: float, *, apart: bool) -> float:
    """Operators of so many passes, of which from three on two are a backward."""
    dense, mixed = shape.layers - shape.expert_layers, shape.expert_layers
    of_experts = OF_EXPERTS_APART if apart else OF_EXPERTS
    forward, backward = (dense * LAYER[w] + mixed * of_experts[w] + BESIDE[w] for w in (0, 1))
    return times * forward if times < 3 else (times - 2) * forward + backward
