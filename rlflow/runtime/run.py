"""A run: the executor over a backend, with everything durable around it.

Writes the run directory, saves and loads checkpoints, stops on Ctrl-C after the
iteration that has begun. It knows no algorithm and no placement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlflow.data.paths import shown
from rlflow.errors import GraceOver, Interrupted, NumericsError, Preempted, RlflowError
from rlflow.graph.roles import SamplingOptions
from rlflow.runtime.display import Display
from rlflow.runtime.ending import ended_by, last_words, span_of, trains
from rlflow.runtime.execute.executor import Backend, Completion, Executor
from rlflow.runtime.record.changes import identity_of
from rlflow.runtime.record.checkpoint import (
    Found,
    find_checkpoint,
    list_iterations,
    save_checkpoint,
)
from rlflow.runtime.record.devices.log import DEVICE_LOG, DeviceLine, DeviceLog
from rlflow.runtime.record.durable import JSON, fault, register_faults
from rlflow.runtime.record.health import Health
from rlflow.runtime.record.identity.digests import UNKNOWN, unknown_digests
from rlflow.runtime.record.metrics import MetricsLog, read_metrics, truncate_after
from rlflow.runtime.record.resuming import (
    FRESH,
    changes_since,
    has_begun,
    require_models,
    require_more,
    without_changed,
)
from rlflow.runtime.record.rundir import RunDir
from rlflow.runtime.record.saves import LEAST, SaveRule, best_of
from rlflow.runtime.record.shards.background import Background
from rlflow.runtime.record.spans import SpanLog
from rlflow.runtime.record.stages import stage
from rlflow.runtime.record.trackers.observer import CLOSE_SECONDS, Observer
from rlflow.runtime.stopping import Stopping
from rlflow.runtime.worker.node_states import SAVED, States
from rlflow.scheduler.plan.plan import Action, Plan

if TYPE_CHECKING:
    from rlflow.runtime.record.checkpoint import Snapshots
    from rlflow.runtime.record.edges.recorder import Notes

register_faults("run:iteration", "run:save", "run:saved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run needs besides its plan. `save_every` and `iterations` count iterations.

    A checkpoint is due after every multiple of `save_every` (0: of any), when `save_seconds` have
    passed since the last. The newest `keep` stay, and the best one by a metric, `best`. Values
    named in `allowed` may differ from those that were saved; `weights` are where a new run begins,
    after the iterations of a checkpoint with its states where it has those.
    A `strict` run ends at the first sign that it learns nothing, or is about to break. An
    `observer` tells trackers of it, TensorBoard where there is none. After SIGTERM it has to be
    over in `grace` seconds, where that is said. `digests` are those of data,
    of functions and of models' files, part of the run's identity.
    """

    seed: int
    iterations: int
    threads: int
    save_every: int
    save_seconds: float = 0.0
    keep: int = 2
    best: str = ""
    allowed: tuple[str, ...] = ()
    weights: Found | None = None
    near: Path | None = None
    resume_line: str = ""
    strict: bool = False
    observer: Observer | None = None
    grace: float | None = None
    digests: Mapping[str, str] = field(default_factory=dict)


class Machine(Protocol):
    """Where a plan runs: this process, or worker processes of a cluster."""

    def backend(self, now: Callable[[], float]) -> Backend:
        """Start taking actions; seconds are those of `now`."""

    def snapshot(self) -> tuple[Snapshots, dict[str, dict[str, int]]]:
        """What a checkpoint holds, until the next one, and the optimizers' counters by model."""

    def node_states(self) -> States:
        """What nodes keep from call to call."""

    def restore(self, found: Found, counters: Mapping[str, Mapping[str, int]]) -> None:
        """Take the weights, optimizer states and node states of a checkpoint."""

    def device_map(self) -> list[str]:
        """Where each device of the plan is, a line each."""

    def record_notes(self, seconds: float | None = None) -> list[Notes]:
        """What became of recorded rows; with seconds they are written first."""

    def room(self) -> int:
        """How many devices a plan could have here now: those of this one, and those free."""

    def close(self) -> None:
        """Give back everything it holds."""


