"""TensorBoard events of a run that was killed and resumed."""

from __future__ import annotations

import pytest

from rlflow.runtime.record.metrics import TensorBoardLog

pytestmark = pytest.mark.torch


def test_points_after_the_checkpoint_are_superseded(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardLog(tmp_path)
    for iteration in range(6):
        first.write(iteration, {"reward": 1.0, "loss": 0.5})
    first.close()
    second = TensorBoardLog(tmp_path, after=3)
    for iteration in range(4, 8):
        second.write(iteration, {"reward": 2.0})
    second.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("reward")
    assert [(i, 1.0) for i in range(4)] + [(i, 2.0) for i in range(4, 8)] == [
        (event.step, event.value) for event in events
    ]
