"""Adapters of the real engine: updates bring them alone, and nothing of other ones is served."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from rlflow.batch import flat
from rlflow.engines.loading import load_model
from rlflow.engines.protocol import Sampling
from rlflow.engines.rollout import TorchRollout
from rlflow.graph.model import LoRA
from tests.engines.sglang.conftest import PYTHON, TINY, Pair, group, start

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.sglang]

PROMPTS = [list(range(3, 33)), list(range(10, 45)), list(range(20, 50))]
GREEDY = Sampling(max_new_tokens=12, temperature=0.0, n=2)
# Of q, k and v one alone, of gate and up one alone, o nowhere, and down in one layer.
LORA = LoRA(rank=3, alpha=4, targets=("v_proj", "up_proj", "layers.1.mlp.down_proj"))


def same(real, plain):
    assert flat(plain.response_tokens).tolist() == flat(real.response_tokens).tolist()
    assert 1e-4 > float((flat(real.log_probs) - flat(plain.log_probs)).abs().max())


def trained(pair, version, seed):
    """Random adapters, the same ones in both engines."""
    source = torch.Generator().manual_seed(seed)
    found = {
        name: 0.2 * torch.randn(shard.shape, generator=source)
        for name, shard in sorted(pair.model.shards().items())
        if name in pair.model.trained_names()
    }
    pair.rollout.update_weights(found, version)
    pair.plain.update_weights(found, version)


@pytest.fixture(scope="module")
def _adapted():
    if not Path(PYTHON).exists():
        pytest.skip("no environment with SGLang: make test-sglang builds it")
    model, rollout = start(lora=LORA, seed=5)
    plain = load_model(TINY, dtype=torch.float32, device="cpu", lora=LORA, seed=5)
    yield Pair(model, rollout, TorchRollout(plain))
    model.close()


@pytest.fixture
def adapted(_adapted):
    """Both engines with the same adapters, awake."""
    _adapted.rollout.wake()
    trained(_adapted, 1, seed=1)
    return _adapted


def test_it_starts_with_the_adapters_that_a_trainer_starts_with(_adapted):
    staged = _adapted.model.named_tensors()
    for name, tensor in _adapted.plain.model.named_tensors().items():
        assert torch.equal(tensor, staged[name]), name
    assert _adapted.plain.model.trained_names() == _adapted.model.trained_names()
    same(*_adapted.generate(PROMPTS, GREEDY))


def test_updates_bring_adapters(adapted):
    made = []
    for version in (2, 3, 4, 5):
        trained(adapted, version, seed=version)
        real, plain = adapted.generate(PROMPTS, GREEDY)
        same(real, plain)
        made.append(flat(real.log_probs).tolist())
    assert 4 == len({tuple(row) for row in made})
