from __future__ import annotations

import pytest
import torch

from rlflow.engines import fused, kernels
from rlflow.engines.loading import load_model

pytestmark = pytest.mark.torch


def load(path, dtype=torch.float32):
    return load_model(path, dtype=dtype, device="cpu")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_every_layer_of_the_llama_family_is_replaced(family, model_dir):
    module = load(model_dir(family)).module
    replaced = {type(m).__name__ for m in module.modules() if "forward" in vars(m)}
    names = {name.replace("RMSNorm", "").replace("Attention", "") for name in replaced}
    assert {"Linear"} < replaced
    assert 3 == len(replaced - {"Linear"}), names


def test_joined_weights_are_views_that_follow_the_parts(model_dir):
    model = load(model_dir("qwen2"))
    layer = model.module.model.layers[0].self_attn
    joined = fused.Joined((layer.q_proj, layer.k_proj, layer.v_proj))
    assert joined.whole
    model.sleep()
    model.wake()
    with torch.no_grad():
        layer.v_proj.weight.fill_(3)
        layer.k_proj.bias.fill_(2)
    assert torch.equal(torch.cat([p.weight for p in joined.layers]), joined.weight)
    assert torch.equal(torch.cat([p.bias for p in joined.layers]), joined.bias)
    assert not fused.Joined((layer.q_proj, layer.v_proj)).whole


def test_forwards_that_compute_something_else_are_taken_back(model_dir, monkeypatch):
    real = kernels.gated_unit
    monkeypatch.setattr(fused, "gated_unit", lambda gate, up: real(gate, up) * 1.01)
    module = load(model_dir("qwen2")).module
    assert not any("forward" in vars(layer) for layer in module.modules())


def test_gradients_of_the_kernels_equal_finite_differences():
    torch.manual_seed(0)
    x, up = (torch.randn(5, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    check = torch.autograd.gradcheck
    assert check(lambda a, b: kernels.root_norm(a, b, 1e-6), (x, weight))
    assert check(kernels.gated_unit, (x, up))
    heads = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    angle = torch.randn(3, 1, 2, dtype=torch.float64).repeat(1, 1, 2)
    assert check(lambda a: kernels.rotate(a, angle.cos(), angle.sin()), (heads,))
    for out in (2, 9):
        layer = torch.nn.Linear(6, out).double()
        inputs = (x, layer.weight, layer.bias)
        assert check(lambda a, *parts, size=layer: kernels.linear(a, size), inputs)


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("out", [3, 80])
def test_float32_products_equal_those_of_torch(rows, out):
    torch.manual_seed(0)
    x = torch.randn(rows, 40, requires_grad=True)
    layer = torch.nn.Linear(40, out)
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    found = kernels.linear(x, layer)
    assert torch.allclose(expected, found, atol=1e-5)
    weights = torch.randn(rows, out)
    wanted = (x, layer.weight, layer.bias)
    for a, b in zip(
        torch.autograd.grad((expected * weights).sum(), wanted),
        torch.autograd.grad((found * weights).sum(), wanted),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-4)
