"""What a plan says of the stages of a pipeline: their layers, what waits, and what passes on.

And when their ranks do what, as placements say it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlflow.errors import Finding
from rlflow.graph.graph import Node
from rlflow.graph.placement import On, Schedule
from rlflow.modelfiles.layouts.stages import splitting_finding, under_way
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.microbatches import row_parts
from rlflow.scheduler.costs.ranks.pipeline import bubble, hop_bytes, late, of_stages, round_fills
from rlflow.scheduler.devices.cluster import amount
from rlflow.scheduler.models.flops import TRAINED_FORWARDS
from rlflow.scheduler.plan.engine_plan import EnginePlan
from rlflow.scheduler.plan.plan import Instance, Plan


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


def scheduled(instance: Instance, said: Sequence[On]) -> Instance:
    """The instance with what its uses `said`, none where nothing is trained, of schedule and sums.

    Gradients of weights that come after a backward are summed once, over what `fsdp` shares too.
    """
    spoken = [where.schedule for where in said if where.schedule is not None]
    schedule: Schedule = spoken[0] if spoken else "1f1b"
    sums = {where.gradient_sync for where in said}
    once = "last" in sums or (schedule == "zero-bubble" and "each" not in sums)
    return replace(instance, schedule=schedule, reduces_last=once and instance.shards > 1)


def schedule_findings(instance: Instance, plan: Plan, costs: Costs) -> list[Finding]:
    """What is wrong with the schedule of an instance, for its layout and its model."""
    if instance.schedule == "1f1b":
        return []
    model, shape = plan.graph.model(instance.model), costs.shapes[instance.model]
    family = None if shape is None else shape.family
    once = instance.shards == 1 or instance.reduces_last
    found = splitting_finding(model.path, family, instance.pp, instance.virtual, once=once)
    return [] if found is None else [replace(found, where=model.where)]


def rollout_findings(nodes: Sequence[Node], chosen: Mapping[str, On]) -> list[Finding]:
    """E248 for each rollout that is placed apart from all else and says how backwards go.

    What it shares with other uses, as `*` does, is said of those.
    """
    others = [chosen[n.name] for n in nodes if n.op.use != "rollout" and n.name in chosen]
    found = []
    for node in nodes:
        where = chosen.get(node.name)
        if where is None or node.op.use != "rollout" or where in others:
            continue
        if EnginePlan.chosen(where).own_process:
            continue
        said = where.model_dump(include={"schedule", "virtual", "gradient_sync"}, exclude_none=True)
        if wrong := " and no ".join(f"{option}={value}" for option, value in said.items()):
            found.append(
                Finding(
                    code="E248",
                    what=f"{node.name}: a rollout has no {wrong}",
                    where=node.where,
                    expected="these options for updates alone: a rollout makes no backward, and "
                    "passes whole rows through all layers",
                    fix=f'"{node.model}.rollout": rf.on("{where.pool}")',
                )
            )
    return found


def _passing(node: Node, instance: Instance, costs: Costs) -> str:
    """What a node's micro-batches do in the stages."""
    shape = costs.shapes[instance.model]
    assert shape is not None
    roof, load = (
        costs.roofline_of(node, instance, shape),
        costs.load(node, row_parts(node, instance)),
    )
    passes = roof.passes(load)
    times = TRAINED_FORWARDS if node.op.use == "train" else 1
    each, filled = of_stages(roof, lambda stage: times * stage.forward(load)), None
    if roof.splits and node.op.use == "train":
        filled = of_stages(roof, lambda stage: late(stage, load))
    waits = bubble(each, passes, instance.virtual, filled, times=times)
    sent = hop_bytes(roof, roof.ending(load)[0]) * instance.virtual
    told = f"{node.name} passes {passes} micro-batches, of which stages wait {waits:.0%} for others"
    if empty := round_fills(passes, instance.pp, instance.virtual):
        told += f", and {empty} of a single token, which fill up a round"
    if node.op.use != "train":
        return f"{told} and a rank sends {amount(int(sent))} on"
    ahead = min(passes, under_way(0, instance.pp, instance.virtual))
    split = instance.schedule == "zero-bubble"
    order = "gradients of weights fill the bubble" if split else "one forward, one backward"
    told += f", the first has up to {ahead:g} under way ({order})"
    return f"{told}, and a rank sends {amount(int(sent))} on and as much back"
