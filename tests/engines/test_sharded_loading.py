"""Filling shards: slices of safetensors, and random weights one parameter at a time."""

from __future__ import annotations

import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rlflow.contract.values import Shard
from rlflow.engines.hf import loading
from rlflow.engines.hf.heads import stored_names
from rlflow.engines.hf.sharded.mesh import chunk
from rlflow.engines.hf.weights.filling import fill_from_safetensors
from rlflow.engines.hf.weights.names import names_in_file, tied_names
from rlflow.engines.hf.weights.random_weights import Draws, drawn_parameters
from rlflow.engines.hf.weights.skeletons import skeleton
from rlflow.errors import UsageError
from tests.budget import examples
from tests.engines.conftest import make_config

pytestmark = pytest.mark.torch


def box_in(shape, draw):
    bounds = [sorted((draw.randint(0, size), draw.randint(0, size))) for size in shape]
    return tuple((start, stop) for start, stop in bounds)


@settings(max_examples=examples(30))
@given(
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_a_shard_is_filled_with_its_box(shape, dtype, seed, tmp_path_factory):
    whole = torch.arange(torch.Size(shape).numel(), dtype=dtype).view(shape)
    file = tmp_path_factory.mktemp("box") / "one.safetensors"
    save_file({"there": whole}, file)
    box = box_in(shape, random.Random(seed))
    lengths = [stop - start for start, stop in box]
    shard = Shard(shape=shape, box=box, tensor=torch.full(lengths, -1, dtype=torch.float64))

    fill_from_safetensors({"here": shard}, {"here": file}, {"here": "there"})

    expected = whole[tuple(slice(*bounds) for bounds in box)].double()
    assert torch.equal(expected, shard.tensor)


def test_values_are_rounded_on_the_way(tmp_path):
    file = tmp_path / "one.safetensors"
    save_file({"x": torch.tensor([1.001, 2.003])}, file)
    shard = Shard(shape=(2,), box=((0, 2),), tensor=torch.zeros(2))

    fill_from_safetensors({"x": shard}, {"x": file}, dtype=torch.bfloat16)

    assert torch.equal(torch.tensor([1.001, 2.003]).bfloat16().float(), shard.tensor)


def test_another_shape_is_refused(tmp_path):
    file = tmp_path / "one.safetensors"
    save_file({"x": torch.zeros(2, 3)}, file)
    shard = Shard(shape=(3, 2), box=((0, 1), (0, 2)), tensor=torch.zeros(1, 2))

    with pytest.raises(UsageError, match=r"E507.*'x'"):
        fill_from_safetensors({"x": shard}, {"x": file})


def test_weights_in_several_files_are_found_by_their_index(model_dir, tmp_path):
    tensors = load_file(f"{model_dir('llama')}/model.safetensors")
    names = sorted(tensors)
    for part in range(2):
        save_file({n: tensors[n] for n in names[part::2]}, tmp_path / f"part-{part}.safetensors")
    places = {name: f"part-{at % 2}.safetensors" for at, name in enumerate(names)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))

    found = stored_names(str(tmp_path))

    assert {name: tmp_path / file for name, file in places.items()} == found


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gemma2", "gptoss"])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_skeleton_has_the_models_names_and_buffers_and_no_memory(family, head):
    config = make_config(family)
    with loading.quiet_transformers():
        whole = loading.build("a model", config, head, torch.float32, 1, "random")
        made = skeleton("a model", config, head, torch.float32)

    assert all(parameter.is_meta for parameter in made.parameters())
    shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}
    assert shapes == {name: parameter.shape for name, parameter in made.named_parameters()}
    buffers = dict(made.named_buffers())
    for name, expected in whole.named_buffers():
        assert torch.equal(expected, buffers[name]), name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "gptoss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_are_those_of_the_whole_model(family, dtype):
    config = make_config(family)

    def make():
        return loading.build("a model", config, "lm", dtype, 11, "random")

    with loading.quiet_transformers():
        expected = dict(make().named_parameters())
        before = torch.get_rng_state()
        found = {name: tensor.clone() for name, tensor in drawn_parameters(make)}

    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert torch.equal(before, torch.get_rng_state())


def test_only_what_was_written_last_keeps_its_contents():
    draws = Draws()
    with draws:
        first = torch.nn.Linear(30, 40)
        second = torch.nn.Linear(40, 50)
        read = first.weight.detach().sum()

    kept = [p.untyped_storage().nbytes() for p in (first.weight, second.weight)]

    assert 0 in kept
    with draws.contents(first.weight.detach()) as weight:
        assert read == weight.sum()
        assert weight.abs().max() > 0
    assert first.weight.untyped_storage().nbytes() == 0


def test_a_parameter_is_looked_for_under_the_names_that_files_use(model_dir):
    config = make_config("qwen2")
    made = skeleton("a model", config, "lm", torch.float32)
    tied = tied_names(made)

    names = names_in_file(tied["model.embed_tokens.weight"], made)

    assert ["model.embed_tokens.weight", "lm_head.weight"] == tied["model.embed_tokens.weight"]
    assert {"model.embed_tokens.weight", "lm_head.weight", "embed_tokens.weight"} <= set(names)
    valued = skeleton("a model", config, "value", torch.float32)
    found = names_in_file(tied_names(valued)["body.norm.weight"], valued.body)
    assert {"norm.weight", "model.norm.weight"} <= set(found)


@given(size=st.integers(0, 40), parts=st.integers(1, 9))
def test_chunks_are_those_of_torch(size, parts):
    whole = torch.arange(size)
    expected = [part.tolist() for part in torch.chunk(whole, parts)] if size else []

    found = [list(range(*chunk(size, parts, part))) for part in range(parts)]

    assert expected == [part for part in found if part]
    assert sorted(whole.tolist()) == [item for part in found for item in part]
