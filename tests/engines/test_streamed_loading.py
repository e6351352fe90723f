"""Loading holds one piece of one tensor on the host, however large the model, whatever its files.

Counted are the storages on the CPU while a model is made for another device, one without data;
what is only a view of a mapped file takes nothing of the host that it does not get back.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rlflow.engines.hf import checking, loading
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.weights import filling
from rlflow.engines.hf.weights.streaming import streamed_skeleton
from rlflow.engines.process.client.load import staged
from rlflow.graph.model import LoRA
from rlflow.runtime.rehearse.live import BLOCK, LiveStorages
from rlflow.scheduler.costs.sizes import TENSORS_DRAWN
from rlflow.scheduler.models.shapes import read_shape
from tests.engines.conftest import make_config

pytestmark = pytest.mark.torch

ADAPTERS = LoRA(rank=2, targets=("q_proj", "down_proj"))
PIECE = 8192
WIDE, LOW = torch.float32, torch.bfloat16


def slowly(*words):
    """A second way through the same code."""
    return pytest.param(*words, marks=pytest.mark.slow)


class Allocated(LiveStorages):
    """Storages on the CPU that are the process's own, not pages of a safetensors file."""

    def note(self, tensor):
        lines = Path("/proc/self/maps").read_text().splitlines()
        mapped = [line.split("-", 1) for line in lines if line.endswith(".safetensors")]
        place = tensor.data_ptr()
        if not any(int(a, 16) <= place < int(rest.split()[0], 16) for a, rest in mapped):
            super().note(tensor)


@pytest.fixture
def files(tmp_path):
    """A model's directory: in which dtype, with tied heads or not, in how many files."""

    def make(dtype, *, tied, parts):
        config = make_config("qwen2")
        config.tie_word_embeddings = tied
        config.vocab_size, config.hidden_size = 512, 64
        torch.manual_seed(3)
        path = tmp_path / f"{dtype}{tied}{parts}"
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.save_pretrained(path)
        if parts > 1:
            tensors = load_file(path / "model.safetensors")
            places = {name: f"part-{at % parts}.safetensors" for at, name in enumerate(tensors)}
            for file in sorted(set(places.values())):
                save_file({n: t for n, t in tensors.items() if places[n] == file}, path / file)
            (path / "model.safetensors").unlink()
            index = path / "model.safetensors.index.json"
            index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
        return str(path)

    return make


@pytest.fixture
def for_another_device(monkeypatch):
    """The most bytes of the host while a model is loaded for a device that computes nothing."""
    for name, value in (
        ("plain_outputs", lambda *_: torch.zeros(1, 1)),
        ("forward_differences", lambda *_: {}),
        ("checked_head", lambda _, __, predictor: predictor),
    ):
        monkeypatch.setattr(loading, name, value)
    monkeypatch.setattr(filling, "LOADING_PIECE", PIECE)
    assert checking.plain_outputs is not loading.plain_outputs

    def load(path, **how):
        with Allocated("cpu") as live:
            model = load_model(path, device="meta", **how)
            left = live.now
        assert {p.device.type for p in model.module.parameters()} == {"meta"}
        return model, live.most, left

    return load


def plan_says_whole(path):
    """Whether plans count that a model is made whole, where engines do it."""
    config = transformers.AutoConfig.from_pretrained(path)
    found = streamed_skeleton(str(path), config, "lm", torch.float32) is None
    assert read_shape(Path(path)).made_whole is found
    return found


@pytest.mark.slow
@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("stored", "dtype", "tied", "parts"),
    [
        (WIDE, LOW, True, 1),
        (LOW, LOW, False, 2),
        slowly(WIDE, LOW, False, 2),
        slowly(LOW, WIDE, True, 1),
        slowly(WIDE, WIDE, False, 1),
    ],
)
def test_a_piece_of_a_tensor_is_all_that_the_host_holds(
    files, for_another_device, stored, dtype, tied, parts
):
    path = files(stored, tied=tied, parts=parts)
    model, most, left = for_another_device(path, dtype=dtype)
    assert left < 2 * PIECE
    # Blocks of 512 bytes are counted; a number's bytes are those of its file, and rounded.
    assert most <= left + PIECE + 2 * BLOCK < model.num_bytes() / 8
    assert not plan_says_whole(path)


