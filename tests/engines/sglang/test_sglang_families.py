"""Mixtures of experts, latent attention and hybrids in the real engine, as in the embedded one."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlflow.batch import flat, make_batch, ragged_rows, select_field
from rlflow.contract.values import SampleKey, Sampling
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.engines.hf.routing.replays import PROMPTS as EXPERTS_OF_PROMPTS
from rlflow.engines.hf.routing.replays import RESPONSES
from rlflow.engines.hf.train import TrainEngine
from rlflow.engines.process.client.load import load_sglang
from tests.engines.sglang.conftest import Pair, needs_sglang, options, same
from tests.engines.sglang.families import FAMILIES, ROUTED, STATES, save_family

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.sglang]

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10], [11, 3], [9, 12, 4, 13, 5, 14]]
GREEDY = Sampling(max_new_tokens=12, temperature=0.0, n=2)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def path(family, tmp_path_factory):
    return save_family(family, tmp_path_factory.mktemp(family) / "model")


@pytest.fixture(scope="module")
def pair(family, path):
    """One engine of a family for all tests, and the embedded one beside it."""
    needs_sglang()
    wanted = {"name": "gen", "dtype": torch.float32, "device": "cpu"}
    asked = options(routed_experts=family in ROUTED, args=STATES)
    model, rollout = load_sglang(path, options=asked, **wanted)
    yield Pair(model, rollout, TorchRollout(plainly(path)))
    model.close()


def plainly(path):
    return load_model(path, dtype=torch.float32, device="cpu")


def moved(path, seed):
    """The weights of a path, and something random beside each."""
    source = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=source).to(tensor)
        for name, tensor in plainly(path).named_tensors().items()
    }


def test_it_generates_what_the_embedded_engine_does(pair):
    same(*pair.generate(PROMPTS, GREEDY))
    assert {} == pair.model.check()


def test_an_update_changes_every_weight_and_no_other(pair, path):
    """Each name of the files is told once, and what the engine holds of all is what was staged."""
    before = pair.model.checksums()[0]
    told = [name for name, *_ in pair.model.staging.table]
    weights = moved(path, seed=3)
    pair.bring(weights, 1)
    pair.plain.update_weights(weights, 1)

    after = pair.model.checksums()[0]
    assert sorted(told) == sorted(load_file(f"{path}/model.safetensors"))
    assert before.keys() == after.keys()
    assert [] == [name for name in before if before[name] == after[name]]
    assert {} == pair.model.check()
    same(*pair.generate(PROMPTS, GREEDY))


def test_log_probs_are_those_of_the_trainer(pair):
    sampling = Sampling(max_new_tokens=20, temperature=0.7, n=3)
    real, _ = pair.generate(PROMPTS, sampling)
    prompts = ragged_rows([row for row in PROMPTS for _ in range(3)], torch.int64)
    batch = make_batch({"prompt_tokens": prompts, "response_tokens": real.response_tokens}, 12)
    trainer = TrainEngine(pair.plain.model, None, micro_tokens=None)
    found = trainer.forward(batch, outputs=("log_probs",), temperature=0.7)["log_probs"]

    assert 1e-4 > float((found - flat(real.log_probs)).abs().max())


def test_names_that_the_engine_passes_over_are_found(pair, path, family, tmp_path):
    """SGLang reads a file with the module's names without a word, and keeps its old experts."""
    if family != "qwen3_moe":
        pytest.skip("SGLang does not take such a file in silence")
    own = {name: tensor.contiguous() for name, tensor in moved(path, seed=5).items()}
    save_file(own, tmp_path / "model.safetensors")
    for name, tensor in own.items():
        pair.model.staging.tensors[name].copy_(tensor)
    asked = {"version": pair.model.version, "path": str(tmp_path)}
    told = pair.model.replica.link().ask("update", asked).result()

    wrong = pair.model.check()
    assert str(pair.model.version) == told
    assert wrong
    assert all(".mlp.experts.w" in name for name in wrong)
    pair.bring(own, 2)
    pair.plain.update_weights(own, 2)
    assert {} == pair.model.check()
    same(*pair.generate(PROMPTS, GREEDY))


def test_a_flipped_byte_of_an_expert_is_noticed(pair):
    name = "model.layers.1.mlp.experts.down_proj"
    pair.model.staging.tensors[name].view(torch.uint8).flatten()[-7] ^= 1
    found = pair.model.check()
    pair.model.staging.tensors[name].view(torch.uint8).flatten()[-7] ^= 1

    assert ["model.layers.1.mlp.experts.w2_weight"] == list(found)


def test_the_experts_that_it_tells_are_those_of_a_forward(pair, family):
    """Of every token that was read, in order `[token, layer, k]`, as the trained model chooses."""
    if family not in ROUTED:
        pytest.skip("its router is not replayed")
    sampling = Sampling(max_new_tokens=16, temperature=1.0, n=3, routing=True)
    key, ids = SampleKey(seed=2, iteration=0, stream="gen"), torch.arange(3 * len(PROMPTS))
    prompts = ragged_rows(PROMPTS, torch.int64)
    real = pair.rollout.generate(prompts, sampling, key, ids)
    repeated = torch.arange(len(PROMPTS)).repeat_interleave(3)
    fields = {
        "prompt_tokens": select_field(prompts, repeated),
        "response_tokens": real.response_tokens,
    }
    told = {EXPERTS_OF_PROMPTS: real.prompt_experts, RESPONSES: real.experts}
    trainer = TrainEngine(pair.plain.model, None, micro_tokens=None)
    plain, replayed = (make_batch({**fields, **more}, len(ids)) for more in ({}, told))
    found = trainer.forward(plain, outputs=tuple(told), temperature=1.0)
    again = trainer.forward(replayed, outputs=("log_probs",), temperature=1.0)["log_probs"]

    for name, chosen in told.items():
        assert torch.equal(found[name], flat(chosen)), name
    assert len(found[RESPONSES].unique(dim=0)) > 3
    assert 1e-4 > float((again - flat(real.log_probs)).abs().max())
