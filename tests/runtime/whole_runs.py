"""Whole runs: pipelines and the words of their runs, each run made once, and what it has left."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rlflow.cli.commands import Target, compile_target
from rlflow.runtime.execute.executor import Executor
from rlflow.runtime.record import durable
from rlflow.runtime.record.metrics import read_metrics
from tests.conftest import PIPELINES, QUICK, SMALL
from tests.runtime.whole_checkpoints import joined
from tests.test_catalogue import small

HERE = Path(__file__).with_name("pipelines")


class Declared(NamedTuple):
    """A pipeline's file, perhaps with the name of a pipeline in it, and words of all its runs."""

    file: str
    words: tuple[Any, ...]

    def said(self, *words: Any) -> Declared:
        """The same with more words; of an option that comes twice the later value counts."""
        return Declared(self.file, (*self.words, *words))


def sets(*settings: str) -> tuple[str, ...]:
    """The words of settings such as `lr=1`."""
    return tuple(word for setting in settings for word in ("--set", setting))


def declared(name: str, *, iterations: int, every: int, devices: str = "cpu:2") -> Declared:
    """A pipeline of `tests/runtime/pipelines`, saved after every so many iterations."""
    file, _, one = name.partition(":")
    words = ("--iterations", iterations, "--save-every", every, "--devices", devices)
    return Declared(f"{HERE / file}.py:{one}".removesuffix(":"), words)


def shipped(name: str, *words: Any, iterations: int = 4) -> Declared:
    """A pipeline of the catalogue, small."""
    fixed = ("--devices", "cpu:2", "--iterations", iterations, "--save-every", 2)
    return Declared(str(PIPELINES / f"{name}.py"), (*fixed, *small(name), *words))


STALE = declared("stale:ratio", iterations=7, every=4)
WEIGHTS = declared("stale:weights", iterations=4, every=4).said("--set", "epochs=2")
PAUSED = declared("paused", iterations=7, every=4)
HELPED = declared("helped", iterations=7, every=4)
LASTING = declared("lasting", iterations=7, every=3)
REPLICAS = LASTING.said("--devices", "cpu:3")
OVERSAMPLED = declared("oversampled", iterations=4, every=2)
MIXED = declared("mixed", iterations=7, every=4)
MANY = MIXED.said("--set", "multiple=3", "--save-every", 3)
KEPT = MANY.said("--set", "surplus=keep")
COUNTING = declared("counting", iterations=2, every=4)
TURNS, DRAWN, TWICE = (declared(n, iterations=4, every=2) for n in ("turns", "drawn", "twice"))
SEQUENTIAL = declared("sequential", iterations=4, every=2)
AGAIN = declared("again", iterations=4, every=2)
LEVELS = declared("levels", iterations=4, every=2, devices="cpu:3")
INSIDE, BEHIND, BY_ROW = (
    LEVELS.said("--set", word) for word in ("tracked=inside", "tracked=behind", "by=row_id")
)
ADAPTIVE = declared("adaptive", iterations=5, every=2)
AVERAGED = declared("averaged", iterations=3, every=1)
ADAPTED = declared("adapted", iterations=2, every=1)
FROZEN = declared("frozen", iterations=2, every=1)
GRPO = Declared(
    str(PIPELINES / "grpo_arithmetic.py"),
    (*SMALL, *QUICK, "--set", "group_size=4", "--devices", "cpu:2", "--iterations", 3),
)
PPO = Declared(
    str(PIPELINES / "ppo_arithmetic.py"), (*SMALL, *QUICK, "--devices", "cpu:2", "--iterations", 3)
)
DRAFTED = Declared(
    str(PIPELINES / "drafted_grpo.py"),
    ("--devices", "cpu:2", "--iterations", 4, *QUICK),
).said("--set", "prompts_per_iteration=16", "--set", "draft_tokens=2")
CHUNKS = declared("chunks", iterations=3, every=10, devices="cpu:3")
REPLAYED = shipped("replayed_grpo", "--set", "replayed=6", "--set", "eval_every=9")


