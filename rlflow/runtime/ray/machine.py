"""The worker processes of a plan on Ray: reserved, started, asked to save, and stopped.

One process a device and one for the host. What they hold stays with them; this process
sees names, sizes and digests. It knows no order of actions.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlflow.errors import RlflowError
from rlflow.runtime.execute.deadlines import Deadlines
from rlflow.runtime.ray.backend import RayBackend
from rlflow.runtime.ray.cluster.deadline import NoAnswer, wait
from rlflow.runtime.ray.cluster.session import Session
from rlflow.runtime.ray.made import Failed
from rlflow.runtime.ray.pools import (
    Reservation,
    answering_room,
    device_map,
    num_gpus,
    reserve,
    stable_order,
)
from rlflow.runtime.ray.rank import STARTING, Rank, Taken
from rlflow.runtime.ray.ranks import Ranks, Start
from rlflow.runtime.ray.shipping import shipped
from rlflow.runtime.record.checkpoint import Found
from rlflow.runtime.record.devices.profiled import ProfiledActions
from rlflow.runtime.record.durable import FileRecord
from rlflow.runtime.record.edges.choice import Recording
from rlflow.runtime.record.shards.places import ShardOf, ToWrite, assign_writers
from rlflow.runtime.record.stages import stage
from rlflow.runtime.worker.loading import loading
from rlflow.runtime.worker.memories import keepers
from rlflow.runtime.worker.node_states import States, saved_states, to_save
from rlflow.runtime.worker.saving import shards_of
from rlflow.scheduler.plan.plan import HOST, Instance, Plan

if TYPE_CHECKING:
    from rlflow.runtime.record.checkpoint import Snapshots
    from rlflow.runtime.record.edges.recorder import Notes

START_SECONDS = 120.0
CLOSE_SECONDS = 15.0
PROGRESS_SECONDS = 5.0
GROUPS = {"rows": 1, "copies": 1, "saving": 1, "progress": 1}
RANK: Any = ray.remote(concurrency_groups=GROUPS)(Rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the processes of a plan are started with.

    `deadline` is seconds for each action and answer; None for what `Deadlines` allows.
    """

    kind: str
    threads: int
    seed: int
    near: Path | None
    deadline: float | None = None
    check_sync: bool = False
    address: str | None = None
    profiled: ProfiledActions | None = None
    recording: Recording | None = None


