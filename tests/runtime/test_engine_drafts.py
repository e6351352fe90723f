"""Workers and runs whose engine holds a drafter: a double in this process, and the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.contract.values import Drafting
from rlflow.engines.hf.loading import load_model
from rlflow.errors import RunError
from rlflow.runtime.record.spans import read_spans
from rlflow.runtime.worker.worker import Worker
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices.cluster import cpu_cluster
from tests.conftest import ended, process
from tests.runtime.draft_pipeline import Config, drafted, split
from tests.runtime.test_engine_runs import Double, Generates, metrics_of, real

pytestmark = pytest.mark.torch

FILE = Path(__file__).with_name("draft_pipeline.py")
TIGHT = 10_300_000
DRAFTER = "drafter@gen/sglang/actor"


class Beside(Double):
    """The drafter in a double, whose weights nobody generates with."""

    def loaded(self, version: int) -> None:
        self._log.append(f"drafter {version}")
        self._model.loaded(version)


class Drafts(Generates):
    """Counts what a drafter would have proposed."""

    counted = 0

    def generate(self, *args: Any) -> Any:
        self.counted += 10
        return super().generate(*args)

    def stats(self) -> Any:
        return {**super().stats(), "drafted": self.counted, "accepted": self.counted / 2}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What doubles of the engine were asked, in order, and what they were told of a drafter."""
    asked: list[Any] = []

    def load(path: str, *, dtype: Any, draft: Drafting, **more: Any) -> Any:
        asked.append(draft)
        how = {"dtype": dtype, "device": more["device"], "seed": more["seed"]}
        double = Double(load_model(path, **how), asked)
        double.draft = Beside(load_model(draft.path, init=draft.init, **how), asked)
        return double, Drafts(double._model, double)

    monkeypatch.setattr("rlflow.engines.process.client.load.load_sglang", load)
    return asked


def worker_of(placement: Any, **more: Any) -> tuple[Any, Worker]:
    cluster = cpu_cluster(placement.num_devices(), threads=1)
    plan = compile_plan(drafted.trace(Config()), placement, cluster, name="p").plan
    return plan, Worker(plan, seed=0, **more)


def turns(plan: Any, worker: Worker, iterations: int) -> list[dict[str, Any]]:
    """The metrics of the rollout in each iteration; the drafter is filled one update behind."""
    found = []
    runs = {name: [a for a in plan.actions if a.node == name] for name in plan.graph.order()}
    fill, behind = (
        next(a for a in plan.actions if a.kind == "reshard" and a.instance == f"{model}@train")
        for model in ("actor", "drafter")
    )
    for iteration in range(iterations):
        for action in (a for actions in runs.values() for a in actions if a.due(iteration)):
            metrics = worker.run(action, iteration)
            if action.node == "actor.rollout":
                found.append(dict(metrics))
                if iteration:
                    worker.run(behind, iteration - 1)
        worker.run(fill, iteration)
    return found


def test_an_engine_is_told_of_its_drafter_and_given_its_weights(log: list[Any]) -> None:
    """They are those that are trained, from the first version on; the drafter runs nothing."""
    _, worker = worker_of(split("sglang"))
    assert [Drafting(name=DRAFTER, path=str(drafted_path()), init="random", tokens=2)] == log
    trained, held = (worker.loaded[name] for name in ("drafter@train", DRAFTER))
    assert (None, 0) == (held.rollout, held.version)
    for name, shard in trained.model.shards().items():
        assert torch.equal(shard.tensor, held.model.shards()[name].tensor), name


def drafted_path() -> Path:
    return FILE.parents[2] / "pipelines" / "assets" / "arith-tiny"


@pytest.mark.slow
def test_a_reshard_fills_the_drafter_one_update_behind(log: list[Any]) -> None:
    plan, worker = worker_of(split("sglang"), check_sync=True)
    found = turns(plan, worker, 3)
    assert ["loaded 1", "drafter 1", "loaded 2", "drafter 2", "loaded 3"] == [
        word for word in log[1:] if word != "generate"
    ]
    assert [0.5] * 3 == [metrics["acceptance"] for metrics in found]
    held, trained = worker.loaded[DRAFTER], worker.loaded["drafter@train"]
    assert (2, 3) == (held.version, trained.version)
    held.model.wrong = {"embed": ("aa", "bb")}
    behind = next(a for a in plan.actions if a.targets == (DRAFTER,))
    with pytest.raises(RunError, match="E757"):
        worker.run(behind, 2)
    for name, shard in trained.model.shards().items():
        assert torch.equal(shard.tensor, held.model.shards()[name].tensor), name


@pytest.mark.slow
def test_greedy_rows_are_those_of_the_embedded_engine(log: list[Any]) -> None:
    """The double's rollout takes no drafter: the engine is to have it."""
    apart = turns(*worker_of(split("sglang")), 2)
    here = turns(*worker_of(split("torch")), 2)
    assert isinstance(log[0], Drafting)
    for one, other in zip(apart, here, strict=True):
        assert one["length"] == other["length"]


@real
@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ("--placement", "colocate", "--devices", f"cpu:1@{TIGHT / 1e6}MB"),
            marks=pytest.mark.extra,
        ),
        pytest.param(("--placement", "stream"), marks=pytest.mark.extra),
        pytest.param(("--placement", "split", "--backend", "ray"), marks=pytest.mark.ray),
    ],
    ids=["colocated", "streamed", "ray"],
)
def test_a_drafter_in_sglang_learns_and_changes_nothing(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    """Lengths and rewards are those of the embedded engine, and acceptance rises."""
    more = ("--iterations", 12, "--threads", 1)
    runs = []
    for name, where in (("sglang", (*words, "--check-sync")), ("torch", EMBEDDED)):
        folder = tmp_path / name
        done = ended(process("run", FILE, *where, *more, "--run-dir", folder, cwd=tmp_path), 250)
        assert 0 == done.code, done.err
        runs.append(metrics_of(folder))
    slept = any(span.kind == "sleep" for span in read_spans(tmp_path / "sglang" / "spans"))
    assert ("--devices" in words) == slept
    for one, other in zip(*runs, strict=True):
        for name in ("reward/mean", "actor.rollout/length", "actor.rollout/length_max"):
            assert one[name] == other[name], name
        assert one["actor.update/rollout_gap_max"] < 1e-4
    accepted = [line["actor.rollout/acceptance"] for line in runs[0]]
    assert max(accepted[:2]) < 0.15
    assert sum(accepted[-4:]) / 4 > 0.3


EMBEDDED = ("--placement", "embedded", "--devices", "cpu:2")