class Run:
    """Executes a plan in a run directory, from its last checkpoint if there is one."""

    def __init__(
        self, plan: Plan, settings: Settings, machine: Machine, directory: RunDir, display: Display
    ) -> None:
        self.plan = plan
        self.settings = settings
        self.machine = machine
        self.directory = directory
        self.display = display
        self._rule = SaveRule(every=settings.save_every, seconds=settings.save_seconds)
        self._again = has_begun(directory)
        self.start = self._restore()
        self.saved = self.start
        self._saved_at = time.monotonic()
        self._saving = Background()
        truncate_after(directory.metrics, self.start - 1)
        self._health = self._healthy_so_far()
        self._metrics = MetricsLog(directory.metrics)
        self._observer = settings.observer or Observer(directory.home)
        self._curve = self._known_curve()
        self._spans = SpanLog(directory.spans / "main.jsonl", process="main")
        self._devices = DeviceLog(directory.home / DEVICE_LOG)
        self._stopping = Stopping(settings.grace, display.warn)
        self._trained = False
        self._witnessed = directory.read_run().get("saved") is True

    def execute(self) -> int:
        """Run to the end; returns the iterations that are done.

        Raises Interrupted after Ctrl-C, and the error of an action that failed; both leave
        a run directory that `--resume` continues.
        """
        backend = self.machine.backend(self._spans.now)
        executor = self._executor = Executor(
            self.plan,
            backend,
            self,
            start=self.start,
            end=self.settings.iterations,
            barrier=self.settings.save_every,
            brought=self.settings.weights is not None,
        )
        wait = True
        again = self.start or self._again
        self._observer.begin(self.display.warn, after=self.start - 1 if again else None)
        try:
            running = self.display.running(self.start, self.settings.iterations)
            with running, self._stopping.on_signals(executor):
                done = executor.run()
                self._save(done)
                self._saving.join()
        except Exception as error:
            self._finish_saving()
            log, line = self.directory.logs / "error.txt", self.settings.resume_line
            diverged = isinstance(error, NumericsError) and not self._trained
            said = ended_by(self.directory.checkpoints, self.saved) if diverged else ""
            raise last_words(error, log, line, said) from error.__cause__
        except KeyboardInterrupt:
            wait = False
            self._saving.abandon()
            if self._stopping.over:  # the interpreter may have made it another
                raise GraceOver from None
            raise
        finally:
            backend.close(wait=wait)
            self._spans.close()
            self._devices.close()
            self._metrics.close()
            seconds = self._stopping.left(CLOSE_SECONDS) if wait else 0.0
            self._observer.close(seconds, record=self.machine.record_notes)
        if self._stopping.asked and done < self.settings.iterations:
            kind = Preempted if self._stopping.preempted else Interrupted
            raise kind(summary=self._stopped(done))
        return done

    def stop(self) -> None:
        """Ask `execute` to end after what has begun, from any thread; it raises Interrupted."""
        self._stopping.asked = True
        self._executor.stop()

    def hand_over(self) -> None:
        """Ask `execute` to return after what has begun: the run goes on elsewhere. Any thread."""
        self._executor.stop()

    def interrupt(self) -> None:
        """Have `execute` give up what has begun, from any thread; it raises KeyboardInterrupt."""
        self._executor.interrupt()

    def _stopped(self, done: int) -> str:
        """What to say of a run that was asked to stop."""
        text = f"stopped after {done} of {self.settings.iterations} iterations; continue with: "
        text += self.settings.resume_line
        if self.plan.staleness and self.settings.save_every and done % self.settings.save_every:
            ahead = f"{self.plan.staleness} update{'s' if self.plan.staleness > 1 else ''}"
            text += (
                f"\nrollouts ran up to {ahead} ahead and start on the newest "
                "weights there: the numbers will differ from those of a run that was not stopped"
            )
        return text

    def started(self, action: Action, iteration: int) -> None:
        """Show that an action instance has begun; raises the error of a save that has failed."""
        self._saving.check()
        self.display.started(action, iteration)

    def finished(self, action: Action, completion: Completion) -> None:
        """Write the span of an action instance."""
        self._spans.record(span_of(action, completion))
        self._trained |= trains(self.plan, action)
        seconds = completion.end - completion.start
        said: dict[str, Any] = {"action": action.id, "iteration": completion.iteration}
        for device, figures in completion.devices.items():
            line = DeviceLine(**said, device=device, seconds=seconds, figures=figures)
            self._devices.write(line)
        self.display.finished(action, seconds)

    def iteration_done(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log an iteration's numbers; save a checkpoint where it is due."""
        if metrics:
            self._metrics.write(iteration, metrics, closing=iteration >= self._executor.end)
            self._observer.write(iteration, metrics)
        self.display.iteration(iteration, metrics, self._spans.now())
        self._look_at(iteration, metrics)
        fault("run:iteration")
        name = self.settings.best.removeprefix(LEAST)
        if name in metrics:
            self._curve[iteration] = float(metrics[name])
        done = iteration + 1
        # The iteration past the end has closing actions only: it is none that was done.
        if done > self._executor.end:
            return
        due = self._rule.due(done, time.monotonic() - self._saved_at)
        if due and done == self._executor.edge:
            self._save(done)
        elif due:
            self._executor.pause()

    def _look_at(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Say, once each, what is a sign that nothing is learned; raise it in a strict run."""
        for sign in self._health.see(iteration, metrics):
            if self.settings.strict:
                raise sign.error()
            self.display.warn(sign.line())

    def _healthy_so_far(self) -> Health:
        """What the iterations before this start have shown; a strict run is told of it again."""
        sampling = self.plan.graph.having(SamplingOptions)
        health = Health(fixed={node.name for node, sampled in sampling if sampled.ignore_eos})
        for line in read_metrics(self.directory.metrics) if self.start else ():
            health.see(line.iteration, line.metrics)
        if self.settings.strict:
            health.forget()
        return health

    def _save(self, done: int) -> None:
        """Save what the run needs to continue after `done` iterations, if it is not saved.

        Waits for the save before and for a snapshot; the rest goes on beside what follows.
        """
        if done <= self.saved:
            return
        self._saving.join()
        taken, counters = self.machine.snapshot()
        state: dict[str, JSON] = {
            "optimizers": dict(counters),
            SAVED: dict(self.machine.node_states()),
        }
        self._metrics.sync()
        metric, saved = self.settings.best, list_iterations(self.directory.checkpoints)
        best = best_of(saved, self._curve, metric) if metric else None
        fault("run:save")
        self._saving.start(lambda: self._commit(done, taken, state, best), taken.give_up)
        self.saved, self._trained = done, False
        self._saved_at = time.monotonic()

    def _commit(
        self, done: int, taken: Snapshots, state: Mapping[str, JSON], best: int | None
    ) -> None:
        """Write what was taken after `done` iterations, beside the iterations that follow."""
        save_checkpoint(
            self.directory.checkpoints,
            done,
            taken,
            state,
            identity(self.plan, self.settings),
            keep=self.settings.keep,
            spare=() if best is None else (best,),
        )
        self._witness()
        fault("run:saved")

    def _witness(self) -> None:
        """Note in run.json that something was saved, so that its loss is seen."""
        if not self._witnessed:
            self.directory.note(saved=True)
            self._witnessed = True

    def _finish_saving(self) -> None:
        """Let a save of a run that has failed end, for it is where the run continues."""
        try:
            self._saving.join()
        except Exception as error:
            what = error.findings[0].what if isinstance(error, RlflowError) else error
            self.display.warn(f"the newest checkpoint was not saved: {what}")

    def _known_curve(self) -> dict[int, float]:
        """The metric that chooses the best checkpoint, by iteration, as far as it is written."""
        name = self.settings.best.removeprefix(LEAST)
        lines = read_metrics(self.directory.metrics) if name else []
        return {line.iteration: line.metrics[name] for line in lines if name in line.metrics}

    def _restore(self) -> int:
        """Load the last complete checkpoint; returns the iterations that are done.

        Without one, the weights that a new run begins with, if they are another's.
        """
        found = find_checkpoint(self.directory.checkpoints)
        if found is None:
            if self._again:
                self.display.warn("nothing was saved yet: the run begins again, as it began before")
            return self._begin()
        for text in found.warnings():
            self.display.warn(text)
        known, graph = identity(self.plan, self.settings), self.plan.graph
        allowed = self.settings.allowed
        changes = changes_since(self.directory, found.identity, known, graph, allowed)
        require_more(self.directory, found.iteration, self.settings.iterations)
        self.display.say(f"resuming after iteration {found.iteration} from {shown(found.path)}")
        for change in changes:
            self.display.say(f"from here on {change.line()}")
        if unknown_digests(found.identity, known):
            self.display.say(UNKNOWN)
        counters: Any = found.state["optimizers"]
        require_models(found, self.plan)
        with stage("reading the checkpoint"):
            self.machine.restore(without_changed(found, changes), counters)
        return found.iteration

    def _begin(self) -> int:
        """Take what a new run starts from; returns the iterations before it. Weights have none."""
        weights = self.settings.weights
        if weights is None:
            return 0
        require_models(weights, self.plan)
        for text in weights.warnings():
            self.display.warn(text)
        self.display.say(f"starting from the weights of {weights.path}")
        # Of weights alone moments and counters begin at zero.
        fresh: Any = {i.model: {"steps": 0, FRESH: 1} for i in self.plan.instances if i.trained}
        counters: Any = weights.state.get("optimizers", fresh)
        with stage("reading the checkpoint"):
            self.machine.restore(weights, counters)
        return weights.iteration


def identity(plan: Plan, settings: Settings) -> dict[str, str]:
    """What a resumed run has to share with the one that saved: what decides its numbers."""
    return identity_of(
        plan,
        seed=settings.seed,
        threads=settings.threads,
        save_every=settings.save_every,
        torch=version("torch"),
        digests=settings.digests,
    )
