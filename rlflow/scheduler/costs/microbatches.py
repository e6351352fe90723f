"""How many tokens one pass of an instance may see, so that what it holds fits its devices.

A forward or backward goes over a batch in micro-batches of whole rows; gradients are those of
the whole batch, to the rounding of sums. This file knows sizes, and no other instance's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlflow.graph.graph import Node
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.plan.plan import MICRO_TOKENS, Instance

LEAST_TOKENS = 1024


def in_micro_batches(
    instance: Instance, nodes: Sequence[Node], room: int, costs: Costs
) -> Instance:
    """The instance with micro-batches as large as fit `room` bytes; as it is where none do.

    They are halved from `MICRO_TOKENS` down, and no smaller than needed. Where none fits, an
    optimizer's state stays on the host, unless that is where the devices have their memory.
    """
    ways = [instance]
    if instance.trained and instance.offload is None and not costs.cluster.is_cpu:
        ways.append(replace(instance, offload="optimizer"))
    for way in ways:
        tokens = MICRO_TOKENS
        while tokens >= LEAST_TOKENS:
            tried = replace(way, micro_tokens=tokens)
            if all(needed(node, tried, costs) <= room for node in nodes):
                return tried
            tokens //= 2
    return instance


def needed(node: Node, instance: Instance, costs: Costs) -> int:
    """Bytes on each device while a node runs with nothing else awake; unknown sizes count 0."""
    held = costs.weights(instance) or 0
    if node.op.use == "train":
        held += (costs.gradients(instance) or 0) + (costs.moments(instance) or 0)
    parts = instance.row_parts if node.op.dispatched not in ("all", "first") else 1
    return held + costs.held(node, instance, parts)
