"""rlflow's side of `vs_verl_dispatch.py`: the plan of a pipeline on the Ray machine.

    python dispatch_side.py SPEC.json RESULT.json

The executor drives benchmarks/pipelines/dispatch.py on two CPU devices, one iteration after
the other. A turn begins when the controller hears that the batch is made, in the host
worker, and ends when it hears that the third column has been brought back to the host.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gauges
from common import HERE
from gauges import Turn

if TYPE_CHECKING:
    from rlflow.runtime.execute.executor import Backend, Completion
    from rlflow.scheduler.plan.plan import Action, Plan

PIPELINE = HERE / "pipelines" / "dispatch.py"
DEADLINE = 120.0


class Turns:
    """Listens to the executor and times the part of an iteration between two actions."""

    def __init__(self, made: str, back: str) -> None:
        self.turns: list[Turn] = []
        self.metrics: Mapping[str, float] = {}
        self.turn: Turn | None = None
        self._made = made
        self._back = back
        self._running: Any = None

    def started(self, action: Action, iteration: int) -> None:
        """Not needed here."""

    def finished(self, action: Action, completion: Completion) -> None:
        """A turn begins or ends with the two actions."""
        if action.id == self._made:
            self.turn = Turn()
            self._running = self.turn.running()
            self._running.__enter__()
        elif action.id == self._back and self.turn is not None:
            self._running.__exit__(None, None, None)
            self.turns.append(self.turn)
            self.turn = None

    def iteration_done(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """The column's numbers are kept, to be compared."""
        self.metrics = metrics or self.metrics


class Watched:
    """A backend whose `submit` is timed while a turn is under way."""

    def __init__(self, backend: Backend, turns: Turns) -> None:
        self._backend = backend
        self._turns = turns

    def submit(self, action: Action, iteration: int, done: Callable[[Completion], None]) -> None:
        """Hand the action on."""
        if self._turns.turn is None:
            self._backend.submit(action, iteration, done)
            return
        with self._turns.turn.submits():
            self._backend.submit(action, iteration, done)

    def close(self, *, wait: bool = True) -> None:
        """Close what is watched."""
        self._backend.close(wait=wait)


def compiled(spec: Mapping[str, Any]) -> Plan:
    """The plan for two devices of one thread each."""
    from rlflow.cli.commands import Target, compile_target

    settings = tuple(f"{key}={spec[key]}" for key in ("rows", "prompt", "response"))
    target = Target(
        pipeline=str(PIPELINE), placement="two", settings=settings, threads=1, backend="ray"
    )
    return compile_target(target).compiled.plan


def ends(plan: Plan) -> tuple[str, str]:
    """The actions between which a turn lies: the making, and the way back of the column."""
    back = [action for action in plan.actions if action.kind == "transfer"][-1]
    assert back.node == "third"
    assert back.pool == "host"
    return "batch", back.id


def measure(spec: Mapping[str, Any]) -> dict[str, Any]:
    """All turns of one process."""
    from rlflow.runtime.execute.executor import Executor
    from rlflow.runtime.ray.machine import Options, RayMachine

    plan = compiled(spec)
    total = spec["warmup"] + spec["turns"]
    turns = Turns(*ends(plan))
    options = Options(kind="cpu", threads=1, seed=0, near=PIPELINE, deadline=DEADLINE)
    machine = RayMachine(plan, options)
    try:
        backend = Watched(machine.backend(time.perf_counter), turns)
        ready = gauges.resident()
        gauges.forget_peak()
        Executor(plan, backend, turns, start=0, end=total, barrier=1).run()
        peak = gauges.peak()
        backend.close()
    finally:
        machine.close()
    return {
        "turns": [asdict(turn) for turn in turns.turns[spec["warmup"] : total]],
        "actions": between(plan),
        "ready_mb": ready,
        "peak_mb": peak,
        **{name: turns.metrics[f"metrics/third_{name}"] for name in ("mean", "min", "max")},
    }


def between(plan: Plan) -> int:
    """How many actions a turn has."""
    in_turn = sorted(plan.actions, key=lambda action: -action.ahead)
    names = [action.id for action in in_turn]
    made, back = ends(plan)
    return names.index(back) - names.index(made)


def main() -> None:
    """Read the spec, measure, write the result."""
    given, made = (Path(word) for word in sys.argv[1:3])
    result = measure(json.loads(given.read_text(encoding="utf-8")))
    made.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