class RayMachine:
    """Starts the processes of a plan; raises RunError where they are not there in time."""

    def __init__(self, plan: Plan, options: Options) -> None:
        self.plan = plan
        self.options = options
        self.deadlines = Deadlines(plan, options.deadline)
        devices = sorted({d for i in plan.pools.values() for d in i})
        cpus = len(devices) * options.threads
        gpus = 0 if options.kind == "cpu" else num_gpus()
        self._session = Session.start(
            address=options.address, cpus=cpus, gpus=gpus, deadline=self.deadlines.answering
        )
        self._reservation: Reservation | None = None
        self._ranks: Ranks | None = None
        self._loaded_states: States = {}
        self._orders: dict[int, dict[str, ToWrite]] | None = None
        self._shards: dict[str, ShardOf] = {}
        try:
            self._reservation = reserve(
                self._session,
                len(devices),
                kind=options.kind,
                threads=options.threads,
                deadline=self.deadlines.answering,
            )
            self._ranks = self._placed(devices, self._reservation)
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def ranks(self) -> Ranks:
        """The processes."""
        assert self._ranks is not None
        return self._ranks

    def device_map(self) -> list[str]:
        """One line a rank: its device, node and process."""
        reports = [self.ranks.reports[device] for device in self.ranks.devices()]
        return list(device_map(reports, tuple(range(len(reports)))))

    def room(self) -> int:
        """How many devices a plan could have now: those of this one, and free ones that answer."""
        kind, threads = self.options.kind, self.options.threads
        _, free = answering_room(self._session, kind=kind, threads=threads)
        return len(self.ranks.devices()) + free

    def backend(self, now: Callable[[], float]) -> RayBackend:
        """Start taking actions; seconds are those of `now`."""
        return RayBackend(self.plan, self.ranks, deadlines=self.deadlines, now=now)

    def snapshot(self) -> tuple[Snapshots, dict[str, dict[str, int]]]:
        """What a checkpoint holds as it is now, and the optimizers' counters by model.

        Which rank writes what is decided once: pieces stay where they are as long as a run lasts.
        """
        if self._orders is None:
            holders = sorted({d for i in self._trained() for d in i.devices})
            asked = {d: self.ranks.actor(d).pieces.remote() for d in holders}
            held = self.answers(asked, "asking where weights lie", self.deadlines.answering)
            self._orders = assign_writers(held)
            self._shards = shards_of(self._orders, held)
        kept = {devices[0] for devices in keepers(self.plan).values()}
        writers = sorted({*self._orders, *kept})
        asked = {d: self.ranks.actor(d).snapshot.remote(self._orders.get(d, {})) for d in writers}
        taken: dict[int, Taken]
        taken = self.answers(asked, "taking a snapshot", self.deadlines.answering)
        counters = {model: dict(c) for t in taken.values() for model, c in t.counters.items()}
        size = sum(each.size for each in taken.values())
        return RankSnapshots(self, tuple(writers), size, self._shards), counters

    def node_states(self) -> States:
        """What nodes keep from call to call."""
        asked = {d: self.ranks.actor(d).states.remote() for d in self.ranks.everybody()}
        found = self.answers(asked, "reading what nodes keep", self.deadlines.answering)
        return to_save(self._loaded_states, found.values())

    def restore(self, found: Found, counters: Mapping[str, Mapping[str, int]]) -> None:
        """Have every rank read its shards of a checkpoint, and take the nodes' states."""
        self._loaded_states = states = saved_states(found.state)
        asked = {d: self.ranks.actor(d).remember.remote(states) for d in self.ranks.everybody()}
        self.answers(asked, "giving back what nodes keep", self.deadlines.answering)
        files = {
            name: tuple(replace(file, path=file.path.resolve()) for file in parts)
            for name, parts in found.files.items()
        }
        size = sum(file.path.stat().st_size for parts in files.values() for file in parts)
        for device in sorted({d for devices in keepers(self.plan).values() for d in devices}):
            again = {device: self.ranks.actor(device).recall.remote(files)}
            self.answers(
                again, "giving back the rows that nodes keep", self.deadlines.for_files(size)
            )
        for instance in self._trained():
            meta = dict(counters[instance.model])
            version = self.plan.graph.written(instance.model, found.iteration)
            self._everywhere(instance, "restore", instance.name, files, meta, version, size=size)

    def held(self) -> dict[int, int]:
        """Entries in the shard store of every process, by device."""
        asked = {d: self.ranks.actor(d).held.remote() for d in self.ranks.everybody()}
        return self.answers(asked, "counting what is held", self.deadlines.answering)

    def record_notes(self, seconds: float | None = None) -> list[Notes]:
        """What became of the record in every process that answers.

        With seconds they finish it first, in so many at most.
        """
        asked = [actor.record_notes.remote(seconds) for actor in self.ranks.all()]
        allowed = PROGRESS_SECONDS + (seconds or 0.0)
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=allowed)
        found = []
        for answer in ready:
            with contextlib.suppress(Exception):  # who is lost is told by what was asked before
                found.append(ray.get(answer))
        return found

    def close(self) -> None:
        """Stop the processes, and the cluster if it was started here."""
        if self._ranks is not None:
            self._close_engines(self._ranks)
            self._ranks.kill()
        if self._reservation is not None and not self._session.embedded:
            with contextlib.suppress(Exception):
                self._reservation.release()
        self._session.close()

    def _close_engines(self, ranks: Ranks) -> None:
        """Have ranks end the processes beside them; those of a rank that is lost end with it."""
        engines = self.plan.engines
        owners = sorted({device for engine in engines for device in engine.devices})
        with contextlib.suppress(Exception):
            asked = [ranks.actor(device).close.remote() for device in owners]
            if asked:
                wait(asked, CLOSE_SECONDS, doing="ending the engines")

    def _trained(self) -> list[Instance]:
        return [instance for instance in self.plan.instances if instance.trained]

    def _placed(self, devices: Sequence[int], reservation: Reservation) -> Ranks:
        """A process in every slot; devices are numbered by where the processes are."""
        made = [
            RANK.options(
                scheduling_strategy=slot.strategy,
                num_cpus=slot.cpus,
                num_gpus=slot.gpus,
            ).remote()
            for slot in reservation.slots
        ]
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        host = RANK.options(num_cpus=0, scheduling_strategy=here).remote()
        started = Ranks({**dict(enumerate(made)), HOST: host}, {})
        self._ranks = started
        asked = [actor.report.remote() for actor in started.all()]
        with stage("starting the worker processes"):
            reports = wait(asked, START_SECONDS, doing="starting the worker processes")
        order = stable_order(reports[:-1], [slot.bundle for slot in reservation.slots])
        actors = {device: made[place] for device, place in zip(devices, order, strict=True)}
        found = {device: reports[place] for device, place in zip(devices, order, strict=True)}
        return Ranks({**actors, HOST: host}, {**found, HOST: reports[-1]})

    def _start(self) -> None:
        """Send the plan to every process, and have them meet and load their models."""
        devices = self.ranks.devices()
        first = devices[0]
        port = wait(
            [self.ranks.actor(first).hold_port.remote(self.ranks.reports[first].address)],
            START_SECONDS,
            doing="finding a port for the ranks to meet at",
        )[0]
        options = self.options
        start = Start(
            own=HOST,
            devices=devices,
            master=self.ranks.reports[first].address,
            port=port,
            token=secrets.token_hex(32),
            device="cpu" if options.kind == "cpu" else "cuda:0",
            threads=options.threads,
            seed=options.seed,
            near=options.near.resolve() if options.near else None,
            check_sync=options.check_sync,
            timeout=self.deadlines.meeting,
            profiled=options.profiled,
            recording=options.recording,
        )
        plan = ray.put(shipped(self.plan, options.near))
        asked = {
            device: self.ranks.actor(device).start.remote(
                plan, replace(start, own=device, address=self.ranks.reports[device].address)
            )
            for device in self.ranks.everybody()
        }
        engines = [each.engine_plan.settings.start_seconds for each in self.plan.engines]
        seconds = START_SECONDS + self.deadlines.loading + sum(engines)
        with stage(loading(*self.plan.instances)):
            self.answers(asked, "loading the models", seconds, moving=self._loading_goes_on({}))

    def _loading_goes_on(self, seen: dict[int, int]) -> Callable[[], bool]:
        """Says whether any rank has read more of its models than at the last question."""

        def moving() -> bool:
            if self.deadlines.fixed is not None:
                return False
            actors = {device: self.ranks.actor(device) for device in self.ranks.devices()}
            asked = {actor.progress.remote(*STARTING): d for d, actor in actors.items()}
            ready, _ = ray.wait([*asked], num_returns=len(asked), timeout=PROGRESS_SECONDS)
            before = dict(seen)
            with contextlib.suppress(Exception):  # who is lost is told by what was asked before
                seen.update({asked[ref]: ray.get(ref)[0] for ref in ready})
            return seen != before and any(seen.values())

        return moving

    def _everywhere(
        self, instance: Instance, verb: str, *words: Any, size: int = 0
    ) -> dict[int, Any]:
        """Ask every rank of an instance at once, for `size` bytes of files; answers by device."""
        asked = {
            device: getattr(self.ranks.actor(device), verb).remote(*words)
            for device in instance.devices
        }
        return self.answers(asked, f"{verb} of {instance.name}", self.deadlines.for_files(size))

    def answers(
        self,
        asked: Mapping[int, Any],
        doing: str,
        seconds: float,
        moving: Callable[[], bool] = lambda: False,
    ) -> dict[int, Any]:
        """What ranks answer in so many seconds, while none is `moving`; raises the first error.

        Where one does not answer all are stopped: nothing that is asked later would wait for less.
        """
        who = {place: self.ranks.name(device) for place, device in enumerate(asked)}
        refs = [*asked.values()]
        try:
            found = wait(refs, seconds, doing=doing, who=who, told=failure, moving=moving)
        except NoAnswer:
            self.ranks.kill()
            raise
        return dict(zip(asked, found, strict=True))


@dataclass(frozen=True, slots=True)
class RankSnapshots:
    """Snapshots that ranks hold: each writes its own files, all at once, none through another."""

    machine: RayMachine
    writers: tuple[int, ...]
    size: int
    shards: Mapping[str, ShardOf]

    def write(self, directory: Path) -> dict[str, FileRecord]:
        """Have every rank write its files; returns when all have reported."""
        where, ranks = str(directory.resolve()), self.machine.ranks
        asked = {device: ranks.actor(device).save.remote(where) for device in self.writers}
        seconds = self.machine.deadlines.for_files(self.size)
        found = self.machine.answers(asked, "saving a checkpoint", seconds)
        return {name: record for files in found.values() for name, record in files.items()}

    def give_up(self) -> None:
        """Nothing: ranks end with the machine."""


def failure(answer: object) -> RlflowError | None:
    """The error that a rank has returned, None where it is an answer."""
    return answer.raised() if isinstance(answer, Failed) else None
