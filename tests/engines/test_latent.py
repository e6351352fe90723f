"""Multi-head latent attention: packed, in the backward pass, and decoded on a cache of latents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

import rlflow as rf
from rlflow.batch import lengths, ragged_rows
from rlflow.contract.values import Reach, SampleKey, Sampling
from rlflow.engines.hf.forward.attention import PackedAttention, Traits
from rlflow.engines.hf.forward.sequences import (
    FlashSequences,
    PlainSequences,
    Sequences,
    Visible,
    flash_fits,
)
from rlflow.engines.hf.generate.cache import KeyValueCache
from rlflow.engines.hf.generate.decoding import Responses
from rlflow.engines.hf.generate.paged import PagedCache
from rlflow.engines.hf.generate.speculative import Draft
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.mixers.padded import PaddedValues
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.engines.hf.writing import save_model
from rlflow.scheduler.costs.lengths import Load, ResponseLengths
from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.devices.hardware import KINDS
from rlflow.scheduler.models.shapes import read_shape
from tests.engines import sharded_checks, sharded_rollouts, test_graphs
from tests.engines.examples import (
    engine,
    gradients,
    plain_log_probs,
    plain_model,
    rows,
    weighted,
    worst,
)
from tests.engines.latents import FAMILIES, save_latent
from tests.engines.test_sequences import layouts, same_tokens, without_masks  # noqa: F401
from tests.engines.test_sharded_math import STEADY

pytestmark = pytest.mark.torch

HEADS, KEYS, VALUES = 4, 8, 5
DENSE = ("minicpm3", "youtu")
KEY = SampleKey(seed=1, iteration=0, stream="rollout")
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
GREEDY = Sampling(max_new_tokens=9, temperature=0.0)


@pytest.fixture(scope="module")
def latent_dir(tmp_path_factory):
    made = {}

    def make(family):
        if family not in made:
            made[family] = save_latent(family, tmp_path_factory.mktemp("latents") / family)
        return made[family]

    return make


def parts(tokens):
    torch.manual_seed(3)
    sizes = (KEYS, KEYS, VALUES)
    made = [torch.randn(tokens, HEADS, size, dtype=torch.float64) for size in sizes]
    return [x.requires_grad_() for x in made]


@pytest.mark.parametrize("window", [None, 3])
def test_values_may_be_narrower_than_keys(window):
    """With masks and without, outputs and gradients in float64."""
    batch = rows(prompt_sizes=(5, 3, 7, 1), n=5)
    dense, sparse = layouts(batch)
    places = same_tokens(dense, sparse, batch)
    traits, inputs = Traits(scaling=0.7, window=window), parts(sparse.real)
    missing = len(dense.tokens) - dense.real
    filled = [torch.cat([x[places], x.new_zeros(missing, *x.shape[1:])]) for x in inputs]

    found = PackedAttention(sparse).attend(0, *inputs, traits)
    expected = PackedAttention(dense).attend(0, *filled, traits)[: dense.real]

    assert (sparse.real, HEADS, VALUES) == found.shape
    assert torch.allclose(expected, found[places], atol=1e-12)
    mine = torch.autograd.grad(found.sin().sum(), inputs)
    theirs = torch.autograd.grad(expected.sin().sum(), inputs)
    for name, one, other in zip("qkv", mine, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-11), name


def test_padded_values_change_nothing():
    """What a kernel that takes values as wide as keys is given, by plain products."""
    _, sparse = layouts(rows())
    runs, seen = sparse.spans.own, Visible(scale=0.7, causal=True)
    q, k, v = (x.detach() for x in parts(sparse.real))
    plain, padded = PlainSequences(), PaddedValues(PlainSequences())
    (output, sums), found = plain.forward(q, k, v, runs, seen), padded.forward(q, k, v, runs, seen)
    grads = [
        way.backward(output.cos(), q, k, v, output, sums, runs, seen) for way in (plain, padded)
    ]

    for one, other in zip((output, sums, *grads[0]), (*found, *grads[1]), strict=True):
        assert torch.allclose(one, other, atol=1e-13)
        assert one.shape == other.shape


def test_torchs_kernel_takes_padded_values():
    """The real operators on fake tensors of a CUDA device, in DeepSeek's sizes."""
    bounds = np.array([0, 5, 12])
    with FakeTensorMode():
        starts = torch.empty(3, dtype=torch.int32, device="cuda")
        runs = Sequences(q_bounds=bounds, k_bounds=bounds, q_starts=starts, k_starts=starts)
        q = torch.empty(12, HEADS, 192, dtype=torch.bfloat16, device="cuda")
        v = torch.empty(12, HEADS, 128, dtype=torch.bfloat16, device="cuda")
        seen, way = Visible(scale=0.5, causal=True), PaddedValues(FlashSequences())
        assert flash_fits(q, v, seen)
        assert not flash_fits(v, q, seen)
        output, sums = way.forward(q, q, v, runs, seen)
        assert output.shape == v.shape
        grads = way.backward(output, q, q, v, output, sums, runs, seen)
        assert [x.shape for x in grads] == [q.shape, q.shape, v.shape]


