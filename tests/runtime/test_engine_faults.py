"""Runs whose engine is killed or stopped while it works: the numbers stay, or there is one error.

Rollouts are greedy, so that the tokens of a disturbed run are those of an undisturbed one. The
run is in this process and the engine in its own.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rlflow.engines.process.client.link import Link, PendingRequest
from rlflow.engines.process.client.model import EngineModel
from rlflow.engines.process.client.process_memory import members
from rlflow.graph.user.engines import SGLang
from tests.conftest import ended, process
from tests.runtime.test_engine_runs import MARK, PYTHON, left, metrics_of

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.skipif(not PYTHON, reason="RLFLOW_SGLANG_PYTHON names no interpreter"),
]

FILE = Path(__file__).with_name("fault_pipeline.py")
TIGHT = 36
ROWS, TOKENS, ITERATIONS = 32, 48, 3
PATIENCE = 15.0
COLOCATED = ("--placement", "colocate", "--devices", f"cpu:1@{TIGHT}MB")
SCRIPT = b"serve_sglang.py"


def process_group(model: EngineModel) -> int:
    assert model.replica._process is not None
    return model.replica._process.pid


def kill(model: EngineModel) -> None:
    """End the engine's own process, as by kill -9."""
    os.kill(model.replica.facts["pid"], signal.SIGKILL)


def stop(model: EngineModel) -> None:
    """Stop every process of the engine."""
    os.killpg(process_group(model), signal.SIGSTOP)


class Fault:
    """Disturbs the engine when it is asked to `do` something, the times whose numbers are `turns`.

    It is held where it is until it is disturbed: its last process, which computes, is stopped.
    A generation is disturbed once some of it has come, or before with `at_once`.
    """

    def __init__(
        self,
        do: str,
        disturb: Callable[[EngineModel], None],
        *turns: int,
        at_once: bool = False,
        loader: str = SGLang.loader,
    ) -> None:
        self.do, self.disturb, self.turns = do, disturb, turns
        self.waits = do == "generate" and not at_once
        self.loader, self.asked = loader, 0
        self.disturbed: list[int] = []
        self.models: list[EngineModel] = []
        self.threads: list[threading.Thread] = []

    def beset(self, patch: pytest.MonkeyPatch) -> None:
        """Watch the engine that a run loads."""
        module, _, name = self.loader.partition(":")
        loading, ask, sleep = getattr(import_module(module), name), Link.ask, EngineModel._sleep

        def loaded(*words: Any, **more: Any) -> Any:
            model, rollout = loading(*words, **more, patience=PATIENCE)
            self.models.append(model)
            return model, rollout

        def asked(link: Link, do: str, fields: Any, *, numbered: bool = False) -> PendingRequest:
            if do != self.do or not self.due():
                return ask(link, do, fields, numbered=numbered)
            before = link.moved
            if not self.waits:
                self.hold()
            call = ask(link, do, fields, numbered=numbered)
            self.threads.append(threading.Thread(target=self.strike, args=(link, before)))
            self.threads[-1].start()
            return call

        def slept(model: EngineModel, tag: str) -> None:
            sleep(model, tag)
            asleep = not model.pool_awake and model.state not in {"ready", "empty"}
            if self.do == "asleep" and asleep and self.due():
                link = model.replica.link()
                self.strike(link, link.moved)
                assert link.lost.wait(60)

        patch.setattr(import_module(module), name, loaded)
        patch.setattr(Link, "ask", asked)
        patch.setattr(EngineModel, "_sleep", slept)

    def due(self) -> bool:
        self.asked += 1
        return self.asked in self.turns

    def hold(self) -> None:
        os.kill(members(process_group(self.models[0]))[-1], signal.SIGSTOP)

    def strike(self, link: Link, before: float) -> None:
        """Disturb the engine, a generation once some of it has come."""
        while self.waits and link.moved == before and not link.lost.wait(0.005):
            pass
        if self.waits:
            self.hold()
        self.disturbed.append(process_group(self.models[0]))
        self.disturb(self.models[0])


