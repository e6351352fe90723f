"""Checkpoints of torch tensors: dtypes, ties, views, and what loading may touch."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from rlflow.runtime.record.checkpoint import save_checkpoint, verify_checkpoint
from tests.runtime.whole_checkpoints import load_checkpoint

pytestmark = pytest.mark.torch

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_saving_leaves_the_storage_free_to_sleep(tmp_path):
    tensor = torch.arange(4.0)

    save_checkpoint(tmp_path, 1, {"m": {"t": tensor}}, {}, {})

    tensor.untyped_storage().resize_(0)
    assert 0 == tensor.untyped_storage().nbytes()


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    tensors = {str(dtype): torch.tensor([0, 1, 2, 3]).to(dtype) for dtype in DTYPES}
    path = save_checkpoint(tmp_path, 1, {"m": tensors}, {}, {})
    for loaded in (load_checkpoint(tmp_path).components["m"], load_file(path / "m.safetensors")):
        assert tensors.keys() == loaded.keys()
        for name, tensor in tensors.items():
            assert (tensor.dtype, bits(tensor)) == (loaded[name].dtype, bits(loaded[name]))


def test_nan_payloads_scalars_and_empty_tensors_survive(tmp_path):
    tensors = {
        "nan": torch.tensor([0x7FC00001, 0x7F800000, -1], dtype=torch.int32).view(torch.float32),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
    }
    save_checkpoint(tmp_path, 1, {"m": tensors}, {}, {})
    loaded = load_checkpoint(tmp_path).components["m"]
    assert {n: (t.shape, bits(t)) for n, t in tensors.items()} == {
        n: (t.shape, bits(t)) for n, t in loaded.items()
    }


def test_model_and_optimizer_continue_as_if_never_stopped(tmp_path):
    def make():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model, optimizer, turns):
        for turn in range(turns):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(turn + 1))).pow(2).sum().backward()
            optimizer.step()

    model, optimizer = make()
    train(model, optimizer, 3)
    moments = {
        f"{key}.{name}": tensor
        for key, entry in optimizer.state_dict()["state"].items()
        for name, tensor in entry.items()
    }
    save_checkpoint(tmp_path, 3, {"actor": model.state_dict(), "actor.optimizer": moments}, {}, {})
    train(model, optimizer, 2)

    again, fresh = make()
    loaded = load_checkpoint(tmp_path).components
    again.load_state_dict(loaded["actor"])
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in loaded["actor.optimizer"].items():
        key, _, field = name.partition(".")
        state.setdefault(int(key), {})[field] = tensor
    fresh.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    train(again, fresh, 2)
    for left, right in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(left, right)


def test_tied_strided_and_grad_tensors_are_written_as_values(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3).requires_grad_()
    tensors = {"a": weight, "tied": weight, "t": weight.T, "expanded": torch.ones(1).expand(4)}
    save_checkpoint(tmp_path, 1, {"m": tensors}, {}, {})
    loaded = load_checkpoint(tmp_path).components["m"]
    assert all(torch.equal(tensors[name].detach(), loaded[name]) for name in tensors)


def test_changing_a_loaded_tensor_leaves_the_file_as_it_was(tmp_path):
    path = save_checkpoint(tmp_path, 1, {"m": {"t": torch.zeros(1000)}}, {}, {})
    load_checkpoint(tmp_path).components["m"]["t"].add_(1)
    verify_checkpoint(path)
