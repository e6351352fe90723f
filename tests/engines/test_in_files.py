"""Names by which engines are told of weights: those of a model's files, parts of its own."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.weights.in_files import FileNames
from rlflow.engines.process.client.shared_weights import SharedWeights
from rlflow.engines.process.client.taking import BucketTaker
from rlflow.errors import UsageError
from tests.engines import hybrids, latents, mixtures

pytestmark = pytest.mark.torch

MAKERS = {
    **dict.fromkeys(mixtures.KINDS, mixtures.save_mixture),
    **dict.fromkeys(latents.FAMILIES, latents.save_latent),
    **dict.fromkeys(hybrids.FAMILIES, hybrids.save_hybrid),
}


@pytest.mark.rows(10)
@pytest.mark.parametrize("family", MAKERS)
def test_every_tensor_of_the_files_is_told_once_by_its_name_there(family, tmp_path):
    """Bytes too: what lies in shared memory under a name is what transformers has written."""
    path = MAKERS[family](family, tmp_path / "model")
    model = load_model(path, dtype=torch.float32, device="cpu")
    names = FileNames.of(model.module, path)
    held = SharedWeights(dict(model.module.named_parameters()), names=names)

    written = load_file(tmp_path / "model" / "model.safetensors")
    assert sorted(written) == sorted(name for name, *_ in held.table) == sorted(held.stored)
    offsets = [offset for *_, offset in held.table]
    assert offsets == sorted(offsets)
    for name, tensor in held.stored.items():
        assert torch.equal(tensor, written[name].float()), name
        assert torch.equal(names.views(held.tensors)[name], tensor), name
    rows = [row for row in held.table if "embed" not in row[0]]
    whole = torch.cat([held.stored[name].flatten() for name, *_ in rows])
    assert torch.equal(held.piece(rows).view(torch.float32), whole)


def test_what_is_in_no_file_keeps_its_name_and_scales_follow_their_weight(tmp_path):
    path = mixtures.save_mixture("mixtral", tmp_path / "model")
    names = FileNames.of(load_model(path, dtype=torch.float32, device="cpu").module, path)
    router, adapter = "model.layers.0.mlp.gate.weight", "model.layers.0.self_attn.q_proj.lora_A"
    table = [(router, "float32", (4, 32), 0), (f"{router}_scale_inv", "float32", (1, 1), 512)]

    made = [name for name, *_ in names.rows([*table, (adapter, "float32", (2, 32), 576)])]

    stored = "model.layers.0.block_sparse_moe.gate.weight"
    assert [stored, f"{stored}_scale_inv", adapter] == made


def test_buckets_from_devices_are_told_by_names_of_files(tmp_path):
    """A bucket has whole weights of the module, wherever it lies in memory."""
    path = mixtures.save_mixture("qwen3_moe", tmp_path / "model")
    model = load_model(path, dtype=torch.float32, device="cpu")
    staging = SharedWeights(model.named_tensors(), names=FileNames.of(model.module, path))
    asked = []

    class Link:
        def ask(self, do, fields):
            asked.append((do, fields))
            return self

        def result(self):
            return ""

    taker = BucketTaker(staging, Link)
    taker.open()
    fused = "model.layers.1.mlp.experts.gate_up_proj"
    taker.take([(fused, "float32", (4, 48, 32), 640)], [("cpu", ())])()

    rows = asked[1][1]["bucket"]
    front, half = "model.layers.1.mlp.experts", 24 * 32 * 4
    wanted = [(e, part) for e in range(4) for part in ("gate", "up")]
    assert [f"{front}.{e}.{part}_proj.weight" for e, part in wanted] == [name for name, *_ in rows]
    assert [("float32", (24, 32), 640 + n * half) for n in range(8)] == [row[1:] for row in rows]


def test_weights_that_files_have_otherwise_are_refused():
    class Turned(torch.nn.Module):
        _keys_to_ignore_on_save = None

    with pytest.MonkeyPatch.context() as patched:
        where = "rlflow.engines.hf.weights.in_files.parts_in_files"
        patched.setattr(where, lambda module: None)
        with pytest.raises(UsageError, match=r"E591.*\n.*made of several"):
            FileNames.of(Turned(), "some/model")
