"""Adapters of the real engine: updates bring them alone, and nothing of other ones is served."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from rlflow.batch import flat, ragged_rows
from rlflow.contract.values import Reach, SampleKey, Sampling
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.errors import RunError
from rlflow.graph.model import LoRA
from tests.engines.sglang.conftest import (
    GREEDY,
    PROMPTS,
    TINY,
    Pair,
    group,
    needs_sglang,
    same,
    start,
)

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.sglang]

# Of q, k and v one alone, of gate and up one alone, o nowhere, and down in one layer.
LORA = LoRA(rank=3, alpha=4, targets=("v_proj", "up_proj", "layers.1.mlp.down_proj"))


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
def started():
    needs_sglang()
    model, rollout = start(lora=LORA, seed=5)
    plain = load_model(TINY, dtype=torch.float32, device="cpu", lora=LORA, seed=5)
    yield Pair(model, rollout, TorchRollout(plain))
    model.close()


@pytest.fixture
def adapted(started):
    """Both engines with the same adapters, awake."""
    started.rollout.wake()
    trained(started, 1, seed=1)
    return started


def test_it_starts_with_the_adapters_that_a_trainer_starts_with(started):
    staged = started.model.named_tensors()
    for name, tensor in started.plain.model.named_tensors().items():
        assert torch.equal(tensor, staged[name]), name
    assert started.plain.model.trained_names() == started.model.trained_names()
    same(*started.generate(PROMPTS, GREEDY))


def test_updates_bring_adapters_alone(adapted):
    """A byte of the weights below them that is flipped in the staging gets nowhere."""
    made = []
    staged = adapted.model.staging.tensors["model.norm.weight"].view(torch.uint8)
    staged[5] ^= 1
    for version in (2, 3, 4, 5):
        trained(adapted, version, seed=version)
        real, plain = adapted.generate(PROMPTS, GREEDY)
        same(real, plain)
        assert ["model.norm.weight"] == list(adapted.model.check())
        made.append(flat(real.log_probs).tolist())
    staged[5] ^= 1
    assert {} == adapted.model.check()
    assert 4 == len({tuple(row) for row in made})


def test_adapters_of_another_version_leave_nothing_in_the_cache(adapted):
    for version in range(2, 10):
        adapted.generate(PROMPTS, GREEDY)
        trained(adapted, version, seed=100 + version)
        cached = adapted.rollout.stats()["cached_prompt_tokens"]
        same(*adapted.generate(PROMPTS, Sampling(max_new_tokens=12, temperature=0.0)))
        assert cached == adapted.rollout.stats()["cached_prompt_tokens"]


def test_rows_in_pieces_share_a_prefix_and_the_adapters(adapted):
    sampling = Sampling(max_new_tokens=12, temperature=0.0, n=4)
    before = adapted.rollout.stats()["cached_prompt_tokens"]
    for piece in range(2):
        same(*adapted.generate(PROMPTS, sampling, reach=Reach(piece=piece, pieces=2)))
    assert before < adapted.rollout.stats()["cached_prompt_tokens"]


def test_an_update_after_an_abort_waits_for_nothing(adapted):
    long = Sampling(max_new_tokens=90, temperature=0.0, n=32)
    call = threading.Thread(target=adapted.rollout.generate, args=asked(long))
    link = adapted.model.replica.link()
    before = link.moved
    call.start()
    while link.moved == before and call.is_alive():
        time.sleep(0.001)
    adapted.rollout.abort()
    call.join(60)
    trained(adapted, 2, seed=2)
    same(*adapted.generate(PROMPTS, GREEDY))


def asked(sampling):
    rows = sampling.n * len(PROMPTS)
    key = SampleKey(seed=1, iteration=0, stream="gen")
    return ragged_rows(PROMPTS, torch.int64), sampling, key, torch.arange(rows)


def test_a_version_that_was_not_asked_for_is_refused(adapted):
    adapted.model.replica.link().ask("update", {"version": 7}).result()
    with pytest.raises(RunError, match=r"E587.*\n.*version 1 is wanted, 7 is here"):
        adapted.generate(PROMPTS, GREEDY)
    adapted.model.loaded(1)
    same(*adapted.generate(PROMPTS, GREEDY))


def test_a_flipped_byte_of_an_adapter_is_noticed(adapted):
    name = "model.layers.1.mlp.down_proj.lora_B"
    assert {} == adapted.model.check()
    staged = adapted.model.staging.tensors[name].view(torch.uint8).flatten()
    staged[5] ^= 1
    assert [name] == list(adapted.model.check())
    staged[5] ^= 1
    assert {} == adapted.model.check()


@pytest.mark.parametrize("mode", ["discard", "offload"])
def test_base_and_adapters_come_back_after_a_sleep(adapted, mode):
    adapted.model.sleep_pool()
    adapted.model.sleep(mode)
    adapted.model.wake()
    if mode == "discard":
        assert "empty" == adapted.model.state
        trained(adapted, 4, seed=4)
    adapted.model.wake_pool()
    same(*adapted.generate(PROMPTS, GREEDY))
    assert {} == adapted.model.check()


def test_what_lies_below_the_adapters_is_loaded_after_a_sleep_and_not_before(adapted):
    """A flipped byte of the staging gets to the engine with the next loading of it all."""
    staged = adapted.model.staging.tensors["model.norm.weight"].view(torch.uint8)
    for mode in ("offload", "discard"):
        staged[5] ^= 1
        assert ["model.norm.weight"] == list(adapted.model.check())
        adapted.model.sleep_pool()
        assert ["model.norm.weight"] == list(adapted.model.check())
        adapted.model.sleep(mode)
        adapted.model.wake()
        adapted.model.loaded(2)
        assert {} == adapted.model.check()
        adapted.model.wake_pool()


def test_weights_below_the_adapters_may_be_given_too(adapted):
    base = "model.layers.0.self_attn.q_proj.weight"
    tensors = {n: t * 1.02 for n, t in adapted.plain.model.named_tensors().items()}
    only = {base, *adapted.model.trained_names()}
    given = {name: tensor for name, tensor in tensors.items() if name in only}
    before = adapted.plain.model.named_tensors()[base].clone()
    for engine in (adapted.rollout, adapted.plain):
        engine.update_weights(given, 6)
    same(*adapted.generate(PROMPTS, GREEDY))
    assert {} == adapted.model.check()
    for engine in (adapted.rollout, adapted.plain):
        engine.update_weights({**given, base: before}, 7)
    same(*adapted.generate(PROMPTS, GREEDY))


def test_adapters_that_are_not_all_there_are_refused_whole(adapted):
    names = sorted(adapted.model.trained_names())
    staged = adapted.model.staging.tensors
    with pytest.raises(RunError, match=rf"E509.*missing: {names[0]}"):
        adapted.rollout.update_weights({name: staged[name] for name in names[1:]}, 9)
    assert 1 == adapted.model.version
    same(*adapted.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("when", ["awake", pytest.param("asleep", marks=pytest.mark.extra)])
def test_an_engine_that_is_killed_comes_back_with_the_adapters(adapted, when):
    trained(adapted, 3, seed=3)
    leaders, starts = group(adapted.model), adapted.model.replica.starts
    if when == "asleep":
        adapted.rollout.sleep("discard")
    lost = adapted.model.replica.link().lost
    os.kill(adapted.model.replica.facts["pid"], signal.SIGKILL)
    assert lost.wait(60)
    if when == "asleep":
        adapted.model.wake()
        trained(adapted, 8, seed=8)
        adapted.model.wake_pool()
    same(*adapted.generate(PROMPTS, GREEDY))
    assert {} == adapted.model.check()
    assert starts + 1 == adapted.model.replica.starts
    assert not {*leaders} & {*group(adapted.model)}