class Runs:
    """Runs of pipelines; a finished one is made once, whichever test asks first, and only read."""

    def __init__(self, rlflow: Callable[..., Any], home: Path, patch: Any) -> None:
        self._rlflow, self._home, self._patch = rlflow, home, patch

    def begun(self, run: Path, what: Declared, placement: str, *words: Any, option="--run-dir"):
        """The result of the command of a run in a directory."""
        fixed = ("--placement", placement, "--threads", 1, "-q", *what.words)
        return self._rlflow("run", what.file, *fixed, option, run, *words)

    def __call__(self, what: Declared, placement: str, *words: Any) -> Path:
        """The directory of a finished run."""
        key = hashlib.sha256(repr((what, placement, words)).encode()).hexdigest()[:16]
        run, done = self._home / key, self._home / f"{key}.done"
        with (self._home / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(run, ignore_errors=True)
                result = self.begun(run, what, placement, *words)
                assert 0 == result.code, result.err
                done.touch()
        return run

    def broken(self, run: Path, fault: str, what: Declared, placement: str, *words: Any) -> Path:
        """The directory of a run that broke at a failpoint."""
        with self._patch.context() as patch:
            patch.setenv(durable.FAULT_VARIABLE, fault)
            durable.arm_from_environment()
            result = self.begun(run, what, placement, *words)
        durable.arm_from_environment()
        assert 1 == result.code, result.err
        assert "InjectedFault" in result.err
        return run

    def resumed(self, run: Path, what: Declared, placement: str, *words: Any) -> Path:
        """The directory of a run that has gone on to its end."""
        result = self.begun(run, what, placement, *words, option="--resume")
        assert 0 == result.code, result.err
        return run


def last_checkpoint(run: Path) -> Path:
    """The directory of a run's newest checkpoint."""
    return run / "checkpoints" / (run / "checkpoints" / "LATEST").read_text().strip()


def weights(run: Path) -> dict[str, Any]:
    """The tensors of the last checkpoint by component and name."""
    return joined(last_checkpoint(run))


def tensors(run: Path) -> dict[str, bytes]:
    """The bytes of every tensor of the last checkpoint."""
    import torch

    return {
        name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in weights(run).items()
    }


def kept(run: Path) -> Any:
    """What nodes keep at the last checkpoint."""
    return json.loads((last_checkpoint(run) / "manifest.json").read_text())["state"].get("nodes")


class State(NamedTuple):
    """All that two runs of the same bits have in common."""

    checkpoint: str
    metrics: bytes
    nodes: Any
    tensors: dict[str, bytes]


def state(run: Path) -> State:
    """The bits of the metrics, of what nodes keep and of every tensor of the last checkpoint."""
    lines = (run / "metrics.jsonl").read_bytes()
    return State(last_checkpoint(run).name, lines, kept(run), tensors(run))


def numbers(run: Path) -> list[dict[str, float]]:
    """The metrics of every iteration."""
    return [line.metrics for line in read_metrics(run / "metrics.jsonl")]


def plan_of(run: Path) -> Any:
    """The plan of a run, as it was saved."""
    return json.loads((run / "plan.json").read_text())


def kinds(run: Path) -> set[str]:
    """The kinds of a plan's actions."""
    return {action["kind"] for action in plan_of(run)["actions"]}


class Notes:
    """A listener that keeps the metrics of every iteration."""

    def __init__(self):
        self.found = []

    def started(self, action, iteration):
        pass

    def finished(self, action, completion):
        pass

    def iteration_done(self, iteration, metrics):
        self.found.append(dict(metrics))


def played(plan, machine, iterations=3):
    """The metrics of every iteration."""
    notes, backend = Notes(), machine.backend(time.perf_counter)
    try:
        Executor(plan, backend, notes, start=0, end=iterations, barrier=iterations).run()
    finally:
        backend.close()
    return notes.found


def on_ray(plan, file):
    """The metrics of a run on Ray, and how many entries each rank's store has left."""
    from rlflow.runtime.ray.machine import Options, RayMachine

    options = Options(kind="cpu", threads=1, seed=0, near=file, deadline=60)
    machine = RayMachine(plan, options)
    try:
        return played(plan, machine), machine.held()
    finally:
        machine.close()


def chunked(plan, kind):
    """The nodes of which a plan has actions of a kind in chunks."""
    return {a.node for a in plan.actions if a.kind == kind and a.chunk is not None}


def compiled(
    what: Declared, placement: str, *settings: str, devices: int = 3, **more: Any
) -> tuple[Any, Path]:
    """The plan of a pipeline, and its file."""
    target = Target(
        settings=settings,
        pipeline=what.file,
        placement=placement,
        devices=f"cpu:{devices}",
        threads=1,
        **more,
    )
    return compile_target(target).compiled.plan, Path(what.file)


def agree(one: list[dict[str, float]], other: list[dict[str, float]], exact: str, joined: str = ""):
    """The same metrics to the bit: all, or those whose names match and others to tolerance."""
    assert len(one) == len(other) > 0
    for whole, parts in zip(one, other, strict=True):
        assert whole.keys() == parts.keys()
        for name, value in whole.items():
            wanted: Any = value
            if joined and re.search(joined, name):
                wanted = pytest.approx(value, rel=1e-12)
            elif not re.search(exact, name):
                wanted = pytest.approx(value, rel=1e-4, abs=1e-5)
            assert parts[name] == wanted, name
