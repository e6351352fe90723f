"""A run: the executor over a backend, with everything durable around it.

Writes the run directory, saves and loads checkpoints, stops on Ctrl-C after the
iteration that has begun. It knows no algorithm and no placement.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from rlflow.errors import (
    CheckpointError,
    Finding,
    Interrupted,
    RlflowError,
    RunDirError,
    RunError,
)
from rlflow.runtime.checkpoint import Found, find_checkpoint, save_checkpoint
from rlflow.runtime.display import Display
from rlflow.runtime.durable import fault, register_faults
from rlflow.runtime.executor import Backend, Completion, Executor
from rlflow.runtime.metrics import MetricsLog, TensorBoardLog
from rlflow.runtime.node_states import SAVED, States
from rlflow.runtime.rundir import RunDir
from rlflow.runtime.spans import Span, SpanLog
from rlflow.scheduler.plan import Action, Plan
from rlflow.scheduler.trips import keeps_surplus

if TYPE_CHECKING:
    from rlflow.graph.model import Model
    from rlflow.runtime.checkpoint import Component

register_faults("run:iteration", "run:save", "run:saved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run needs besides its plan. `save_every` and `iterations` count iterations."""

    seed: int
    iterations: int
    threads: int
    save_every: int
    near: Path | None = None
    resume_line: str = ""


