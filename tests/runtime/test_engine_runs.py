"""Workers and runs with an engine: a double in this process, and the real one where it is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.errors import RunError
from rlflow.runtime.local import LocalMachine
from rlflow.runtime.record.spans import read_spans
from rlflow.runtime.worker.worker import Worker
from rlflow.runtime.worker.world import resharder
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices.cluster import cpu_cluster
from tests.conftest import ended, process
from tests.runtime.engine_pipeline import Config, colocated, grpo, split

pytestmark = pytest.mark.torch

FILE = Path(__file__).with_name("engine_pipeline.py")
HYBRID = ("--devices", "cpu:2@9.1MB")
TIGHT, TIGHT_ADAPTED = 9_100_000, 5_500_000
# Two layers with adapters of rank 4 on 128 to 128 and on 384 to 128 numbers of 4 bytes.
ADAPTERS = 2 * 4 * (128 + 128 + 384 + 128) * 4
SMALL = f"cpu:1@{TIGHT_ADAPTED / 1e6}MB"
MARK = "RLFLOW_TEST_MARK"
PYTHON = os.environ.get("RLFLOW_SGLANG_PYTHON", "")
real = pytest.mark.skipif(not PYTHON, reason="RLFLOW_SGLANG_PYTHON names no interpreter")


class Double:
    """The embedded engine behind the doors of another one, with a log of what was asked."""

    def __init__(self, model: Any, log: list[str]) -> None:
        self._model, self._log = model, log
        self.pool_awake, self.wrong = True, {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def sleep(self, mode: str) -> None:
        self._log.append(f"sleep weights {mode}")
        self._model.sleep(mode)

    def wake(self) -> None:
        self._log.append("wake weights")
        self._model.wake()

    def sleep_pool(self) -> None:
        assert self.pool_awake
        self._log.append("sleep pool")
        self.pool_awake = False

    def wake_pool(self) -> None:
        assert not self.pool_awake
        self._log.append("wake pool")
        self.pool_awake = True

    def loaded(self, version: int) -> None:
        self._log.append(f"loaded {version}")
        self._model.loaded(version)

    def check(self) -> dict[str, tuple[str, str]]:
        return self.wrong

    def close(self) -> None:
        self._log.append("close")


class Generates(TorchRollout):
    """Refuses to generate without its pool."""

    def __init__(self, model: Any, double: Double) -> None:
        super().__init__(model)
        self._double = double

    def generate(self, *args: Any) -> Any:
        assert self._double.pool_awake
        self._double._log.append("generate")
        return super().generate(*args)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What doubles of the engine were asked, in order."""
    asked: list[str] = []

    def load(path: str, *, name: str, options: Any, dtype: Any, **more: Any) -> Any:
        asked.append(f"load {name} saver={options.memory_saver} on {list(more['devices'])}")
        lora = {"lora": more["lora"]} if "lora" in more else {}
        model = load_model(path, dtype=dtype, device=more["device"], seed=more["seed"], **lora)
        double = Double(model, asked)
        return double, Generates(model, double)

    monkeypatch.setattr("rlflow.engines.process.client.load.load_sglang", load)
    return asked


def worker_of(
    placement: Any, memory: float | None = None, *, adapters: bool = False, **more: Any
) -> tuple[Any, Worker]:
    cluster = cpu_cluster(placement.num_devices(), threads=1, memory=memory)
    graph = grpo.trace(Config(adapters=adapters))
    plan = compile_plan(graph, placement, cluster, name="p").plan
    return plan, Worker(plan, seed=0, **more)


def played(plan: Any, worker: Worker, *iterations: int) -> list[dict[str, float]]:
    """The metrics of the update in each iteration."""
    found = []
    for iteration in iterations:
        for action in plan.actions:
            metrics = worker.run(action, iteration)
            found += [dict(metrics)] if action.id == "actor.update" else []
    return found


