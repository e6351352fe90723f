"""The `local` backend: this process, a thread for each lane of a device and one for the host.

The reference for every other backend: no serialisation, tensors stay where they are
made. A CPU device is a slot of threads; PyTorch's intra-op threads are shared out to it. An
accelerator is this process's first one. Copies to and from the host have a thread of their own,
so that they run beside what computes. One more thread looks after what is silent for too long: a
thread cannot be ended, so its lane is left behind, and the run ends with an error.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from rlflow.contract.progress import Progress, following
from rlflow.errors import Finding, RunError, error_text
from rlflow.runtime.execute.deadlines import Allowance, Deadlines, unwatched
from rlflow.runtime.execute.executor import TICK, Completion
from rlflow.runtime.execute.stats import logged
from rlflow.runtime.record.checkpoint import Found
from rlflow.runtime.record.devices.kernels import ready_profiler, with_kernels
from rlflow.runtime.record.devices.meter import DeviceMeter
from rlflow.runtime.record.devices.profiled import ProfiledActions
from rlflow.runtime.record.shards.places import assign_writers
from rlflow.runtime.stopping import LEFT_BEHIND
from rlflow.runtime.worker.node_states import States, saved_states, to_save
from rlflow.runtime.worker.saving import Saver, restore_components
from rlflow.scheduler.plan.plan import Action, Lane, Plan

if TYPE_CHECKING:
    from rlflow.contract.values import Stat
    from rlflow.runtime.record.checkpoint import Snapshots
    from rlflow.runtime.record.edges.recorder import Notes
    from rlflow.runtime.worker.worker import Worker

Job = tuple[Action, int, Callable[[Completion], None]]


class Runs(Protocol):
    """Carries out one action instance in the thread that calls it."""

    def run(self, action: Action, iteration: int) -> Mapping[str, float | Stat]:
        """The numbers it logs."""

    def drop_surplus(self) -> None:
        """Forget what loops have left over."""

    def skip(self, action: Action, iteration: int) -> None:
        """Let go of what one would have read that does not run."""


class LocalMachine:
    """One process with all instances of a plan: what a run starts, saves and restores."""

    def __init__(
        self,
        plan: Plan,
        worker: Worker,
        *,
        threads: int,
        deadline: float | None = None,
        profiled: ProfiledActions | None = None,
    ) -> None:
        ready_profiler(profiled)
        self._deadline = deadline
        self._profiled = profiled
        self._plan = plan
        self._worker = worker
        self._threads = threads
        self._saver = Saver(worker)

    def backend(self, now: Callable[[], float]) -> LocalBackend:
        """Start taking actions; seconds are those of `now`."""
        torch.set_num_threads(self._threads)
        there = torch.cuda.is_available() and not self._plan.cluster.startswith("cpu")
        meter = DeviceMeter("cuda:0" if there else "cpu")
        counted = _Counted(self._worker, meter, self._profiled)
        return LocalBackend(
            self._plan,
            counted,
            threads=self._threads,
            now=now,
            meter=meter,
            deadlines=Deadlines(self._plan, self._deadline),
        )

    def snapshot(self) -> tuple[Snapshots, dict[str, dict[str, int]]]:
        """What a checkpoint holds as it is now, and the optimizers' counters by model."""
        orders = assign_writers({0: self._saver.held()})
        self._saver.take(orders[0])
        return self._saver, self._saver.counters()

    def node_states(self) -> States:
        """What nodes keep from call to call."""
        states = self._worker.states
        return to_save(states.loaded, [states.to_save()])

    def restore(self, found: Found, counters: Mapping[str, Mapping[str, int]]) -> None:
        """Take the weights, optimizer states and node states of a checkpoint."""
        from rlflow.runtime.worker.memories import restored

        self._worker.states.load(saved_states(found.state))
        self._worker.store.memory = restored(self._plan.graph, found.files)
        for loaded in self._worker.trained():
            meta = counters[loaded.instance.model]
            model = loaded.instance.model
            version = self._worker.graph.written(model, found.iteration)
            restore_components(loaded, found.files, meta, version)

    def device_map(self) -> list[str]:
        """Nothing to tell: every device is this process."""
        return []

    def record_notes(self, seconds: float | None = None) -> list[Notes]:
        """What became of the record; with seconds it is finished first, in so many at most."""
        recorder = self._worker.recorder
        return [recorder.notes() if seconds is None else recorder.finish(seconds)]

    def room(self) -> int:
        """The one device of this process."""
        return 1

    def close(self) -> None:
        """End what was started beside this process."""
        self._worker.close()