class Ran:
    """A run that is over: what it said, what it read, what it left."""

    def __init__(self, rlflow: Any, folder: Path, *words: Any) -> None:
        seen = folder / "seen.jsonl"
        run = ("--run-dir", folder / "run", "--iterations", ITERATIONS, "--threads", 1)
        self.result = rlflow("run", FILE, *words, *run, "--set", f"seen={seen}")
        lines = seen.read_text().splitlines() if seen.exists() else []
        self.seen = [[tuple(row) for row in json.loads(line)] for line in lines]
        # A run that has not begun has none, and its error tells why.
        begun = (folder / "run" / "metrics.jsonl").exists()
        self.metrics = metrics_of(folder / "run") if begun else []

    def tokens(self) -> list[dict[int, list[int]]]:
        return [{sample: tokens for sample, tokens, _ in batch} for batch in self.seen]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokens and metrics of a run in which nothing happens; made once."""
    made: list[Ran] = []

    def get(rlflow: Any) -> Ran:
        if not made:
            made.append(Ran(rlflow, tmp_path_factory.mktemp("whole"), "--placement", "split"))
        return made[0]

    return get


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    """What an iteration has learned: no memory, no time, nor how far apart two engines are."""
    apart = ("gap", "asleep_bytes", "start_seconds")
    return {k: v for k, v in metrics.items() if not any(word in k for word in apart)}


def goes_on_alike(
    whole: Ran,
    watch: Fault,
    words: tuple[str, ...],
    rlflow: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disturbed run has each sample once and the numbers of a whole one, and leaves nothing."""
    monkeypatch.setenv(MARK, str(tmp_path))
    watch.beset(monkeypatch)
    found = Ran(rlflow, tmp_path, *words)
    for thread in watch.threads:
        thread.join()
    assert 0 == found.result.code, found.result.err
    (model,) = watch.models
    assert (1, 2) == (len(watch.disturbed), model.replica.starts)
    assert [] == left(tmp_path)
    assert ITERATIONS == len(found.seen)
    for iteration, batch in enumerate(found.seen):
        first = iteration * ROWS
        assert [*range(first, first + ROWS)] == sorted(sample for sample, _, _ in batch)
        assert all([iteration] * TOKENS == versions for _, _, versions in batch)
    assert whole.tokens() == found.tokens()
    assert whole.tokens()[0] != whole.tokens()[1]
    assert ITERATIONS == len(found.metrics)
    for mine, theirs in zip(found.metrics, whole.metrics, strict=True):
        assert numbers(theirs) == pytest.approx(numbers(mine), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (("generate", kill, 2), ("--placement", "split")),
        pytest.param(("generate", kill, 2), ("--placement", "stream"), marks=pytest.mark.extra),
        pytest.param(("generate", stop, 2), ("--placement", "split"), marks=pytest.mark.extra),
        pytest.param(("update", kill, 1), ("--placement", "split"), marks=pytest.mark.extra),
        pytest.param(("asleep", kill, 1), COLOCATED, marks=pytest.mark.extra),
        pytest.param(("sleep", kill, 3), COLOCATED, marks=pytest.mark.extra),
        pytest.param(("sleep", stop, 3), COLOCATED, marks=pytest.mark.extra),
    ],
    ids=["generation", "pieces", "stopped", "update", "asleep", "sleep", "stopped_sleep"],
)
def test_a_run_goes_on_with_the_same_numbers(
    fault: Any,
    words: tuple[str, ...],
    undisturbed: Any,
    rlflow: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on_alike(undisturbed(rlflow), Fault(*fault), words, rlflow, tmp_path, monkeypatch)


@pytest.mark.extra
def test_a_second_loss_ends_a_run_with_one_error(
    rlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the second iteration are lost, and again when another engine has begun them."""
    monkeypatch.setenv(MARK, str(tmp_path))
    watch = Fault("generate", kill, 2, 3, at_once=True)
    watch.beset(monkeypatch)
    found = Ran(rlflow, tmp_path, "--placement", "split")
    for thread in watch.threads:
        thread.join()
    assert 1 == found.result.code
    assert 1 == found.result.err.count("error[")
    assert "error[E584]: the engine of 'actor@gen/sglang' was lost" in found.result.err
    assert 2 == len(set(watch.disturbed))
    assert [] == left(tmp_path)
    assert [1, ROWS] == [len(found.metrics), len(found.seen[0])]


def engines(mark: Path) -> list[int]:
    """The processes of engines that inherited a mark, the first one started first."""
    found = []
    for pid in left(mark):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            found += [int(pid)] * any(word.endswith(SCRIPT) for word in words)
    return sorted(found)


def has_ended_an_iteration(folder: Path) -> bool:
    lines = folder / "run" / "metrics.jsonl"
    return lines.exists() and lines.read_text().count("\n") > 0


@pytest.mark.ray
@pytest.mark.parametrize(
    "words",
    [pytest.param(("split", "--backend", "ray"), marks=pytest.mark.extra), ("ranks",)],
    ids=["one", "ranks"],
)
def test_a_run_on_ray_goes_on_with_the_same_tokens(
    words: tuple[str, ...], undisturbed: Any, rlflow: Any, tmp_path: Path
) -> None:
    """An engine is killed wherever it is after the first iteration."""
    whole = undisturbed(rlflow)
    seen = tmp_path / "seen.jsonl"
    run = ("--run-dir", tmp_path / "run", "--iterations", ITERATIONS, "--threads", 1)
    more = ("--placement", *words, "--set", f"seen={seen}", "--check-sync")
    started = process("run", FILE, *run, *more, cwd=tmp_path, **{MARK: str(tmp_path)})
    end = time.monotonic() + 240
    while not has_ended_an_iteration(tmp_path) and time.monotonic() < end:
        assert started.poll() is None, ended(started).err
        time.sleep(0.02)
    first = engines(tmp_path)
    assert first
    os.kill(first[-1], signal.SIGKILL)
    while set(engines(tmp_path)) <= set(first):
        assert started.poll() is None, "the run ended without another engine"
        time.sleep(0.02)
    done = ended(started, timeout=250)
    assert 0 == done.code, done.err
    assert [] == left(tmp_path)
    found = [[tuple(row) for row in json.loads(line)] for line in seen.read_text().splitlines()]
    assert whole.tokens() == [{sample: tokens for sample, tokens, _ in batch} for batch in found]
