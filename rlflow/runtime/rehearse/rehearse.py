"""A dress rehearsal of one rank of a plan: what each action holds of its device, beside the plan.

The worker is the one of a run, with its models, optimizers, bodies, sleeps and wakes, on a device
whose tensors hold no data. What cannot be done without data, or in another process, is left
out and said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from rlflow.runtime.rehearse.device import DEVICE, NoData, without_data
from rlflow.runtime.rehearse.rows import NothingKept, RowsAtLongest, RowSizes
from rlflow.runtime.worker.worker import Worker
from rlflow.runtime.worker.world import Where, meshes_of
from rlflow.scheduler.plan.plan import Action, Instance, Plan

# The largest difference that is none, as a part of what is planned.
TOLERANCE = 0.05
# Fewer bytes are none either: about what a matrix library works in, and no plan turns on them.
LEAST = 64 << 20
# The first iteration makes what the others find there.
ITERATIONS = 2
SAVE = "copies of a save, on the host"

Kinds = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedAction:
    """The most bytes of an action on one device, planned and found, and what they are of."""

    action: str
    planned: int
    found: int
    planned_of: Kinds
    found_of: Kinds

    @property
    def difference(self) -> float:
        """What was found beyond the plan, as a part of it; below 0 where that is less."""
        return self.found / self.planned - 1 if self.planned else float(self.found > 0)

    @property
    def agrees(self) -> bool:
        """Whether plan and rehearsal differ by no more than `TOLERANCE`, or `LEAST` bytes."""
        return abs(self.found - self.planned) <= max(TOLERANCE * self.planned, LEAST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What was rehearsed on a device of a plan, and what was left out, each with the reason."""

    device: int
    actions: tuple[RehearsedAction, ...]
    left_out: tuple[tuple[str, str], ...]


class OneRank:
    """The world of one rank whose peers are not there; engines of other processes are not either.

    `own` is the device of the plan that it stands for.
    """

    device = DEVICE
    helped: tuple[Instance, ...] = ()

    def __init__(self, plan: Plan, own: int) -> None:
        self.plan = plan
        self.own = own
        here = [i for i in plan.instances if own in i.owners and not i.engine_plan.in_process]
        self.instances = tuple(here)
        ranks = {device: rank for rank, device in enumerate(devices_of(plan))}
        self._meshes = {i.name: meshes_of(i, ranks, DEVICE) for i in here if i.sharded}

    def where(self, instance: Instance) -> Where:
        """Where an instance is loaded."""
        found = self._meshes.get(instance.name)
        return Where(device=DEVICE, meshes=found, ranks=(), nodes=None)

    def peers(self, action: Action) -> None:
        """Nobody is there to add numbers up with."""


def rehearse_on(plan: Plan, own: int, sizes: Mapping[str, RowSizes], vocabulary: int) -> Rehearsal:
    """Play two iterations on a device of a plan; figures are of the second.

    `sizes` are the rows of every run of a model, by action. Models are read from directories with a
    config.json, weights need not be there.
    """
    models = tuple(m.model_copy(update={"init": "random"}) for m in plan.graph.models)
    plan = replace(plan, graph=replace(plan.graph, models=models))
    devices = devices_of(plan)
    live = NoData(lambda tensor: kind_of_tensor(tensor, vocabulary))
    with without_data(live, len(devices), devices.index(own)), live:
        worker = Worker(plan, seed=0, world=OneRank(plan, own), memory=live)  # type: ignore[arg-type]
        worker._reading = RowsAtLongest(sizes, vocabulary)  # type: ignore[assignment]
        worker.store = NothingKept()
        found: list[RehearsedAction] = []
        for iteration in range(ITERATIONS):
            found = list(_turn(plan, worker, live, iteration))
        found += [*_hosted(plan, worker), *_save(plan, worker, own)]
        worker.close()
    return Rehearsal(device=own, actions=tuple(found), left_out=tuple(left_out(plan, own)))


def devices_of(plan: Plan) -> list[int]:
    """The devices of all pools, in the order of their ranks."""
    return sorted({device for pool in plan.pools.values() for device in pool})


def _hosted(plan: Plan, worker: Worker) -> Iterator[RehearsedAction]:
    """What activations have taken of the host's memory, beside what the plan counts for them."""
    for loaded in worker.trained():
        hosted = getattr(loaded.model, "activations", None)
        if hosted is not None:
            planned = plan.part(loaded.instance.activations).on_host
            size = hosted.pieces.num_bytes()
            yield RehearsedAction(
                action=f"{loaded.instance.activations}, on the host",
                planned=planned,
                found=size,
                planned_of=((loaded.instance.name, planned),),
                found_of=((loaded.instance.name, size),),
            )