class _Counted:
    """A worker whose meter is told what the rows that it makes cost; kernels as asked."""

    def __init__(
        self, worker: Worker, meter: DeviceMeter, profiled: ProfiledActions | None
    ) -> None:
        self._worker = worker
        self._meter = meter
        self._profiled = profiled

    def run(self, action: Action, iteration: int) -> Mapping[str, float | Stat]:
        """Carry out one action instance; returns the numbers it logs."""
        perform = partial(self._worker.perform, action, iteration)
        device = action.devices[0]
        result = with_kernels(self._profiled, perform, action.id, iteration, device)
        self._meter.note(result.work)
        return logged(action, [result.metrics])

    def drop_surplus(self) -> None:
        """Forget what loops have left over."""
        self._worker.drop_surplus()

    def skip(self, action: Action, iteration: int) -> None:
        """Let go of what one would have read that does not run."""
        self._worker.skip(action, iteration)


@dataclass(slots=True, eq=False)
class Watched:
    """An action instance that a thread runs: when it began, and how far it was when looked at."""

    job: Job
    jobs: queue.SimpleQueue[Job | None]
    allowed: Allowance
    since: float
    progress: Progress = field(default_factory=Progress)
    moved: float = 0.0
    moves: int = 0
    left: bool = False

    def late(self) -> bool:
        """Whether it has been silent for longer than allowed, as far as anybody has looked."""
        clock, moves = time.monotonic(), self.progress.moves
        if moves != self.moves and not self.allowed.whole:
            self.moves, self.moved = moves, clock
        return not self.left and clock - max(self.since, self.moved) > self.allowed.seconds