class Machine(Protocol):
    """Where a plan runs: this process, or worker processes of a cluster."""

    def backend(self, now: Callable[[], float]) -> Backend:
        """Start taking actions; seconds are those of `now`."""

    def components(self) -> tuple[dict[str, Component], dict[str, dict[str, int]]]:
        """What a checkpoint holds by component, and the optimizers' counters by model."""

    def node_states(self) -> States:
        """What nodes keep from call to call."""

    def restore(self, found: Found, counters: Mapping[str, Mapping[str, int]]) -> None:
        """Take the weights, optimizer states and node states of a checkpoint."""

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
        self.start = self._restore()
        self.saved = self.start
        self._metrics = MetricsLog(directory.metrics)
        self._metrics.truncate_after(self.start - 1)
        self._events = TensorBoardLog(
            directory.tensorboard, after=self.start - 1 if self.start else None
        )
        self._spans = SpanLog(directory.spans / "main.jsonl", process="main")
        self._stopping = False

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
        )
        wait = True
        try:
            shown = self.display.running(self.start, self.settings.iterations)
            with shown, self._stop_on_interrupt(executor):
                done = executor.run()
            self._save(done)
        except Exception as error:
            raise self._with_log(error) from error.__cause__
        except KeyboardInterrupt:
            wait = False
            raise
        finally:
            backend.close(wait=wait)
            self._spans.close()
            self._metrics.close()
            self._events.close()
        if self._stopping and done < self.settings.iterations:
            raise Interrupted(summary=self._stopped(done))
        return done

    def _stopped(self, done: int) -> str:
        """What to say of a run that was asked to stop."""
        text = (
            f"stopped after {done} of {self.settings.iterations} "
            f"iterations; continue with: {self.settings.resume_line}"
        )
        if self.plan.staleness and done % self.settings.save_every:
            ahead = f"{self.plan.staleness} update{'s' if self.plan.staleness > 1 else ''}"
            text += (
                f"\nrollouts ran up to {ahead} ahead and start on the newest "
                "weights there: the numbers will differ from those of a run that was not stopped"
            )
        return text

    def started(self, action: Action, iteration: int) -> None:
        """Show that an action instance has begun."""
        self.display.started(action, iteration)

    def finished(self, action: Action, completion: Completion) -> None:
        """Write the span of an action instance."""
        self._spans.record(_span(action, completion))
        self.display.finished(action, completion.end - completion.start)

    def iteration_done(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log an iteration's numbers; save a checkpoint where it is due."""
        if metrics:
            self._metrics.write(iteration, metrics)
            self._events.write(iteration, metrics)
        self.display.iteration(iteration, metrics, self._spans.now())
        fault("run:iteration")
        done = iteration + 1
        # The iteration past the end has closing actions only: it is none that was done.
        if done <= self._executor.end and done % self.settings.save_every == 0:
            self._save(done)

    def _save(self, done: int) -> None:
        """Save what the run needs to continue after `done` iterations, if it is not saved."""
        if done <= self.saved:
            return
        components, counters = self.machine.components()
        states = self.machine.node_states()
        self._metrics.sync()
        fault("run:save")
        save_checkpoint(
            self.directory.checkpoints,
            done,
            components,
            {"optimizers": dict(counters), SAVED: dict(states)},
            identity(self.plan, self.settings),
        )
        self.saved = done
        fault("run:saved")

    def _restore(self) -> int:
        """Load the last complete checkpoint; returns the iterations that are done."""
        known = identity(self.plan, self.settings)
        checkpoint = find_checkpoint(self.directory.checkpoints, identity=known)
        if checkpoint is None:
            return 0
        for rejected in checkpoint.rejected:
            self.display.warn(f"checkpoint {rejected.name} cannot be used: {rejected.reason}")
        self._refuse_fewer(checkpoint.iteration)
        self.display.say(f"resuming after iteration {checkpoint.iteration} from {checkpoint.path}")
        counters: Any = checkpoint.state["optimizers"]
        for instance in self.plan.instances:
            if instance.trained:
                _require_model(checkpoint, self.plan.graph.model(instance.model))
        self.machine.restore(checkpoint, counters)
        return checkpoint.iteration

    def _refuse_fewer(self, done: int) -> None:
        """A run that is past its end would lose its last evaluation and do nothing."""
        if done > self.settings.iterations:
            raise RunDirError(
                Finding(
                    code="E755",
                    what=f"{self.directory.path} has done {done} iterations already",
                    got=f"--iterations {self.settings.iterations}",
                    expected=f"{done} or more",
                    fix=f"--iterations {done}",
                )
            )

    @contextmanager
    def _stop_on_interrupt(self, executor: Executor) -> Iterator[None]:
        """First Ctrl-C: finish what has begun. Second: stop now."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self._stopping:
                raise KeyboardInterrupt
            self._stopping = True
            self.display.warn("stopping after what has begun; Ctrl-C again stops at once")
            executor.stop()

        previous = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _with_log(self, error: Exception) -> Exception:
        """The error, its traceback written to the run's logs, and the line that continues."""
        log = self.directory.logs / "error.txt"
        log.write_text("".join(traceback.format_exception(error)))
        ways = f"traceback: {log}\ncontinue with: {self.settings.resume_line}"
        if isinstance(error, RlflowError):
            return type(error)(*error.findings, summary=f"{error.summary}\n{ways}".strip())
        what = f"{type(error).__name__}: {error}"
        return RunError(Finding(code="E751", what=what), summary=ways)


def identity(plan: Plan, settings: Settings) -> dict[str, str]:
    """What a resumed run has to share with the one that saved: what decides its numbers.

    Where rollouts run ahead, those after a checkpoint start on the newest weights; what a loop
    leaves over is dropped there.
    """
    known = {
        "graph": plan.graph.hash,
        "seed": str(settings.seed),
        "torch": version("torch"),
        "threads": str(settings.threads),
    }
    drains = plan.staleness or keeps_surplus(plan.graph)
    return known | ({"save_every": str(settings.save_every)} if drains else {})


def _require_model(found: Found, model: Model) -> None:
    """Raise CheckpointError where a checkpoint lacks a model that the plan trains or averages."""
    name = model.name
    if not {name, *(() if model.averaged else (f"{name}.optimizer",))} <= set(found.files):
        raise CheckpointError(
            Finding(
                code="E753",
                what=f"checkpoint {found.path} has no model {name!r}",
                got=", ".join(sorted(found.files)),
            )
        )


def _span(action: Action, completion: Completion) -> Span:
    moved = action.cost.moved if action.kind != "run" else None
    moved = moved if completion.moved is None else completion.moved
    return Span(
        action=action.id,
        node=action.node or "",
        kind=action.kind,
        iteration=completion.iteration,
        chunk=action.chunk.index + 1 if action.chunk else 0,
        pool=action.pool,
        devices=action.devices,
        start=completion.start,
        end=completion.end,
        predicted=action.cost.seconds,
        bytes=moved,
        process="main",
        ok=completion.error is None,
    )
