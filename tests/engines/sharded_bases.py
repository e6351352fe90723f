"""What ranks do in the tests of base weights and shared forwards."""

from __future__ import annotations

import torch

from rlflow.batch import select_rows
from rlflow.engines.hf.sharded.build import load_sharded
from rlflow.engines.hf.sharded.train import ShardedTrainEngine
from tests.engines.examples import one_step, rows
from tests.engines.sharded_checks import meshes, own_rows, pair


def a_base_is_the_model_it_was_loaded_from(rank, path, shape, lora, dtype):
    """After steps that move the adapters: bit for bit a frozen model of the same layout."""
    _, ours = pair(path, shape, lora=lora, dtype=getattr(torch, dtype), micro_tokens=40)
    frozen = load_sharded(
        path, **meshes(shape), trained=False, dtype=getattr(torch, dtype), device="cpu"
    )
    theirs = ShardedTrainEngine(frozen, None, micro_tokens=40)
    batch = select_rows(rows(), own_rows(ours, len(rows()), uneven=False))
    for _ in range(2):
        assert one_step(ours, batch).applied
    asked = {"outputs": ("log_probs",), "temperature": 0.7}
    expected = theirs.forward(batch, **asked)["log_probs"]
    with ours.model.adapters_off():
        found = ours.forward(batch, **asked)["log_probs"]
    adapted = ours.forward(batch, **asked)["log_probs"]
    return torch.equal(expected, found), not torch.equal(adapted, found)


def one_pass_serves_temperatures(rank, path, shape):
    """Ranks with different numbers of micro-batches, and one with no rows at all."""
    _, engine = pair(path, shape, dtype=torch.float32, micro_tokens=10)
    batch = select_rows(rows(), own_rows(engine, len(rows()), uneven=True))
    given = (1.0, 0.5)
    together = engine.forward(batch, outputs=("log_probs",), temperature=given)["log_probs"]
    alone = [
        engine.forward(batch, outputs=("log_probs",), temperature=t)["log_probs"] for t in given
    ]
    return torch.equal(torch.stack(alone, -1), together)