@pytest.mark.slow
@pytest.mark.rows(1)
@pytest.mark.parametrize("more", [{"head": "value"}, {"lora": ADAPTERS}], ids=["value", "lora"])
def test_heads_and_adapters_take_no_more(files, for_another_device, more):
    path = files(torch.float32, tied=True, parts=1)
    model, most, left = for_another_device(path, dtype=torch.bfloat16, **more)
    assert most <= left + 4 * PIECE < model.num_bytes() / 4


@pytest.mark.parametrize("dtype", [LOW, slowly(WIDE)])
def test_random_weights_are_on_the_host_one_tensor_at_a_time(files, for_another_device, dtype):
    path = files(torch.float32, tied=True, parts=1)
    model, most, left = for_another_device(path, dtype=dtype, init="random")
    largest = max(p.numel() for p in model.module.parameters()) * 4
    drawn = TENSORS_DRAWN * largest * dtype.itemsize / 4
    assert most <= left + 1.05 * drawn < 4 * model.module.num_parameters()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "dtype", "tied"),
    [
        (WIDE, LOW, True),
        slowly(LOW, WIDE, False),
        slowly(WIDE, WIDE, True),
        slowly(LOW, LOW, False),
        slowly(WIDE, LOW, False),
    ],
)
def test_a_cpu_has_the_model_and_a_piece(files, monkeypatch, stored, dtype, tied):
    """And its weights are those that transformers loads, bit for bit, in pieces or not."""
    path = files(stored, tied=tied, parts=2)
    monkeypatch.setattr(filling, "LOADING_PIECE", PIECE)
    monkeypatch.setattr(loading, "plain_outputs", lambda *_: torch.zeros(1, 1))
    monkeypatch.setattr(loading, "forward_differences", lambda *_: {})
    with Allocated("cpu") as live:
        model = load_model(path, dtype=dtype, device="cpu")
    expected = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    assert live.most <= model.num_bytes() + 64 * 64 + 4 * PIECE
    found = model.named_tensors()
    assert found.keys() == dict(expected.named_parameters()).keys()
    assert all(torch.equal(found[n], p) for n, p in expected.named_parameters())


def test_random_weights_are_those_of_the_constructor(files):
    """One tensor at a time, as a device gets them, or all at once, as a CPU does."""
    path = files(torch.float32, tied=True, parts=1)
    at_once = load_model(path, dtype=torch.float32, device="cpu", init="random", seed=7)
    make = loading.skeleton_for
    with pytest.MonkeyPatch.context() as patch:
        elsewhere = torch.device("meta")
        patch.setattr(loading, "skeleton_for", lambda *how: make(*how[:-1], elsewhere))
        one_by_one = load_model(path, dtype=torch.float32, device="cpu", init="random", seed=7)
    found, expected = one_by_one.named_tensors(), at_once.named_tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_layers_on_the_host_are_there_once(files, for_another_device):
    path = files(torch.float32, tied=True, parts=1)
    model, most, left = for_another_device(path, dtype=torch.bfloat16, offload="layers")
    assert model.layers is not None
    assert left <= model.layers.num_bytes() + 2 * PIECE
    assert most <= left + 2 * PIECE


def test_tied_weights_that_differ_in_the_files_are_left_to_transformers(files, tmp_path):
    path = tmp_path / "both"
    shutil.copytree(files(torch.float32, tied=True, parts=1), path)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert plan_says_whole(path)
    model = load_model(str(path), dtype=torch.float32, device="cpu")
    assert torch.equal(tensors["lm_head.weight"], model.named_tensors()["lm_head.weight"])


@pytest.mark.rows(1)
@pytest.mark.parametrize("init", ["weights", "random"])
def test_an_engine_has_its_staging_and_no_second_copy(files, monkeypatch, tmp_path, init):
    path = files(torch.float32, tied=True, parts=2)
    monkeypatch.setattr(filling, "LOADING_PIECE", PIECE)
    how = {"dtype": torch.bfloat16, "seed": 1, "device": torch.device("cpu"), "lora": ADAPTERS}
    expected = load_model(
        path, dtype=torch.bfloat16, device="cpu", seed=1, lora=ADAPTERS, init=init
    ).named_tensors()
    with Allocated("cpu") as live:
        _, (staging,), adapters = staged({"model": (path, init)}, str(tmp_path), held=True, **how)
    assert expected.keys() == staging.tensors.keys()
    assert all(torch.equal(tensor, staging.tensors[name]) for name, tensor in expected.items())
    assert adapters == {name for name in expected if ".lora_" in name}
    if init == "weights":
        assert live.most <= staging.size + 4 * PIECE
