"""TensorBoard events: what a run is, its points, and those of one that was killed and resumed."""

from __future__ import annotations

import json
import struct
import time
import zlib
from itertools import pairwise

import pytest

from rlflow.runtime.record.trackers.feed import Table
from rlflow.runtime.record.trackers.observer import Observer

pytestmark = pytest.mark.torch


def png():
    """A picture of one white pixel."""

    def chunk(kind, data):
        whole = kind + data
        return struct.pack(">I", len(data)) + whole + struct.pack(">I", zlib.crc32(whole))

    head = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    parts = (b"IHDR", head), (b"IDAT", zlib.compress(b"\0\xff\xff\xff")), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def observed(path, points, **options):
    """The events of a run that logged some points."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said = []
    observer = Observer(path, names=("tensorboard",), picture=png)
    observer.begin(said.append, **options)
    for iteration, metrics in points:
        observer.write(iteration, metrics)
    observer.close(60)
    assert [] == said
    return EventAccumulator(str(path / "tensorboard")).Reload()


def test_points_after_the_checkpoint_are_superseded(tmp_path):
    observed(tmp_path, [(i, {"reward": 1.0, "loss": 0.5}) for i in range(6)])
    # Files of one second are read in the order of their names, in which 10 comes before 9.
    time.sleep(1 - time.time() % 1)
    events = observed(tmp_path, [(i, {"reward": 2.0}) for i in range(4, 8)], after=3)

    assert [(i, 1.0) for i in range(4)] + [(i, 2.0) for i in range(4, 8)] == [
        (event.step, event.value) for event in events.Scalars("reward")
    ]


def test_config_plan_hashes_and_picture_are_attached(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"name": "grpo", "id": "abc"}))
    (tmp_path / "config.json").write_text(json.dumps({"lr": 0.1, "api_key": "x", "o": {"a": 1}}))
    (tmp_path / "plan.json").write_text(json.dumps({"graph": "a hash"}))
    (tmp_path / "plan.txt").write_text("actor.update on all")

    events = observed(tmp_path, [(0, {"reward": 1.0})])

    texts = {
        name: events.Tensors(name)[0].tensor_proto.string_val[0].decode()
        for name in events.Tags()["tensors"]
    }
    assert "lr = 0.1" in texts["config/text_summary"]
    assert "o.a = 1" in texts["config/text_summary"]
    assert 'api_key = "***"' in texts["config/text_summary"]
    assert "graph_hash = a hash" in texts["run/text_summary"]
    assert "actor.update on all" in texts["plan/text_summary"]
    assert png() == events.Images("graph")[0].encoded_image_string


def test_a_table_is_text(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from rlflow.runtime.record.trackers.facts import RunFacts
    from rlflow.runtime.record.trackers.to_tensorboard import TensorBoardLog

    log = TensorBoardLog(RunFacts(path=tmp_path, project="p", id="i"), str)
    log.write_table(
        3, Table(iteration=3, node="rollout", columns=("a", "b"), rows=[("x|y\nz", 1.5)])
    )
    log.close()

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = events.Tensors("samples/rollout/text_summary")[0]
    assert 3 == found.step
    assert b"| x\\|y z | 1.5 |" in found.tensor_proto.string_val[0]


def test_points_of_a_long_run_thin_out_and_rare_ones_stay(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from rlflow.runtime.record.trackers.facts import RunFacts
    from rlflow.runtime.record.trackers.to_tensorboard import TensorBoardLog

    log = TensorBoardLog(RunFacts(path=tmp_path, project="p", id="i"), str, step=5000)
    for iteration in range(1000):
        rare = {"eval/reward": 1.0} if iteration % 100 == 99 else {}
        log.write(iteration, {"reward": float(iteration), **rare})
        log._writer.flush()
    log.close()

    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    steps = [point.step for point in events.Scalars("reward")]
    gaps = [later - sooner for sooner, later in pairwise(steps)]
    assert (0, 1) == (steps[0], gaps[0])
    assert gaps == sorted(gaps)
    assert 4 <= gaps[-1] <= 16
    assert 10 == len(events.Scalars("eval/reward"))


def test_samples_of_a_long_run_thin_out_as_points_do(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from rlflow.runtime.record.trackers.facts import RunFacts
    from rlflow.runtime.record.trackers.to_tensorboard import TensorBoardLog

    table = Table(iteration=0, node="r", columns=("text",), rows=[("a long answer " * 30,)])
    log = TensorBoardLog(RunFacts(path=tmp_path, project="p", id="i"), str, step=60_000)
    for iteration in range(1000):
        log.write(iteration, {"reward": 1.0})
        log.write_table(iteration, table)
        if iteration % 100 == 99:
            log._writer.flush()
    log.close()

    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    steps = [point.step for point in events.Scalars("reward")]
    assert 4 <= max(later - sooner for sooner, later in pairwise(steps)) <= 16
    assert sum(file.stat().st_size for file in (tmp_path / "tensorboard").iterdir()) < 300_000