@pytest.mark.usefixtures("exact_softmax")
@pytest.mark.rows(1)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_rows_are_the_models_own(family, latent_dir):
    """Log-probs and gradients against its own forward of one padded batch.

    Products of experts are float32 at the widest.
    """
    dtype, limit = (torch.float64, 1e-9) if family in DENSE else (torch.float32, 1e-4)
    batch, plain = rows(), plain_model(latent_dir(family)).to(dtype)
    expected = plain_log_probs(plain, batch, 0.7)
    made = engine(latent_dir(family), 40, dtype)
    found = made.forward(batch, outputs=("log_probs",), temperature=0.7)["log_probs"]

    assert float((found - expected.detach()).abs().max()) < limit
    weighted(batch)({"log_probs": expected}, batch)[0].backward()
    theirs = {name: p.grad for name, p in plain.named_parameters()}
    assert worst(theirs, gradients(made, batch, ("log_probs",), 0.7)) < 10 * limit


@pytest.mark.usefixtures("exact_softmax")
def test_without_masks_it_computes_the_same(latent_dir, request):
    batch = rows()
    expected = engine(latent_dir("minicpm3"), 40)
    outputs = expected.forward(batch, outputs=("log_probs",), temperature=0.7)["log_probs"]
    theirs = gradients(expected, batch, ("log_probs",), 0.7)
    request.getfixturevalue("without_masks")
    found = engine(latent_dir("minicpm3"), 40)

    made = found.forward(batch, outputs=("log_probs",), temperature=0.7)["log_probs"]
    assert torch.allclose(outputs, made, atol=1e-9)
    assert worst(theirs, gradients(found, batch, ("log_probs",), 0.7)) < 1e-8


def generated(rollout, sampling=GREEDY, prompts=PROMPTS, draft=None):
    asked, ids = ragged_rows(prompts, torch.int64), torch.arange(len(prompts) * sampling.n)
    made = rollout.generate(asked, sampling, KEY, ids, draft=draft)
    return [row.tolist() for row in made.response_tokens.unbind()]