def kind_of_tensor(tensor: Tensor, vocabulary: int) -> str | None:
    """`logits` for a number for each word of a vocabulary."""
    return "logits" if tensor.ndim > 1 and tensor.shape[-1] == vocabulary else None


def _turn(plan: Plan, worker: Worker, live: NoData, iteration: int) -> Iterator[RehearsedAction]:
    """Carry out an iteration on the device; what each run of a model took."""
    awake = awake_at_end(plan) if iteration else set(plan.awake_at_start)
    own = worker.world.own if worker.world is not None else 0
    for action in plan.actions:
        if action.kind in ("sleep", "wake") and own in action.devices:
            (awake.discard if action.kind == "sleep" else awake.add)(str(action.part))
            worker.perform(action, iteration)
        elif action.kind == "reshard":
            arrived(worker, action, iteration)
        elif reason_left_out(plan, action, own) is None and action.due(iteration):
            live.restart()
            worker.perform(action, iteration)
            planned = dict(planned_kinds(plan, action, awake, own))
            yield RehearsedAction(
                action=action.id,
                planned=sum(planned.values()),
                found=live.most,
                planned_of=tuple(planned.items()),
                found_of=tuple(sorted(live.at_most.items(), key=lambda kind: -kind[1])),
            )


def _save(plan: Plan, worker: Worker, own: int) -> Iterator[RehearsedAction]:
    """What a save copies of the device to its host, beside what the plan counts there for it."""
    planned = {s.instance: s.size for s in plan.saved if own in plan.instance(s.instance).devices}
    found: dict[str, int] = {}
    for loaded in worker.trained():
        parts = (shard.tensor for part in loaded.saved().values() for shard in part.values())
        size = sum(tensor.numel() * tensor.element_size() for tensor in parts)
        found[loaded.instance.name] = size // loaded.instance.replicas
    if planned:
        yield RehearsedAction(
            action=SAVE,
            planned=sum(planned.values()),
            found=sum(found.values()),
            planned_of=tuple(planned.items()),
            found_of=tuple(found.items()),
        )


def awake_at_end(plan: Plan) -> set[str]:
    """The parts that are awake between two turns."""
    awake = set(plan.awake_at_start)
    for action in plan.actions:
        if action.kind in ("sleep", "wake"):
            (awake.discard if action.kind == "sleep" else awake.add)(str(action.part))
    return awake


def arrived(worker: Worker, action: Action, iteration: int) -> None:
    """Take note that weights came, where no rank is there to send them."""
    for name in action.targets:
        if name in worker.loaded:
            target = worker.loaded[name]
            target.version = worker.graph.written(target.instance.model, iteration + 1)
            target.model.loaded(target.version)


def planned_kinds(
    plan: Plan, action: Action, awake: set[str], own: int
) -> Iterator[tuple[str, int]]:
    """What a plan counts on a device while an action runs, of the worker's own process.

    Gradients that ranks share are gone after their update, also where a plan leaves them awake:
    they count for an action that needs them.
    """
    used = {name for each in plan.actions for name in each.needs}
    totals: dict[str, int] = {}
    for part in plan.parts:
        outside = plan.instance(part.instance).engine_plan.in_process
        if own not in part.devices or outside or part.name not in used:
            continue
        shared = part.kind == "gradients" and plan.instance(part.instance).sharded
        if shared and part.name not in action.needs:
            continue
        held = part.name in awake or own in part.stays
        size = (part.size or 0) if held else part.residual
        totals[part.kind] = totals.get(part.kind, 0) + size
    rest = (action.cost.transient or 0) - sum(size for _, size in action.cost.holds)
    yield from totals.items()
    yield from action.cost.holds
    if rest > 0:
        yield "otherwise", rest


def reason_left_out(plan: Plan, action: Action, own: int) -> str | None:
    """Why an action is not rehearsed on a device; None where it is."""
    if action.kind == "reshard":
        return "the ranks that weights are sent to, or come from, are not there"
    if action.kind != "run" or action.instance is None or own not in action.devices:
        return "it holds nothing on this device"
    if plan.instance(action.instance).engine_plan.in_process:
        return "its engine is a process of its own"
    if plan.graph.node(str(action.node)).op.use == "rollout":
        return "which rows have ended is read off data after every token"
    if action.trip is not None or plan.graph.node(str(action.node)).averages:
        return "it needs the rows of others, or their numbers"
    return None


def left_out(plan: Plan, own: int) -> Iterator[tuple[str, str]]:
    """The actions that touch a device and are not rehearsed, each with the reason."""
    for action in plan.actions:
        if action.kind not in ("run", "reshard") or own not in action.devices:
            continue
        reason = reason_left_out(plan, action, own)
        if reason is not None:
            yield action.id, reason
