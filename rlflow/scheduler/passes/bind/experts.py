"""What a plan says of experts that lie apart: where they are, and what tokens take to get there."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.graph.graph import Node
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.microbatches import row_parts
from rlflow.scheduler.devices.cluster import amount
from rlflow.scheduler.models.flops import recomputed_layers
from rlflow.scheduler.models.mixtures import FULLEST_RANK, THERE_AND_BACK
from rlflow.scheduler.plan.plan import Instance
from rlflow.scheduler.plan.text import duration


def experts_note(instance: Instance, nodes: Sequence[Node], costs: Costs) -> str:
    """Where an instance's experts are, and the bytes and seconds of its all-to-alls, use by use."""
    text = f"experts of {instance.name} lie apart on ep={instance.ep} of its fsdp={instance.fsdp} "
    shape = costs.shapes[instance.model]
    if shape is None:
        return f"{text}ranks"
    each = shape.experts // (instance.ep * instance.tp)
    text += f"ranks, {each} of {shape.experts} in each layer on a rank"
    told = [_sent(node, instance, costs) for node in nodes if node.op.use != "rollout"]
    if any(node.op.use == "rollout" for node in nodes):
        told.append("a rollout gathers all of them")
    fullest = f"the fullest rank is taken to get {FULLEST_RANK:g} times the mean"
    return "; ".join([text, *told, fullest])


def _sent(node: Node, instance: Instance, costs: Costs) -> str:
    """What a rank sends to others in a forward, or a step with its backward, of a node's rows."""
    shape = costs.shapes[instance.model]
    assert shape is not None
    roof = costs.roofline(instance, shape)
    tokens, *_ = roof.ending(costs.load(node, row_parts(node, instance)))
    times, what = 1.0, "a pass"
    if node.op.use == "train":
        again = recomputed_layers(instance.recomputes, shape.layers) / shape.layers
        times, what = 2 + again, "a step"
    away = roof.experts.sent * (1 - 1 / instance.ep) * tokens * roof.size
    moved = THERE_AND_BACK * shape.expert_layers * times * away
    seconds = duration(times * roof.dispatched(tokens))
    return f"{what} of {node.name} sends {amount(int(moved))} a rank by all-to-all, {seconds}"
