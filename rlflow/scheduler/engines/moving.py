"""What sleeps, wakes and updates of engines cost: they are asked, answer, and give pages back.

Measured where an earlier run did the same. Knows engines and bytes; no order.
"""

from __future__ import annotations

from dataclasses import replace

from rlflow.scheduler.costs import measurement_keys as keys
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.pieces import as_measured
from rlflow.scheduler.costs.serving import engine_key
from rlflow.scheduler.devices.collectives import as_shared
from rlflow.scheduler.engines.engines import on_cpu
from rlflow.scheduler.models.shapes import dtype_bytes, trained_parameters
from rlflow.scheduler.plan.plan import Action, Cost, Instance, Part, Plan

CALL = 0.02
CALLS = {"sleep": 1, "wake": 1, "reshard": 3}
# Seconds in which an accelerator's driver takes back the pages of a part that sleeps, or maps those
# of one that wakes: addresses stay, so graphs are replayed as they were captured. Half of what vLLM
# takes for weights and pool together on A100: it sleeps without a copy in 0.1 and 0.45 s (0.6B, 4B:
# "Zero-reload model switching with sleep mode", 2025), 0.12 and 0.31 s (0.6B, 8B: pull request
# 48337), 0.2 in the mean of logarithms; it wakes in 0.2, 0.5 and 0.47 s beyond its weights at 0.8
# of PCIe 4 (0.6B, 4B, 30B, ibid.), 0.36 in the mean.
PAGES = {"sleep": 0.1, "wake": 0.18}
ASSUMED = "assumed per call of an engine"


def move_key(costs: Costs, instance: Instance, kind: str, what: str) -> str:
    """What a sleep, wake or reshard of an engine is measured under."""
    return keys.key_of_parts(engine_key(costs, instance), f"{kind} of an engine's {what}")


def moving(cost: Cost, instance: Instance, kind: str, what: str, costs: Costs) -> Cost:
    """The cost of a sleep, wake or reshard of an engine, which is asked and answers.

    Of a reshard its weights go from the host's memory to its devices as well, of a model with
    adapters only these. Measured where an earlier run did the same.
    """
    if cost.seconds is None:
        return cost
    record = costs.cluster.measured.find(move_key(costs, instance, kind, what), costs.setting)
    if record is not None:
        return as_measured(cost, record, costs.setting)
    seconds = CALLS[kind] * CALL
    if not on_cpu(instance, costs):
        seconds += PAGES.get(kind, 0.0)
    if kind == "reshard":
        device = as_shared(costs.cluster, instance.devices)
        seconds += loaded_bytes(instance, costs) / (device.host_link * device.reached)
    return replace(cost, seconds=cost.seconds + seconds, source=f"{cost.source}; {ASSUMED}")


def loaded_bytes(instance: Instance, costs: Costs) -> int:
    """Bytes that an update brings to each device: of all weights, or of adapters."""
    model, shape = costs.graph.model(instance.model), costs.shapes[instance.model]
    if model.lora is None or shape is None:
        return costs.weights(instance) or 0
    return (trained_parameters(model, shape) or 0) * dtype_bytes(model)


def engine_moved(plan: Plan, action: Action) -> tuple[Instance, str] | None:
    """The engine that an action fills, wakes or puts to sleep, if there is one, and what of it."""
    if action.kind not in CALLS:
        return None
    names = action.targets if action.kind == "reshard" else (action.instance,)
    found = [i for i in plan.instances if i.name in names and i.engine_plan.in_process]
    if not found:
        return None
    if action.kind == "reshard":
        return found[0], brought(action.cost.moved)
    return found[0], moved_part(plan.part(str(action.part)), str(action.mode))


def brought(moved: int | None) -> str:
    """What a reshard moves, in words of a key."""
    return f"weights, {moved} bytes"


def moved_part(part: Part, mode: str) -> str:
    """What a sleep or a wake moves, in words of a key."""
    return f"{part.kind}, {mode}"
