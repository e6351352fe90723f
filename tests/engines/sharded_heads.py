"""What the ranks of a world do in the tests of value heads."""

from __future__ import annotations

import torch

from rlflow.batch import select_rows
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.sharded.build import load_sharded
from rlflow.engines.hf.sharded.train import ShardedTrainEngine
from rlflow.engines.hf.train import TrainEngine
from rlflow.errors import UsageError
from tests.engines.examples import rows
from tests.engines.sharded_checks import meshes, own_rows

HOW = {"dtype": torch.float32, "device": "cpu", "head": "value", "fresh_head": False}


def scores_are_equal(rank, path, shape, init):
    """Values of the ranks are those of one process, to float32 tolerance, and are not zero."""
    sharded = load_sharded(path, **meshes(shape), trained=False, init=init, **HOW)
    engine = ShardedTrainEngine(sharded, None, micro_tokens=None)
    batch = rows(response_sizes=(6, 2, 1, 4, 2))
    mine = select_rows(batch, torch.tensor(own_rows(engine, 9, uneven=False)))
    one = TrainEngine(load_model(path, init=init, **HOW), None, micro_tokens=None)
    asked = {"outputs": ("values",), "temperature": 1.0}
    expected, found = (e.forward(mine, **asked)["values"] for e in (one, engine))
    assert expected.std() > 0.01
    assert torch.allclose(expected, found, atol=1e-5, rtol=1e-4)
    return True


def refused(rank, path, shape):
    try:
        load_sharded(path, **meshes(shape), trained=False, **HOW)
    except UsageError as error:
        return "E524" in str(error)
    return False
