"""What a plan says of the stages of a pipeline: their layers, what waits, and what passes on."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.graph.graph import Node
from rlflow.modelfiles.layouts.stages import under_way
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.microbatches import row_parts
from rlflow.scheduler.costs.ranks.pipeline import bubble, hop_bytes
from rlflow.scheduler.devices.cluster import amount
from rlflow.scheduler.plan.plan import Instance


def stages_note(instance: Instance, nodes: Sequence[Node], costs: Costs) -> str:
    """How layers are cut, and use by use the share of time that stages wait and the bytes sent."""
    layers = " + ".join(map(str, instance.stages)) if instance.stages else "as many each"
    text = f"layers of {instance.name} are cut into pp={instance.pp} "
    text += f"x virtual={instance.virtual} " if instance.virtual > 1 else ""
    text += f"stages, {layers}"
    if costs.shapes[instance.model] is None:
        return text
    passed = [node for node in nodes if node.op.use != "rollout" and node.averages is None]
    return "; ".join([text, *(_passing(node, instance, costs) for node in passed)])


def _passing(node: Node, instance: Instance, costs: Costs) -> str:
    """What a node's micro-batches do in the stages."""
    shape = costs.shapes[instance.model]
    assert shape is not None
    roof, load = (
        costs.roofline_of(node, instance, shape),
        costs.load(node, row_parts(node, instance)),
    )
    passes = roof.passes(load)
    each = [one for stage, count in roof.stages for one in (stage.forward(load),) * count]
    waits = bubble(each, passes, instance.virtual)
    sent = hop_bytes(roof, roof.ending(load)[0]) * instance.virtual
    told = f"{node.name} passes {passes} micro-batches, of which stages wait {waits:.0%} for others"
    if node.op.use != "train":
        return f"{told} and a rank sends {amount(int(sent))} on"
    ahead = min(passes, under_way(0, instance.pp, instance.virtual))
    told += f", the first has up to {ahead:g} under way (one forward, one backward)"
    return f"{told}, and a rank sends {amount(int(sent))} on and as much back"
