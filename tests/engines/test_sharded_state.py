"""What the ranks of a sharded model hold: pieces, asleep or awake, loaded, saved, refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import rlflow as rf
from tests.conftest import TINY
from tests.engines import sharded_states as states
from tests.engines.conftest import make_config

pytestmark = pytest.mark.torch

SHAPES = [
    pytest.param((1, 2, 1), id="fsdp2"),
    pytest.param((1, 1, 2), id="tp2"),
    pytest.param((2, 1, 1), id="dp2"),
]


def in_all(world, function, path, shape, *args):
    return world(shape[0] * shape[1] * shape[2]).run(function, path, shape, *args)


@pytest.mark.rows(1)
@pytest.mark.parametrize(("shape", "tiny"), [((1, 2, 2), True), ((2, 2, 1), False)])
def test_pieces_of_all_ranks_are_the_whole_model(shape, tiny, world, model_dir):
    path = str(TINY) if tiny else model_dir("llama")

    assert all(in_all(world, states.shards_tile, path, shape))


@pytest.mark.rows(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_sleep_changes_no_bit(shape, world, model_dir):
    assert all(in_all(world, states.sleeping_changes_nothing, model_dir("qwen3"), shape))


@pytest.mark.rows(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_discarded_weights_come_back_by_their_shards(shape, world):
    assert all(in_all(world, states.discarded_weights_come_by_shards, str(TINY), shape))


def test_a_write_to_the_shards_reaches_the_next_pass(world, model_dir):
    path = model_dir("qwen2")

    assert all(in_all(world, states.writes_reach_the_next_pass, path, (1, 2, 1)))


@pytest.mark.rows(1)
@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_number_that_is_not_finite_on_one_rank_changes_nothing_anywhere(bad, world, model_dir):
    path = model_dir("qwen2")

    assert all(in_all(world, states.a_number_that_is_not_finite, path, (1, 2, 1), bad))


def test_losses_without_gradient_keep_step(world, model_dir):
    path = model_dir("qwen2")

    assert all(in_all(world, states.losses_without_gradient, path, (1, 2, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("init", ["weights", "random"])
def test_no_rank_ever_holds_the_whole_model(init, world, tmp_path):
    import torch
    import transformers

    torch.manual_seed(0)
    config = make_config("llama")
    config.num_hidden_layers, config.hidden_size, config.head_dim = 16, 256, 64
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    held = in_all(world, states.most_held_while_loading, str(tmp_path), (1, 4, 1), init)

    for sharded, whole, weights in held:
        assert whole >= weights
        assert sharded < 0.6 * weights


@pytest.mark.rows(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_ranks_continue_what_one_saved(dtype, world, model_dir, tmp_path):
    args = (model_dir("qwen2"), (1, 2, 1), str(tmp_path), dtype)

    assert all(in_all(world, states.another_layout_continues, *args))


@pytest.mark.rows(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_goes_from_fsdp_to_one_rank_to_tp_with_the_same_bits(
    dtype, world, model_dir, tmp_path
):
    args = (model_dir("qwen2"), str(tmp_path), dtype)

    assert all(world(2).run(states.a_checkpoint_goes_round, *args))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [{"momentum": 0.9}, {"moments": "int8"}], ids=["muon", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_of_fewer_moments_goes_round(dtype, spec, world, model_dir, tmp_path):
    args = (model_dir("qwen2"), str(tmp_path), dtype)

    assert all(world(2).run(partial(states.a_checkpoint_goes_round, **spec), *args))


@pytest.mark.slow
def test_merged_adapters_are_those_of_one_rank(world, model_dir):
    lora = rf.LoRA(rank=3, alpha=6, targets=("q_proj", "o_proj", "up_proj", "down_proj"))
    args = (model_dir("qwen3"), (1, 2, 2), lora)

    assert all(in_all(world, states.adapters_merge_as_those_of_one_rank, *args))


@pytest.mark.parametrize(
    ("family", "shape", "words"),
    [
        ("gpt2", (1, 1, 2), ["E521", "gpt2", "fsdp="]),
        ("llama", (1, 1, 4), ["E522", "tp=4", "num_key_value_heads"]),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(family, shape, words, world, model_dir):
    found = in_all(world, states.refusal, model_dir(family), shape, {"trained": False})

    assert all(word in text for text in found for word in words)


def test_weights_that_are_missing_are_named(world, model_dir, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((Path(model_dir("llama")) / file).read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")

    found = in_all(world, states.refusal, str(tmp_path), (1, 2, 1), {"trained": True})

    assert all("E507" in text and "layers.1.mlp.up_proj" in text for text in found)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_ranks_that_share_the_sequence_have_their_tokens(family, world, model_dir):
    """Bytes of a pass are those of sums; the norms are added up once, in one message."""
    assert in_all(world, states.the_sequence_is_shared, model_dir(family), (1, 1, 2)) == [True] * 2


@pytest.mark.slow
def test_layers_kept_whole_step_alike(world):
    assert all(in_all(world, states.layers_kept_whole_step_alike, str(TINY), (1, 2, 1)))


def test_layers_are_gathered_ahead(world):
    assert all(in_all(world, states.layers_are_gathered_ahead, str(TINY), (1, 2, 1)))


def test_gradients_are_summed_once_where_that_is_said(world, model_dir):
    path = model_dir("qwen3")

    assert all(in_all(world, states.gradients_are_summed_once, path, (1, 2, 1), False))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "sequence"), [((2, 2, 1), False), ((1, 2, 2), True)])
def test_gradients_are_summed_once_over_all_axes(shape, sequence, world, model_dir):
    path = model_dir("qwen3")

    assert all(in_all(world, states.gradients_are_summed_once, path, shape, sequence))
