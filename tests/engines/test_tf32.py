"""TF32: torch's switch is on while a use computes that asks for it, and as it was after it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlflow.engines.hf.loading import load_model
from rlflow.engines.tf32 import changes_products, tf32_products
from rlflow.runtime.worker import loaded as loading
from rlflow.runtime.worker.loaded import products_of

pytestmark = pytest.mark.torch


def switched():
    return torch.backends.cuda.matmul.allow_tf32


def test_the_switch_is_reset_also_after_an_error():
    before = torch.get_float32_matmul_precision()
    with tf32_products(on=True):
        assert switched()
        with tf32_products(on=False):
            assert switched()
    assert not switched()
    with pytest.raises(ZeroDivisionError), tf32_products(on=True):
        raise ZeroDivisionError
    assert before == torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("dtype", "device", "changes"),
    [
        (torch.float32, "cuda", True),
        (torch.float32, "cuda:1", True),
        (torch.bfloat16, "cuda", False),
        (torch.float64, "cuda", False),
        (torch.float32, "cpu", False),
    ],
)
def test_it_is_for_float32_on_cuda(dtype, device, changes):
    assert changes is changes_products(dtype, torch.device(device))


def test_a_worker_switches_it_for_uses_that_say_so(model_dir, monkeypatch):
    """On a CPU nothing is switched; the device is the one thing that differs."""
    model = load_model(model_dir("qwen2"), dtype=torch.float32, device="cpu")
    held = SimpleNamespace(instance=SimpleNamespace(tf32=("train",)), model=model)
    with products_of(held, "train"):
        assert not switched()
    cuda = torch.device("cuda")
    monkeypatch.setattr(loading, "changes_products", lambda kind, _: changes_products(kind, cuda))
    for use, found in (("train", True), ("rollout", False), (None, False)):
        with products_of(held, use):
            assert found is switched()
    with products_of(None, None):
        assert not switched()