def theirs(path, prompts=PROMPTS):
    """Greedy tokens of transformers' own `generate`, a row at a time."""
    module = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        made = module.generate(
            torch.tensor([prompt]), max_new_tokens=GREEDY.max_new_tokens, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        found.append(made[0, len(prompt) :].tolist())
    return found


def load(path, **options):
    return load_model(path, dtype=torch.float32, device="cpu", **options)


@pytest.mark.rows(1)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tokens_are_those_of_transformers(family, latent_dir, monkeypatch):
    """In columns, and in a pool of blocks; both hold latents alone, one buffer a layer."""
    path, kept = latent_dir(family), set()
    for cache in (KeyValueCache, PagedCache):
        fill = cache.fill

        def seen(self, layer, parts, layout, fill=fill):
            kept.update(tuple(part.shape[1:]) for part in parts)
            assert 1 == len(parts)
            fill(self, layer, parts, layout)

        monkeypatch.setattr(cache, "fill", seen)
    model = load(path)
    expected = theirs(path)

    assert expected == generated(TorchRollout(model))
    assert expected == generated(TorchRollout(model, paged=True))
    assert {(1, 12 + 4)} == kept


def test_a_plan_counts_a_pool_of_latents_to_the_byte(latent_dir):
    path, asked = latent_dir("minicpm3"), ragged_rows([PROMPTS[0]] * 3, torch.int64)
    sampling = Sampling(max_new_tokens=20, n=2)
    empty = Responses(sampling, KEY, torch.arange(6), Reach(), torch.device("cpu"))
    made = TorchRollout(load(path), paged=True).paged_decoding(asked, lengths(asked), empty)
    with torch.inference_mode():
        made.step()
    plan = Roofline(kind=KINDS["h100"], shape=read_shape(Path(path)), size=4, paged=True)
    load_of = Load(rows=6, prompts=3, prompt=5, lengths=ResponseLengths(20, 10.0))

    assert dict(plan.rollout_holds(load_of))["KV cache"] == made.cache.num_bytes()


@pytest.mark.parametrize(
    "family", ["minicpm3", pytest.param("deepseek_v3", marks=pytest.mark.slow)]
)
def test_recorded_steps_read_the_pool_of_latents(family, latent_dir):
    test_graphs.test_replayed_steps_draw_the_same_tokens(family, {}, latent_dir)


@pytest.mark.slow
def test_long_rows_and_samples_of_a_group_agree_in_blocks_and_columns(latent_dir):
    """Prompts of more than a block, whose samples part."""
    model = load(latent_dir("minicpm3"))
    prompts = [[1 + (7 * i + k) % 30 for i in range(size)] for k, size in enumerate((140, 5))]
    sampling = Sampling(max_new_tokens=20, n=3)

    expected = generated(TorchRollout(model), sampling, prompts)
    assert expected == generated(TorchRollout(model, paged=True), sampling, prompts)


def test_a_drafter_changes_no_token(latent_dir):
    model, drafter = load(latent_dir("minicpm3")), load(latent_dir("deepseek_v3"))
    expected = generated(TorchRollout(model))

    assert expected == generated(TorchRollout(model), draft=Draft(model=drafter, tokens=3))


def test_adapters_of_the_map_from_latents_are_in_what_is_decoded(latent_dir, tmp_path):
    spec = rf.LoRA(rank=2, alpha=4.0, targets=("kv_b_proj", "o_proj"))
    model = load(latent_dir("minicpm3"), lora=spec)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, tensor in model.named_tensors().items():
            if name.endswith("lora_B"):
                tensor.normal_(std=0.5)
    save_model(model, str(tmp_path / "merged"))
    plain = generated(TorchRollout(load(latent_dir("minicpm3"))))

    found = generated(TorchRollout(model))
    assert found == generated(TorchRollout(load(str(tmp_path / "merged"))))
    assert found != plain


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 1, 2)], ids=["fsdp", "tp"])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3"])
def test_two_ranks_compute_what_one_does(family, shape, latent_dir, world):
    """Biases of routers are in files and on every rank, and change what experts are chosen.

    Along tp each rank has some heads, and all of the latents and of the part that heads share.
    """
    options = {"dtype": "float32", "limit": 1e-5, "spec": STEADY}

    assert all(world(2).run(sharded_checks.with_options, latent_dir(family), shape, options))


@pytest.mark.slow
@pytest.mark.parametrize("paged", [None, True], ids=["columns", "blocks"])
def test_ranks_decode_on_whole_latents_the_tokens_of_one(paged, latent_dir, world):
    args = (latent_dir("deepseek_v3"), (1, 1, 2), False, paged)

    assert all(world(2).run(sharded_rollouts.same_tokens, *args))


@pytest.mark.slow
def test_adapters_of_maps_from_latents_are_cut_with_them(latent_dir, world):
    """Those of the maps to latents are whole on every rank."""
    targets = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    spec = rf.LoRA(rank=4, alpha=8, targets=targets)
    options = {"dtype": "float32", "limit": 1e-5, "spec": STEADY, "lora": spec}

    assert all(world(2).run(sharded_checks.with_options, latent_dir("youtu"), (1, 1, 2), options))
