"""Bytes of an update beside its gradients, where those come while what they are made of goes.

Ranks that share a model have no gradients until a backward makes them, layer by layer from the
last, and each layer's activations are gone by then. Knows sizes and rows; decides nothing.
"""

from __future__ import annotations

import math

from rlflow.scheduler.costs.roofline import ACTIVATIONS, Holds, Load, Roofline
from rlflow.scheduler.plan.instance import Instance

VISITING = "states from the host"
BEYOND = "activations beyond the gradients that follow them"


def beside_gradients(
    found: Holds, instance: Instance, roof: Roofline, load: Load, size: int
) -> Holds:
    """What an update holds beside `size` bytes of gradients, the largest first.

    A second micro-batch finds the gradients of the first. Where there is one alone, the most is
    held as its backward begins, without gradients, or as it ends, with those and one layer.
    """
    tokens = math.ceil(load.prompts) * load.prompt + math.ceil(load.rows) * load.lengths.longest
    if not instance.sharded or tokens > max(roof.micro_tokens, load.longest_row):
        return found
    held = dict(found)
    activations = held.pop(ACTIVATIONS, 0)
    one = min(int(roof.kept * tokens), activations)
    held[BEYOND] = max(activations - size, one)
    return tuple(sorted(held.items(), key=lambda part: -part[1]))


def at_least(found: Holds, visiting: int) -> Holds:
    """What an update holds, or if they are more the states that visit during its step.

    By then nothing is left of a backward but the gradients.
    """
    return ((VISITING, visiting),) if visiting > sum(size for _, size in found) else found
