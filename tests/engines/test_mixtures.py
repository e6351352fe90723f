"""Mixtures of experts over ranks: shards of files that have experts apart, and one rank's math."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rlflow.engines.hf.routing.experts import own_experts
from rlflow.engines.hf.weights.parts import parts_in_files
from tests.engines import dispatches, mixtures, sharded_checks, sharded_families, sharded_rollouts
from tests.engines import sharded_states as states
from tests.engines.test_sharded_math import STEADY

pytestmark = pytest.mark.torch

FSDP, TP, EP = (1, 2, 1), (1, 1, 2), (1, 2, 1, 2)
EXACT = {"dtype": "float32", "limit": 1e-5, "spec": STEADY}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    made = {}

    def make(family):
        if family not in made:
            made[family] = mixtures.save_mixture(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "granitemoe"])
def test_parts_of_parameters_are_the_tensors_that_transformers_writes(family, mixture):
    path = mixture(family)
    whole = transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(path)
        parts = parts_in_files(transformers.AutoModelForCausalLM.from_config(config))

    written = load_file(f"{path}/model.safetensors")

    assert parts.keys() == written.keys()
    for name, part in parts.items():
        assert torch.equal(whole[part.own][part.slices].reshape(part.shape), written[name]), name


def test_tensors_that_are_turned_on_the_way_are_no_parts():
    from rlflow.engines.hf.weights import parts

    whole = torch.empty(4, 6, device="meta")

    assert parts._part("w", whole, whole.T) is None
    assert parts._part("w", whole, whole[1]).box == ((1, 2), (0, 6))
    assert parts._part("w", whole, whole[:, 2:4]).dims == (0, 1)


def test_two_ranks_compute_what_one_does(mixture, world):
    for shape in (FSDP, EP):
        options = {**EXACT, "uneven": True, "micro_tokens": 20}
        assert all(world(2).run(sharded_checks.with_options, mixture("qwen3_moe"), shape, options))


def test_no_rounding_is_between_one_rank_and_two_with_parts_of_layers(mixture, world):
    """In float64 no token chooses otherwise: what routers, norms and clipping lose is seen."""
    options = {"uneven": True, "micro_tokens": 20}
    assert all(world(2).run(sharded_checks.with_exact_layers, mixture("qwen3_moe"), TP, options))


SPLIT = {"schedule": "zero-bubble", "stages": (2, 2), "micro_tokens": 20, "pp": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param((1, 1, 1), {}, id="whole"),
        pytest.param((1, 1, 1), {"recompute": True, "micro_tokens": 12}, id="recompute"),
        pytest.param((1, 1, 1), {"hosts_activations": True}, id="hosting"),
        pytest.param(FSDP, {"uneven": True}, id="fsdp"),
        pytest.param((2, 1, 1), {"recompute": 1}, id="dp"),
        pytest.param(EP, {"uneven": True, "recompute": True}, id="ep"),
        pytest.param(TP, {}, id="tp"),
        pytest.param((1, 2, 1, 1, 2), {}, id="cp"),
    ],
)
def test_experts_leave_gradients_of_their_weights_for_later(shape, options, world, tmp_path):
    """Backwards in two halves; dense layers and mixtures in turns."""
    path = mixtures.save_mixture("qwen3_moe", tmp_path, num_hidden_layers=4, mlp_only_layers=[2])
    ranks = 2 * shape[0] * shape[1] * shape[2]
    args = (path, shape, {**SPLIT, **options})
    assert all(world(ranks).run(sharded_checks.with_exact_layers, *args))


def test_two_halves_of_a_mixtures_backward_are_one(mixture, world):
    """Nothing is computed twice; experts' products with their weights are in the second half."""
    layer = 32 * 8 * (4 + 2 + 2 + 4) + 2 * 3 * 32 * 24  # Attention, and two experts of a token.
    for shape in ((2, 1, 1), EP):
        found = world(2).run(sharded_checks.two_halves, mixture("qwen3_moe"), shape)
        assert all(same for *_, same in found)
        assert all(whole == first + second for whole, first, second, _ in found)
        second = sum(second for _, _, second, _ in found)
        assert second % (2 * 2 * layer) == 0
        assert 0.4 < second / sum(whole for whole, *_ in found) < 0.5


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_the_parts_of_ranks_add_up_to_what_a_layer_of_experts_computes(family, mixture):
    model = transformers.AutoModelForCausalLM.from_pretrained(mixture(family))
    layer = model.model.layers[1].mlp.experts
    x = torch.randn(11, 32, requires_grad=True)
    # Nobody chooses the third of four.
    chosen = torch.tensor([[0, 1], [3, 0]]).repeat(6, 1)[:11]
    weights = torch.rand(11, 2, requires_grad=True)
    stacked = (layer.gate_up_proj, layer.down_proj)
    expected = layer(x, chosen, weights)

    halves = [
        SimpleNamespace(
            gate_up_proj=stacked[0][part], down_proj=stacked[1][part], act_fn=layer.act_fn
        )
        for part in (slice(0, 2), slice(2, 4))
    ]
    first, second = (own_experts(h, 2 * at, x, chosen, weights) for at, h in enumerate(halves))

    assert torch.allclose(expected, first + second, atol=1e-6)
    asked = (x, weights, *stacked)
    wanted = torch.autograd.grad(expected.square().sum(), asked)
    found = torch.autograd.grad((first + second).square().sum(), asked)
    for one, other in zip(wanted, found, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_rank_whose_experts_nobody_chose_adds_nothing_and_has_gradients_of_zero():
    stacked = [torch.randn(2, 8, 6), torch.randn(2, 6, 4)]
    layer = SimpleNamespace(
        gate_up_proj=stacked[0].requires_grad_(),
        down_proj=stacked[1].requires_grad_(),
        act_fn=torch.nn.functional.silu,
    )

    found = own_experts(layer, 2, torch.randn(5, 6), torch.zeros(5, 2).long(), torch.ones(5, 2))
    found.sum().backward()

    assert not found.any()
    assert not any(weight.grad.any() for weight in stacked)


def test_a_backward_keeps_of_a_pair_what_its_expert_reads_and_makes_alone():
    width, pairs = 6, 10
    layer = SimpleNamespace(
        gate_up_proj=torch.randn(2, 8, width, requires_grad=True),
        down_proj=torch.randn(2, width, 4, requires_grad=True),
        act_fn=torch.nn.functional.silu,
    )
    chosen = torch.tensor([[0, 1]] * 5)
    weights = torch.rand(5, 2, requires_grad=True)
    kept = {}

    def keep(tensor):
        if tensor.shape == (pairs, width):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        own_experts(layer, 0, torch.randn(5, width, requires_grad=True), chosen, weights)
    # On a CPU each expert's rows are kept by themselves; what all made is one tensor.
    assert len(kept) == 1


def test_ranks_get_from_each_other_what_a_layer_makes_and_its_gradients(mixture, world):
    """Also a rank without a token, of experts that nobody chose, and of a rank that gets none."""
    for tokens in ([7, 4], [9, 0]):
        assert all(world(2).run(dispatches.as_the_layer, mixture("qwen3_moe"), tokens))


@pytest.mark.parametrize("shape", [FSDP, TP, EP], ids=["fsdp", "tp", "ep"])
def test_ranks_have_whole_experts_that_are_all_of_them(shape, mixture, world):
    assert all(world(2).run(states.shards_tile, mixture("mixtral"), shape))


def test_a_checkpoint_goes_over_one_rank_to_another_layout_with_the_same_bits(
    mixture, world, tmp_path
):
    for number, ends in enumerate(((EP, TP), (FSDP, EP))):
        folder = tmp_path / str(number)
        folder.mkdir()
        args = (mixture("qwen3_moe"), str(folder), "float32", *ends)
        assert all(world(2).run(states.a_checkpoint_goes_round, *args))


@pytest.mark.parametrize(
    ("shape", "trained"), [(FSDP, True), (TP, False), (EP, True)], ids=["fsdp", "tp", "ep"]
)
def test_tokens_are_those_of_one_rank(shape, trained, mixture, world):
    assert all(world(2).run(sharded_rollouts.same_tokens, mixture("qwen3_moe"), shape, trained))


def test_experts_that_files_lack_are_named_as_files_have_them(mixture, world, tmp_path):
    for file in ("config.json", "model.safetensors"):
        shutil.copy(Path(mixture("qwen3_moe")) / file, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")

    found = world(2).run(states.refusal, str(tmp_path), FSDP, {"trained": True})

    assert all("E507" in text and "layers.1.mlp.experts.2.up_proj" in text for text in found)
    assert all("experts.1." not in text for text in found)


def test_experts_that_ranks_do_not_divide_are_refused(world, tmp_path):
    path = mixtures.save_mixture("qwen3_moe", tmp_path, num_experts=3)

    assert ["E526"] * 2 == world(2).run(sharded_families.refusal, path, "fsdp")
