"""Seconds that actions take of a processor, and iterations that are played with them.

What `continuous.py` and `flowing.py` share: a side trains `pipelines/tails.py` in one process, each
action counted by the thread that does it, and the executor plays the plan again with those seconds
on a virtual clock, on which every pool has a core of its own. Knows no prediction.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common import CACHE, HERE, run
from prediction import model_directory

PIPELINE = HERE / "pipelines" / "tails.py"
WIDTHS = {"max_position_embeddings": 1024}
WARMUP = 4


class Clocked:
    """A worker that notes what each action takes of the thread that does it, one at a time."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._alone = threading.Lock()
        self.spent: dict[tuple[str, int], float] = {}

    def run(self, action: Any, iteration: int) -> Any:
        """Carry out an action instance."""
        with self._alone:
            begun = time.thread_time()
            made = self._worker.run(action, iteration)
            self.spent[action.id, iteration] = time.thread_time() - begun
        return made

    def drop_surplus(self) -> None:
        """Forget what loops have left over."""
        self._worker.drop_surplus()

    def skip(self, action: Any, iteration: int) -> None:
        """Let go of what is not read."""
        self._worker.skip(action, iteration)


class Ends:
    """A listener that notes when iterations end, and their numbers."""

    def __init__(self, now: Any) -> None:
        self._now = now
        self.ends: list[float] = []
        self.numbers: list[dict[str, float]] = []

    def started(self, action: Any, iteration: int) -> None:
        """Not needed here."""

    def finished(self, action: Any, completion: Any) -> None:
        """Not needed here."""

    def iteration_done(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Note the moment."""
        self.ends.append(self._now())
        self.numbers.append(dict(metrics))


def planned(placement: str, lengths: Any = None) -> Any:
    """The plan of a side, with lengths that are said; chunks are of complete groups."""
    from rlflow.cli.commands import Target, compile_target

    path = model_directory(WIDTHS, "2x128-long")
    target = Target(
        settings=(f"model={path}",),
        pipeline=str(PIPELINE),
        placement=placement,
        devices="cpu:2",
        threads=1,
        lengths=lengths,
        groups=True,
    )
    return compile_target(target).compiled.plan


def side(placement: str, iterations: int) -> dict[str, Any]:
    """Train in this process; seconds of actions and `inside` the engine, tokens of iterations.

    Every turn has the same random weights: of those every response ends where it is drawn to.
    """
    from rlflow.runtime.execute.executor import Executor
    from rlflow.runtime.local import LocalBackend
    from rlflow.runtime.worker.worker import Worker

    plan = planned(placement)
    worker = Worker(plan, 0, PIPELINE)
    clocked, ends, inside = Clocked(worker), Ends(time.perf_counter), engine_calls()
    backend = LocalBackend(plan, clocked, threads=1, now=time.perf_counter)
    try:
        Executor(plan, backend, ends, start=0, end=iterations, barrier=iterations).run()
    finally:
        backend.close()
        worker.close()
    assert all(numbers["actor.rollout/finished"] == 1 for numbers in ends.numbers)
    return {
        "spent": [[name, i, own] for (name, i), own in clocked.spent.items()],
        "inside": list(inside),
        "length": [numbers["actor.rollout/length"] for numbers in ends.numbers],
        "lag": [numbers.get("actor.rollout/lag_max", 0.0) for numbers in ends.numbers],
    }


def engine_calls() -> list[float]:
    """What each call of an engine takes of its thread from now on, in their order."""
    from rlflow.engines.hf.rollout import TorchRollout

    found: list[float] = []

    def clocked(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            begun = time.thread_time()
            made = call(*args, **options)
            found.append(time.thread_time() - begun)
            return made

        return timed

    TorchRollout.generate = clocked(TorchRollout.generate)  # type: ignore[method-assign]
    TorchRollout.advance = clocked(TorchRollout.advance)  # type: ignore[method-assign]
    return found


def replayed(placement: str, found: Mapping[str, Any]) -> list[float]:
    """When the iterations end where every pool has a core of its own."""
    own = {(name, i): seconds for name, i, seconds in found["spent"]}
    count = len(found["length"])
    return played(planned(placement), lambda action, i: own.get((action.id, i), 0.0), count)


def played(plan: Any, seconds: Callable[[Any, int], float], count: int) -> list[float]:
    """When iterations end on a virtual clock on which an action takes so many seconds."""
    from rlflow.runtime.execute.executor import Executor
    from rlflow.runtime.fake import FakeBackend

    backend = FakeBackend(seconds=seconds)
    ends = Ends(lambda: backend.now)
    Executor(plan, backend, ends, start=0, end=count, barrier=count, events=backend.events).run()
    return ends.ends


def mean_seconds(found: Mapping[str, Any]) -> dict[str, float]:
    """Processor seconds of each action of a side in the mean, after the first iterations."""
    seconds = defaultdict(list)
    for name, i, own in found["spent"]:
        if i >= WARMUP:
            seconds[name].append(own)
    return {name: statistics.fmean(each) for name, each in seconds.items()}


def apart(file: str, words: Sequence[str], name: str) -> dict[str, Any]:
    """What a script finds with some words in a process of its own."""
    out = CACHE / "runs" / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    run([sys.executable, file, *words, "--out", out], CACHE / "logs" / f"{name}.log")
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found