def test_an_engine_is_woken_in_stages_and_filled_between(log: list[str]) -> None:
    plan, worker = worker_of(colocated("sglang"), TIGHT)
    played(plan, worker, 0, 1)
    assert "load actor@all/sglang saver=True on []" == log[0]
    first = log[1 : log.index("generate", log.index("generate") + 1)]
    assert sorted(ORDER) == sorted(first)
    assert first.index("wake weights") < first.index("loaded 1")
    assert "loaded 2" in log
    assert "close" not in log
    LocalMachine(plan, worker, threads=1).close()
    assert "close" == log[-1]


ORDER = [
    "generate",
    "sleep weights discard",
    "sleep pool",
    "wake weights",
    "wake pool",
    "loaded 1",
]


def test_what_fits_never_sleeps(log: list[str]) -> None:
    plan, worker = worker_of(split("sglang"))
    played(plan, worker, 0)
    assert ["load actor@gen/sglang saver=False on []", "generate", "loaded 1"] == log
    assert 1 == worker.loaded["actor@gen/sglang"].version


@pytest.mark.slow
def test_an_engine_that_computes_alike_gives_the_same_numbers(log: list[str]) -> None:
    """Metrics of three iterations, bit for bit: placed apart, colocated in turns, embedded."""
    assert not log
    runs = [
        played(*worker_of(placement, memory), 0, 1, 2)
        for placement, memory in (
            (split("sglang"), None),
            (colocated("sglang"), TIGHT),
            (colocated("torch"), None),
        )
    ]
    assert runs[0] == runs[1] == runs[2]
    assert 3 == len(runs[0])


def test_an_engine_is_told_of_adapters_and_given_these_alone(log: list[str]) -> None:
    """Metrics of three iterations, bit for bit, and what the reshard moves."""
    runs = []
    for placement, memory in (
        (split("sglang"), None),
        (colocated("sglang"), TIGHT_ADAPTED),
        (colocated("torch"), None),
    ):
        plan, worker = worker_of(placement, memory, adapters=True, check_sync=True)
        runs.append(played(plan, worker, 0, 1, 2))
        for action in plan.actions:
            if action.kind == "reshard":
                ends = [worker.loaded[str(name)] for name in (action.instance, *action.targets)]
                made = resharder(None, action, ends[0], ends[1:]).run()
                assert ADAPTERS == action.cost.moved == made.received + made.copied
    assert runs[0] == runs[1] == runs[2]
    assert "sleep weights offload" in log
    assert "loaded 3" in log


def test_the_gap_between_sampled_and_trained_log_probs_is_always_logged(log: list[str]) -> None:
    assert not log
    (metrics,) = played(*worker_of(split("sglang")), 0)
    assert metrics["rollout_gap_max"] < 1e-4


def test_a_sync_that_left_the_engine_with_other_weights_is_found(log: list[str]) -> None:
    assert not log
    plan, worker = worker_of(split("sglang"), check_sync=True)
    played(plan, worker, 0)
    worker.loaded["actor@gen/sglang"].model.wrong = {"embed": ("aa", "bb")}
    with pytest.raises(RunError) as error:
        played(plan, worker, 1)
    (finding,) = error.value.findings
    assert ("E757", "embed: bb", "embed: aa") == (finding.code, finding.got, finding.expected)


