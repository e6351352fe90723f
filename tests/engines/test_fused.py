from __future__ import annotations

import sys

import pytest
import torch

from rlflow.batch import ragged_rows
from rlflow.engines.hf.forward import fused, kernels
from rlflow.engines.hf.forward.attention import PackedAttention
from rlflow.engines.hf.forward.packed import pack_prompts
from rlflow.engines.hf.loading import load_model

pytestmark = pytest.mark.torch


def load(path, dtype=torch.float32):
    return load_model(path, dtype=dtype, device="cpu")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_every_layer_of_the_llama_family_is_replaced(family, model_dir):
    module = load(model_dir(family)).module
    kept = {type(m).__name__ for m in module.modules() if "forward" not in vars(m)}
    assert {name for name in kept if not name.endswith("RotaryEmbedding")} == {
        "Embedding",
        "ModuleList",
        "SiLUActivation",
    }


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_forward_on_packed_tokens_makes_no_mask(family, model_dir, monkeypatch):
    model = load(model_dir(family))
    modeling = sys.modules[type(model.module).__module__]
    monkeypatch.setattr(modeling, "create_causal_mask", None)
    monkeypatch.setattr(modeling, "create_sliding_window_causal_mask", None, raising=False)
    layout = pack_prompts(ragged_rows([[5, 6, 7], [8, 9]], torch.int64), model.device)
    state = PackedAttention(layout)
    found = model.logits(layout.tokens, layout.positions, state, layout.targets)
    assert found.shape == (len(layout.targets), model.config.vocab_size)


def test_gate_and_up_are_one_product_whose_gradients_are_those_of_two(model_dir, monkeypatch):
    layer = load(model_dir("qwen2")).module.model.layers[0].mlp
    x = torch.randn(17, layer.gate_proj.in_features)
    weights = (layer.gate_proj.weight, layer.up_proj.weight, layer.down_proj.weight)
    gate, up = (torch.nn.functional.linear(x, weight) for weight in weights[:2])
    plain = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, weights[2])
    expected = torch.autograd.grad(plain.square().sum(), weights)
    calls = []
    real = kernels.product
    monkeypatch.setattr(kernels, "product", lambda *given: calls.append(1) or real(*given))
    output = layer(x)
    assert len(calls) == 2
    assert torch.allclose(plain, output, atol=1e-6)
    for a, b in zip(expected, torch.autograd.grad(output.square().sum(), weights), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


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
    real = kernels.gated_halves
    monkeypatch.setattr(fused, "gated_halves", lambda both: real(both) * 1.01)
    layers = load(model_dir("qwen2")).module.model.modules()
    assert not any("forward" in vars(layer) for layer in layers)


def test_gradients_of_the_kernels_equal_finite_differences():
    torch.manual_seed(0)
    x, up = (torch.randn(5, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    check = torch.autograd.gradcheck
    assert check(lambda a, b: kernels.root_norm(a, b, 1e-6), (x, weight))
    assert check(kernels.gated_unit, (x, up))
    assert check(kernels.gated_halves, (x,))
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
