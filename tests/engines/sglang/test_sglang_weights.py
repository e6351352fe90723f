"""Updates, hashes, sleep and waking of the real engine."""

from __future__ import annotations

import pytest
import torch

from rlflow.engines.process.sglang.checksums import weight_layout
from rlflow.errors import RunError
from tests.engines.sglang.conftest import GREEDY, PROMPTS, same
from tests.engines.sglang.updating import generates_with_updates, leaves_nothing_in_the_cache

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.sglang]


def test_an_update_is_what_it_generates_with(pair):
    generates_with_updates(pair)


def test_an_update_right_after_generation_leaves_nothing_in_the_cache(pair):
    leaves_nothing_in_the_cache(pair)


def test_the_engine_reports_the_version_it_was_given(pair):
    pair.model.replica.link().ask("update", {"version": 7}).result()
    with pytest.raises(RunError, match=r"E587.*\n.*version 0 is wanted, 7 is here"):
        pair.generate(PROMPTS, GREEDY)
    pair.model.loaded(0)
    same(*pair.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_a_flipped_byte_is_noticed(pair, name, fused):
    assert {} == pair.model.check()
    pair.model.staging.tensors[name].view(torch.uint8).flatten()[5] ^= 1
    found = pair.model.check()
    pair.model.staging.tensors[name].view(torch.uint8).flatten()[5] ^= 1
    assert [fused] == list(found)
    assert 16 == len(found[fused][0]) == len(found[fused][1])


def test_the_engine_hashes_the_staging_alike(pair):
    (held,) = pair.model.checksums()
    wanted = {"layout": weight_layout(held, pair.model.staging.tensors)}
    assert held == pair.model.replica.link().ask("hashes", wanted).result()


def test_every_weight_is_hashed(pair):
    (held,) = pair.model.checksums()
    assert {"model.norm.weight", "model.embed_tokens.weight"} < held.keys()
    # Of q, k, v and of gate, up the engine has one each: weights of 2 layers, their biases.
    fused = 2 * (2 + 2 + 1)
    assert len(pair.model.trained_names()) - fused == len(held)


def test_it_sleeps_and_wakes_in_the_order_of_a_plan(pair):
    pair.generate(PROMPTS, GREEDY)
    pair.model.sleep_pool()
    pair.model.sleep("discard")
    with pytest.raises(RunError, match=r"E506"):
        pair.generate(PROMPTS, GREEDY)
    with pytest.raises(RunError, match=r"E506"):
        pair.model.shards()
    pair.model.wake()
    assert "empty" == pair.model.state
    with pytest.raises(RunError, match=r"E506.*no weights"):
        pair.generate(PROMPTS, GREEDY)
    pair.update(4, seed=4)
    with pytest.raises(RunError, match=r"E585"):
        pair.generate(PROMPTS, GREEDY)
    pair.model.wake_pool()
    same(*pair.generate(PROMPTS, GREEDY))
    assert {} == pair.model.check()


def test_offloaded_weights_come_back(pair):
    pair.update(5, seed=5)
    pair.rollout.sleep("offload")
    pair.rollout.wake()
    assert ("ready", 5) == (pair.model.state, pair.model.version)
    same(*pair.generate(PROMPTS, GREEDY))


def test_a_reshard_writes_the_staging(pair):
    shards = pair.model.shards()
    assert shards.keys() == pair.model.trained_names() == set(pair.plain.model.trained_names())
    for name, tensor in pair.plain.model.named_tensors().items():
        assert shards[name].shape == tuple(tensor.shape) == tuple(shards[name].tensor.shape)
        shards[name].tensor.copy_(tensor * 1.01)
    pair.plain.update_weights({n: s.tensor for n, s in shards.items()}, 6)
    pair.model.loaded(6)
    same(*pair.generate(PROMPTS, GREEDY))


def test_wrong_weights_are_refused_whole(pair):
    tensors = dict(pair.plain.model.named_tensors())
    lost = {name: tensors[name] for name in list(tensors)[1:]}
    with pytest.raises(RunError, match=r"E509.*missing"):
        pair.rollout.update_weights(lost, 9)
    with pytest.raises(RunError, match=r"E509.*no weight 'nothing'"):
        pair.rollout.update_weights({**tensors, "nothing": tensors["model.norm.weight"]}, 9)
    with pytest.raises(RunError, match=r"E509.*shape"):
        pair.rollout.update_weights({**tensors, "model.norm.weight": torch.zeros(3)}, 9)
    assert 0 == pair.model.version
    same(*pair.generate(PROMPTS, GREEDY))


def test_what_is_measured(pair):
    pair.rollout.sleep("offload")
    pair.rollout.wake()
    found = pair.model.measured()
    assert 8192 == found["pool_tokens"]
    assert 0 < found["update_seconds"] < 60
    assert 0 < found["residual_bytes"] < 8e9
    assert found["start_seconds"] > 1
