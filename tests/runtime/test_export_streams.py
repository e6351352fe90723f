"""Exports: a directory as transformers reads it, made with one tensor in memory at a time."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from rlflow.cli import export
from rlflow.engines.hf import writing
from rlflow.engines.hf.loading import load_model
from rlflow.graph.model import LoRA
from rlflow.runtime.record.checkpoint import find_checkpoint, save_checkpoint
from rlflow.runtime.record.durable import arm_from_environment
from rlflow.runtime.record.shards import exporting
from rlflow.runtime.record.shards.reading import StoredTensor
from tests.conftest import TINY
from tests.engines import reward_models as made
from tests.engines.mixtures import save_mixture
from tests.runtime.test_checkpoint_shards import Ranks

pytestmark = pytest.mark.torch

ADAPTERS = {"rank": 2, "alpha": 4.0, "targets": ("q_proj", "down_proj")}


def trained(dtype, lora=None, path=TINY, head="lm"):
    """What training has made of a model: every number it may change is another one."""
    options = {"lora": None if lora is None else LoRA(**lora), "head": head}
    model = load_model(str(path), dtype=dtype, device="cpu", **options)
    generator = torch.Generator().manual_seed(5)
    for name in sorted(model.trained_names()):
        tensor = model.all_tensors()[name]
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def saved(root, model):
    """The checkpoint of two ranks, with the numbers in float32."""
    tensors = {n: model.all_tensors()[n].float().clone() for n in sorted(model.trained_names())}
    save_checkpoint(root, 1, Ranks(tensors), {}, {"seed": "0"})
    found = find_checkpoint(root)
    assert 2 == len(found.files["m"])
    return found


def spec_of(dtype, lora=None, head="lm"):
    name = str(dtype).removeprefix("torch.")
    return {"name": "m", "head": head, "dtype": name, "init": "pretrained", "lora": lora}


def same(first, second):
    return first.keys() == second.keys() and all(
        first[n].dtype == second[n].dtype and torch.equal(first[n], second[n]) for n in first
    )


@pytest.mark.parametrize("lora", [None, ADAPTERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_the_whole_model_would_be_written_as(tmp_path, dtype, lora):
    model = trained(dtype, lora)
    found = saved(tmp_path / "run", model)
    out, whole = tmp_path / "out", tmp_path / "whole"

    export._write(TINY, spec_of(dtype, lora), found, out)
    writing.save_model(model, str(whole))

    assert same(load_file(whole / "model.safetensors"), load_file(out / "model.safetensors"))
    left, right = (json.loads((path / "config.json").read_text()) for path in (out, whole))
    for config in (left, right):
        config.pop("_name_or_path", None)
    assert left == right
    assert {path.name for path in whole.iterdir()} == {path.name for path in out.iterdir()}


@pytest.mark.parametrize("lora", [None, {**ADAPTERS, "targets": ("q_proj", "o_proj")}])
def test_experts_are_written_one_by_one_under_the_names_they_came_by(tmp_path, lora):
    source = Path(save_mixture("qwen3_moe", tmp_path / "source"))
    before = load_file(source / "model.safetensors")
    model = load_model(str(source), dtype=torch.float32, device="cpu", lora=lora and LoRA(**lora))
    unchanged, out = saved(tmp_path / "run", model), tmp_path / "out"

    assert exporting.stream_model(
        str(source), spec_of(torch.float32, lora), unchanged.files["m"], out
    )

    assert same(before, load_file(out / "model.safetensors"))


def with_own_head(path):
    made.with_head(path, "qwen2", made.linear("judge.out", bias=False))


HEADS = {
    "fresh": lambda path: shutil.copytree(TINY, path, dirs_exist_ok=True),
    "score": lambda path: made.classifier(path, "llama", "score"),
    "tokens": lambda path: made.classifier(path, "qwen2", "tokens"),
    "named otherwise": with_own_head,
    "two layers": lambda path: made.with_head(path, "qwen2", made.MATH_RM, "Qwen2ForRewardModel"),
}


@pytest.mark.rows(4)
@pytest.mark.parametrize("lora", [None, ADAPTERS])
@pytest.mark.parametrize("kind", HEADS)
def test_a_value_model_is_streamed_to_what_it_would_be_written_as(
    tmp_path, monkeypatch, kind, lora
):
    HEADS[kind](tmp_path / "began")
    model = trained(torch.bfloat16, lora, tmp_path / "began", "value")
    found = saved(tmp_path / "run", model)
    out, whole = tmp_path / "out", tmp_path / "whole"
    writing.save_model(model, str(whole))

    monkeypatch.setattr(export, "_model", None)
    export._write(tmp_path / "began", spec_of(torch.bfloat16, lora, "value"), found, out)
    assert same(load_file(whole / "model.safetensors"), load_file(out / "model.safetensors"))
    left, right = (json.loads((path / "config.json").read_text()) for path in (out, whole))
    for config in (left, right):
        config.pop("_name_or_path", None)
    assert left == right


def test_no_more_than_a_tensor_is_in_memory(tmp_path, monkeypatch):
    """Counted: bytes of all that is read of a checkpoint and still alive."""
    found = saved(tmp_path / "run", trained(torch.float32))
    alive, most, whole = SimpleNamespace(now=0), [], []
    read = StoredTensor.__getitem__

    def counted(self, where):
        tensor = read(self, where)
        size = tensor.untyped_storage().nbytes()
        alive.now += size
        most.append(alive.now)
        whole.append(size)

        def gone():
            alive.now -= size

        weakref.finalize(tensor, gone)
        return tensor

    monkeypatch.setattr(StoredTensor, "__getitem__", counted)
    export._write(TINY, spec_of(torch.float32), found, tmp_path / "out")
    assert len(whole) == len(load_file(tmp_path / "out" / "model.safetensors"))
    assert max(most) <= 2 * max(whole) < sum(whole) / 2


@pytest.mark.parametrize("point", ["write", "fsync"])
def test_an_export_to_a_full_disk_is_an_error_and_the_next_one_is_whole(
    point, tmp_path, monkeypatch
):
    model, output = trained(torch.float32), tmp_path / "out"
    found = saved(tmp_path / "run", model)
    monkeypatch.setenv("RLFLOW_FAULT", f"export:weights:{point}=enospc")
    arm_from_environment()
    try:
        with pytest.raises(OSError, match="No space left"):
            export._write(TINY, spec_of(torch.float32), found, output)
    finally:
        monkeypatch.delenv("RLFLOW_FAULT")
        arm_from_environment()
    export._write(TINY, spec_of(torch.float32), found, output)
    assert same(model.named_tensors(), load_file(output / "model.safetensors"))


def test_large_models_are_several_files_with_an_index(tmp_path, monkeypatch):
    model = trained(torch.float32)
    found = saved(tmp_path / "run", model)

    def by_two(shapes):
        names = sorted(shapes)
        return {
            "model-00001-of-00002.safetensors": names[::2],
            "model-00002-of-00002.safetensors": names[1::2],
        }

    monkeypatch.setattr(exporting, "files_of", by_two)
    export._write(TINY, spec_of(torch.float32), found, tmp_path / "out")
    shutil.copy(TINY / "config.json", tmp_path / "out")
    again = load_model(str(tmp_path / "out"), dtype=torch.float32, device="cpu")
    assert same(model.named_tensors(), again.named_tensors())


def test_what_files_have_otherwise_is_written_whole(tmp_path, monkeypatch):
    """Transformers turns or mixes some architectures' tensors: files have no parts of them."""
    model = trained(torch.float32)
    found = saved(tmp_path / "run", model)
    monkeypatch.setattr(exporting, "parts_in_files", lambda module: None)
    spec = {**spec_of(torch.float32), "head": "lm"}
    export._write(TINY, spec, found, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert same(written, writing.plain_state(model.module, model.merged_tensors()))