class LocalBackend:
    """Threads that run the actions of their lane, in the order they are submitted.

    A `meter` says what the device did while each ran. One that is silent for longer than its
    `deadlines` allow fails, and so does all that is submitted after it.
    """

    def __init__(
        self,
        plan: Plan,
        worker: Runs,
        *,
        threads: int,
        now: Callable[[], float],
        meter: DeviceMeter | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        self._deadlines = deadlines or Deadlines(plan)
        self._watched: dict[threading.Thread, Watched] = {}
        self._lock = threading.Lock()
        self._broken: RunError | None = None
        self._closed = threading.Event()
        self._worker = worker
        self._meter = meter
        self._now = now
        self._queues: dict[tuple[int, Lane], queue.SimpleQueue[Job | None]] = {}
        self._threads = []
        lanes = {(device, action.lane) for action in plan.actions for device in action.devices}
        for device, lane in sorted(lanes):
            jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
            self._queues[device, lane] = jobs
            name = f"device {device}" + (" copies" if lane == "copy" else "")
            thread = threading.Thread(
                target=self._work, args=(jobs, threads), name=name, daemon=True
            )
            thread.start()
            self._threads.append(thread)
        threading.Thread(target=self._watch, name="deadlines", daemon=True).start()

    def submit(self, action: Action, iteration: int, done: Callable[[Completion], None]) -> None:
        """Queue an action instance on its first device; the plan keeps its others free."""
        with self._lock:
            if self._broken is None:
                self._queues[action.devices[0], action.lane].put((action, iteration, done))
                return
        done(self._failed(action, iteration, self._broken, self._now()))

    def drop_surplus(self) -> None:
        """Forget what loops have left over."""
        self._worker.drop_surplus()

    def skip(self, action: Action, iteration: int) -> None:
        """Let go of the rows that an action instance would have read."""
        self._worker.skip(action, iteration)

    def close(self, *, wait: bool = True) -> None:
        """End the threads once what they run has ended, and wait for that unless told not to."""
        self._closed.set()
        for jobs in self._queues.values():
            jobs.put(None)
        left = {thread for thread, each in self._watched.items() if each.left}
        for thread in self._threads if wait else ():
            if thread not in left:
                thread.join()
        LEFT_BEHIND.update(thread for thread in self._threads if thread.is_alive())

    def _work(self, jobs: queue.SimpleQueue[Job | None], threads: int) -> None:
        torch.set_num_threads(threads)
        while (job := jobs.get()) is not None:
            action, iteration, done = job
            start = self._now()
            watched = self._begin(job, jobs)
            try:
                with following(watched.progress):
                    metrics, figures = self._run(action, iteration)
            except BaseException as error:  # handed to the executor, which raises it
                made = self._failed(action, iteration, _of_a_thread(action, error), start)
            else:
                made = Completion(
                    action=action.id,
                    iteration=iteration,
                    start=start,
                    end=self._now(),
                    metrics=metrics,
                    devices={action.devices[0]: figures} if figures else {},
                )
            if not self._end(action):
                return
            done(made)

    def _begin(self, job: Job, jobs: queue.SimpleQueue[Job | None]) -> Watched:
        """Have an action instance watched that this thread begins."""
        watched = Watched(job, jobs, self._deadlines.of(job[0]), time.monotonic())
        with self._lock:
            self._watched[threading.current_thread()] = watched
        return watched

    def _end(self, action: Action) -> bool:
        """Stop watching this thread; False where it was left behind, and its action has failed."""
        with self._lock:
            watched = self._watched[threading.current_thread()]
            if watched.left:
                return False
            del self._watched[threading.current_thread()]
            self._deadlines.took(action.id, time.monotonic() - watched.since)
        return True

    def _watch(self) -> None:
        """Leave lanes behind whose action is silent for too long, until the backend is closed."""
        while not self._closed.wait(TICK):
            try:
                with self._lock:
                    late = [each for each in self._watched.values() if each.late()]
                for watched in late:
                    self._leave(watched)
            except Exception as error:  # nobody would be told of what hangs any more
                self._leave_all(unwatched(error))
                return

    def _leave_all(self, error: RunError) -> None:
        """Fail all that is under way or waits, and all that comes."""
        with self._lock:
            self._broken = self._broken or error
            watched = [each for each in self._watched.values() if not each.left]
            for each in watched:
                each.left = True
        for each in watched:
            self._fail(each, error)

    def _leave(self, watched: Watched) -> None:
        """Fail an action instance that hangs, and those that wait behind it."""
        action, iteration, _ = watched.job
        last = str(watched.progress)
        with self._lock:
            if watched not in self._watched.values():  # it has ended in this moment
                return
            error = self._deadlines.late(
                action, iteration, watched.allowed, who=["this process"], last=last
            )
            watched.left = True
            self._broken = self._broken or error
        self._fail(watched, error)

    def _fail(self, watched: Watched, error: RunError) -> None:
        """Fail an action instance that was left, and those that wait behind it."""
        action, iteration, done = watched.job
        done(self._failed(action, iteration, error, self._now()))
        with contextlib.suppress(queue.Empty):
            while (job := watched.jobs.get_nowait()) is not None:
                job[2](self._failed(job[0], job[1], error, self._now()))

    def _failed(
        self, action: Action, iteration: int, error: BaseException, start: float
    ) -> Completion:
        return Completion(
            action=action.id, iteration=iteration, start=start, end=self._now(), error=error
        )

    def _run(
        self, action: Action, iteration: int
    ) -> tuple[Mapping[str, float | Stat], Mapping[str, float]]:
        """The numbers of an action instance, and those of its device."""
        call = partial(self._worker.run, action, iteration)
        if self._meter is None:
            return call(), {}
        return self._meter.around(call, beside=action.lane == "copy")


def _of_a_thread(action: Action, error: BaseException) -> Exception:
    """What an action raised, as an error: in this thread nobody presses Ctrl-C."""
    if isinstance(error, Exception):
        return error
    what = f"{action.id} raised {error_text(error)}"
    return RunError(
        Finding(code="E751", what=what, expected="an exception that is an error, Exception")
    )
