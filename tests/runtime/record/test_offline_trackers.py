"""Trackers of other makers in their offline modes: what they wrote of a run, read back."""

from __future__ import annotations

import json
import sqlite3
import struct
from pathlib import Path

import pytest

from rlflow.runtime.record.trackers.feed import Table
from rlflow.runtime.record.trackers.observer import Observer, read_ids
from tests.runtime.record.test_tensorboard import png

# Each imports for seconds, and starts a process or threads of its own.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

SECRET = "sk-" + "e" * 30
HIDDEN = {"api_key": "***", "model": "small"}
LOGGED = "select step, metrics from metrics order by step, id"
POINTS = {0: {"reward/mean": 0.5}, 1: {"reward/mean": 0.75, "loss": 2.0}}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run directory with what is attached to a tracker's run; nothing reaches a network."""
    for name, value in {
        "HOME": str(tmp_path / "home"),
        "WANDB_MODE": "offline",
        "SWANLAB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "JUDGE_API_KEY": SECRET,
    }.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "runs" / "grpo-1"
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"name": "grpo", "id": "a1b2c3"}))
    config = {"lr": 0.25, "judge": {"api_key": SECRET, "model": "small"}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "plan.json").write_text(json.dumps({"graph": "the hash of the graph"}))
    (path / "plan.txt").write_text("1  actor.update on all")
    return path


def observed(path, said):
    """Tell a tracker of two iterations, the second one with a table of samples."""
    tables = [Table(iteration=1, node="rollout", columns=("text", "reward"), rows=[("yes", 0.75)])]

    def found(last):
        return [tables.pop()] if last and tables else []

    complaints = []
    observer = Observer(path, names=(said,), picture=png, tables=lambda: found)
    observer.begin(complaints.append)
    for iteration, metrics in POINTS.items():
        observer.write(iteration, metrics)
    observer.close(120)
    assert [] == complaints
    everything = [file.read_bytes() for file in path.parent.parent.rglob("*") if file.is_file()]
    kept = [data for data in everything if SECRET.encode() in data]
    assert 1 == len(kept), "the key is in the config of this test, and nowhere else"


def log_records(path):
    """The records of a log as wandb writes it: blocks of 32 KiB, each record in pieces."""
    raw, at, record = path.read_bytes(), 7, b""
    while at < len(raw):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", raw[at : at + 7])
        record += raw[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield record
            record = b""


def test_wandb(run):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    observed(run, "wandb=mine")

    (log,) = run.glob("wandb/offline-run-*/run-*.wandb")
    records = []
    for data in log_records(log):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        records.append(record)
    points = [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    (told,) = [r.run for r in records if r.HasField("run")]
    config = {item.key: json.loads(item.value_json) for item in told.config.update}

    assert POINTS == {
        p["iteration"]: {name: p[name] for name in ("reward/mean", "loss") if name in p}
        for p in points
        if "reward/mean" in p
    }
    assert ("mine", "grpo-1", "a1b2c3") == (told.project, told.display_name, told.run_id)
    assert (0.25, HIDDEN) == (config["lr"], config["judge"])
    assert "the hash of the graph" == config["rlflow"]["graph_hash"]
    (table,) = run.glob("wandb/offline-run-*/files/media/table/samples/*.table.json")
    found = json.loads(table.read_text())
    assert (["text", "reward"], [["yes", 0.75]]) == (found["columns"], found["data"])
    (plan,) = run.glob("wandb/offline-run-*/files/media/html/plan*.html")
    assert "actor.update on all" in plan.read_text()
    assert 1 == len(list(run.glob("wandb/offline-run-*/files/media/images/graph*.png")))
    assert {"wandb": "a1b2c3"} == read_ids(run)


def test_trackio(run, tmp_path):
    pytest.importorskip("trackio")
    observed(run, "trackio=mine")

    # Its directory is read once, when it is imported: what was written is read as SQLite.
    (file,) = (tmp_path / "trackio").glob("mine*.db")
    with sqlite3.connect(file) as database:
        database.row_factory = sqlite3.Row
        logged = [(row["step"], json.loads(row["metrics"])) for row in database.execute(LOGGED)]
        (told,) = database.execute("select * from configs").fetchall()

    scalars = [(step, {k: v for k, v in m.items() if k in POINTS[1]}) for step, m in logged]
    assert sorted(POINTS.items()) == [point for point in scalars if point[1]]
    config = json.loads(told["config"])
    assert ("grpo-1", 0.25, HIDDEN) == (
        told["run_name"],
        config["lr"],
        config["judge"],
    )
    assert "the hash of the graph" == config["rlflow"]["graph_hash"]
    rest = {name: (step, value) for step, m in logged for name, value in m.items()}
    step, table = rest["samples/rollout"]
    assert (1, [{"text": "yes", "reward": 0.75}]) == (step, table["_value"])
    assert "actor.update on all" in rest["plan"][1]["_value"]
    picture = tmp_path / "trackio" / "media" / rest["graph"][1]["file_path"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {"trackio": told["run_id"]} == read_ids(run)


def test_mlflow(run):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    observed(run, "mlflow")

    client = MlflowClient()
    experiment = client.get_experiment_by_name("grpo")
    (told,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(told.info.run_id, "reward/mean")

    def attached(name):
        return Path(client.download_artifacts(told.info.run_id, name)).read_bytes()

    assert [(0, 0.5), (1, 0.75)] == [(point.step, point.value) for point in history]
    assert ("grpo-1", "FINISHED") == (told.info.run_name, told.info.status)
    assert {"lr": "0.25", "judge.model": "small", "judge.api_key": "***"} == told.data.params
    assert "the hash of the graph" == told.data.tags["rlflow.graph_hash"]
    assert b"1  actor.update on all" == attached("plan.txt")
    assert png() == attached("graph.png")
    table = json.loads(attached("samples/rollout/iteration-000001.json"))
    assert (["text", "reward"], [["yes", 0.75]]) == (table["columns"], table["data"])
    assert {"mlflow": told.info.run_id} == read_ids(run)


def test_swanlab(run):
    pytest.importorskip("swanlab")
    from swanlab.proto.swanlab.record.v1 import record_pb2
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    observed(run, "swanlab")

    (log,) = run.glob("swanlog/run-*/run-*.swanlab")
    records, reader = [], DataStoreReader()
    reader.open(log)
    for data in reader:
        record = record_pb2.Record()
        record.ParseFromString(data)
        records.append(record)
    reader.close()
    scalars = [(r.scalar.key, r.scalar.step, r.scalar.value.number) for r in records]
    (told,) = [r.start for r in records if r.HasField("start")]
    media = {r.media.key: r.media.value.items[0].filename for r in records if r.HasField("media")}
    folder = log.parent

    assert {(name, i, value) for i, each in POINTS.items() for name, value in each.items()} == {
        scalar for scalar in scalars if scalar[0]
    }
    assert ("grpo", "grpo-1") == (told.project, told.name)
    config = (folder / "files" / "config.yaml").read_text()
    assert "lr" in config
    assert "the hash of the graph" in config
    kept = json.loads((folder / "files" / "swanlab-metadata.json").read_text())
    kept["swanlab"].pop("run_dir", None)
    assert "pytest" not in json.dumps(kept), "the command line is not told"
    assert "1  actor.update on all" == (folder / "media" / "text" / media["plan"]).read_text()
    assert "yes" in (folder / "media" / "echarts" / media["samples/rollout"]).read_text()
    assert (folder / "media" / "image" / media["graph"]).exists()
    assert {"swanlab": told.id} == read_ids(run)