def test_engines_end_where_a_start_fails_after_theirs(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RunError(summary="no averages")

    monkeypatch.setattr("rlflow.runtime.worker.worker.require_averages", refuse)
    with pytest.raises(RunError, match="no averages"):
        worker_of(split("sglang"))
    assert ["load actor@gen/sglang saver=False on []", "close"] == log


def test_a_run_without_sglang_is_refused_before_anything_starts(
    rlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLFLOW_SGLANG_PYTHON", "no/such/python")
    done = rlflow("run", FILE, "--placement", "split", "--iterations", 1)
    assert 2 == done.code
    assert "error[E250]: engine 'sglang' of actor@gen/sglang cannot start" in done.err
    assert "there is no such program" in done.err
    assert [] == list(tmp_path.iterdir())
    assert 0 == rlflow("plan", FILE, "--placement", "split").code
    assert 0 == rlflow("check", FILE).code
    assert "there is no such program" in rlflow("doctor").out


def left(mark: Path) -> list[str]:
    """The processes that inherited a mark in their environment, by number."""
    found = []
    for held in Path("/proc").glob("[0-9]*/environ"):
        try:
            named = f"{MARK}={mark}".encode() in held.read_bytes().split(b"\0")
        except OSError:
            continue
        found += [held.parent.name] * named
    return found


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"] for line in lines]


@real
@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.parametrize(
    "words",
    [
        ("--placement", "colocate", "--devices", f"cpu:1@{TIGHT / 1e6}MB"),
        pytest.param(("--placement", "split"), marks=pytest.mark.extra),
        ("--placement", "colocate", "--set", "adapters=true", "--devices", SMALL),
        pytest.param(("--placement", "stream"), marks=pytest.mark.extra),
        pytest.param(
            ("--placement", "split", "--backend", "ray"), marks=[pytest.mark.ray, pytest.mark.extra]
        ),
        pytest.param(
            ("--placement", "split", "--backend", "ray", "--set", "adapters=true"),
            marks=[pytest.mark.ray, pytest.mark.extra],
        ),
        pytest.param(("--placement", "ranks"), marks=[pytest.mark.ray, pytest.mark.extra]),
        pytest.param(("--placement", "hybrid", *HYBRID), marks=pytest.mark.ray),
    ],
    ids=["colocated", "split", "adapted", "streamed", "ray", "ray adapted", "ranks", "hybrid"],
)
def test_grpo_runs_with_sglang(words: tuple[str, ...], tmp_path: Path) -> None:
    """The first iteration's log-probs are the trainer's within 1e-4, and nothing is left."""
    folder = tmp_path / "run"
    words = (*words, "--check-sync", "--iterations", 2, "--run-dir", folder, "--threads", 1)
    done = ended(process("run", FILE, *words, cwd=tmp_path, **{MARK: str(tmp_path)}), timeout=250)
    assert 0 == done.code, done.err
    found = metrics_of(folder)
    assert 2 == len(found)
    assert all(metrics["actor.update/rollout_gap_max"] < 1e-4 for metrics in found)
    spans = read_spans(folder / "spans")
    assert ("--devices" in words) == any(span.kind == "sleep" for span in spans)
    moved = {span.bytes for span in spans if span.kind == "reshard"}
    assert ("adapters=true" not in words) or {ADAPTERS} == moved
    assert [] == left(tmp_path)


@real
@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.parametrize(
    "placement", ["continuous", pytest.param("replicas", marks=pytest.mark.extra)]
)
def test_rows_in_the_engine_live_through_updates(tmp_path: Path, placement: str) -> None:
    """It never drains: log-probs are the trainer's where no update came, and no token is too old.

    A run that goes on has what was in flight.
    """
    folder = tmp_path / "run"
    words = ("--placement", placement, "--threads", 1, "--iterations")
    for first, count in (("--run-dir", 3), ("--resume", 6)):
        asked = (*words, count, first, folder)
        done = ended(process("run", FILE, *asked, cwd=tmp_path, **{MARK: str(tmp_path)}), 250)
        assert 0 == done.code, done.err
    found = metrics_of(folder)
    assert 6 == len(found)
    assert found[0]["actor.update/rollout_gap_max"] < 1e-4
    ages = [metrics["actor.rollout/lag_max"] for metrics in found]
    assert 0 == ages[0]
    assert 1 <= max(ages) <= 3
    assert [] == left(tmp_path)


@real
@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.parametrize("placement", ["split", pytest.param("pair", marks=pytest.mark.extra)])
def test_engines_end_with_the_first_groups(tmp_path: Path, placement: str) -> None:
    """What they answer first are the rows; the requests of the others are aborted."""
    folder = tmp_path / "run"
    words = ("--placement", placement, "--threads", 1, "--iterations", 2, "--run-dir", folder)
    words = (*words, "--set", "prompts_per_iteration=12", "--set", "first_groups=4")
    done = ended(process("run", FILE, *words, cwd=tmp_path, **{MARK: str(tmp_path)}), timeout=250)
    assert 0 == done.code, done.err
    found = metrics_of(folder)
    assert [8, 8] == [metrics["actor.rollout/dropped"] for metrics in found]
    assert all(metrics["actor.rollout/dropped_tokens"] > 0 for metrics in found)
    assert all(metrics["actor.update/rollout_gap_max"] < 1e-4 for metrics in found)
    assert [] == left(tmp_path)


@real
@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.extra
def test_rows_move_between_the_engines_of_a_run(tmp_path: Path) -> None:
    """A row that two engines have made in turn is one row, with the trainer's log-probs."""
    folder = tmp_path / "run"
    words = ("--placement", "pair", "--threads", 1, "--iterations", 2, "--run-dir", folder)
    for setting in ("prompts_per_iteration=8", "max_new_tokens=60", "temperature=50", "balance=2"):
        words = (*words, "--set", setting)
    done = ended(process("run", FILE, *words, cwd=tmp_path, **{MARK: str(tmp_path)}), timeout=250)
    assert 0 == done.code, done.err
    found = metrics_of(folder)
    assert sum(metrics["actor.rollout/moved"] for metrics in found) > 0
    assert all(metrics["actor.update/rollout_gap_max"] < 1e-4 for metrics in found)
    assert [] == left(tmp_path)


@real
@pytest.mark.slow
@pytest.mark.sglang
def test_groups_of_an_engine_flow_into_one_step(
    rlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What SGLang completes first is added up first; the step is that of its rows in one piece."""
    with monkeypatch.context() as patch:
        # Rows in order of their end are as short by estimate, so that groups are kept.
        patch.setattr("rlflow.scheduler.compile.estimated_period", lambda plan: 0.0)
        words = ("--placement", "stream", "--iterations", 2, "--set", "prompts_per_iteration=6")
        words = (*words, "--record", "actor.rollout", "--save-every", 1, "--keep", 3)
        done = rlflow("run", FILE, *words, "--threads", 1, "-q", "--run-dir", tmp_path / "run")
    assert 0 == done.code, done.err
    found = metrics_of(tmp_path / "run")
    assert all(metrics["actor.update/rollout_gap_max"] < 1e-4 for metrics in found)
    ran = [span.action for span in read_spans(tmp_path / "run" / "spans")]
    assert [2, 2] == [ran.count(f"actor.update[{number}/2]") for number in (1, 2)]
    again = ("replay", tmp_path / "run", "--iteration", 1, "--placement", "split", "--json")
    whole = json.loads(rlflow(*again).out)
    for name in ("loss", "grad_norm", "kl"):
        one, other = whole["figures"][f"actor.update/{name}"]
        assert found[1][f"actor.update/{name}"] == one
        assert one == pytest.approx(other, rel=1e-4, abs=1e-7), name
    assert all(each["cosine"] > 0.9999 for each in whole["weights"])


@real
@pytest.mark.slow
@pytest.mark.sglang
def test_an_error_elsewhere_ends_the_engines(tmp_path: Path) -> None:
    words = ("--placement", "split", "--set", "broken=true", "--run-dir", tmp_path / "run")
    words = (*words, "--iterations", 1, "--threads", 1)
    done = ended(process("run", FILE, *words, cwd=tmp_path, **{MARK: str(tmp_path)}), timeout=250)
    assert 1 == done.code
    assert "no reward today" in done.err
    assert [] == left(tmp_path)
