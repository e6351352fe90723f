"""rlflow's side of `vs_verl_handover.py`: the plan of a pipeline on the Ray machine.

    python handover_side.py SPEC.json RESULT.json

The executor drives benchmarks/pipelines/handover.py on two CPU devices, one iteration after the
other. A turn begins when the rollout is handed to its worker, whose engine has all rows already,
and ends when the controller hears that the other device has read them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import HERE
from dispatch_side import DEADLINE, Turns, Watched
from gauges import Turn

if TYPE_CHECKING:
    from rlflow.runtime.execute.executor import Completion
    from rlflow.scheduler.plan.plan import Action, Plan

PIPELINE = HERE / "pipelines" / "handover.py"
ROLLOUT, READ = "actor.rollout", "read"


class Handed(Turns):
    """Times an iteration from the start of an action to the end of another."""

    def __init__(self) -> None:
        super().__init__("", READ)

    def started(self, action: Action, iteration: int) -> None:
        """A turn begins."""
        if action.id == ROLLOUT:
            self.turn = Turn()
            self._running = self.turn.running()
            self._running.__enter__()

    def finished(self, action: Action, completion: Completion) -> None:
        """A turn ends; what went wrong is raised by the executor."""
        super().finished(action, completion)


def compiled(spec: Mapping[str, Any]) -> Plan:
    """The plan for two devices of one thread each."""
    from rlflow.cli.commands import Target, compile_target

    settings = tuple(f"{key}={spec[key]}" for key in ("rows", "prompt", "response"))
    target = Target(
        pipeline=str(PIPELINE), placement="split", settings=settings, threads=1, backend="ray"
    )
    return compile_target(target).compiled.plan


def measure(spec: Mapping[str, Any]) -> dict[str, Any]:
    """All turns of one process, and the sums of what was read."""
    from rlflow.runtime.execute.executor import Executor
    from rlflow.runtime.ray.machine import Options, RayMachine

    plan = compiled(spec)
    total = spec["warmup"] + spec["turns"]
    turns = Handed()
    options = Options(kind="cpu", threads=1, seed=0, near=PIPELINE, deadline=DEADLINE)
    machine = RayMachine(plan, options)
    try:
        backend = Watched(machine.backend(time.perf_counter), turns)
        Executor(plan, backend, turns, start=0, end=total, barrier=1).run()
        backend.close()
    finally:
        machine.close()
    read = {name: turns.metrics[f"metrics/{name}_mean"] for name in ("tokens", "log_probs")}
    return {
        "turns": [asdict(turn) for turn in turns.turns[spec["warmup"] : total]],
        **{name: value * spec["rows"] for name, value in read.items()},
    }


def main() -> None:
    """Read the spec, measure, write the result."""
    given, made = (Path(word) for word in sys.argv[1:3])
    spec = json.loads(given.read_text(encoding="utf-8"))
    os.environ["HANDOVER"] = json.dumps(spec)
    made.write_text(json.dumps(measure(spec)), encoding="utf-8")


if __name__ == "__main__":
    main()
