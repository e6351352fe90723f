"""Faster forms of layers that models share, put in place of their `forward` and verified.

On a CPU, oneDNN multiplies float32 matrices up to twice as fast as the library that
`torch.nn.functional.linear` calls. What is replaced is chosen by the layer's form alone, never
by a measurement, so that equal machines compute equal numbers. A model is compared with its
own unmodified forward when it is loaded. This file knows no model by name.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_multiply = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def onednn_works() -> bool:
    """Whether this build has the oneDNN product and it gives the right numbers."""
    if _multiply is None or not torch.backends.mkldnn.is_available():
        return False
    left = torch.arange(32, dtype=torch.float32).view(4, 8)
    right = torch.arange(24, dtype=torch.float32).view(3, 8)
    try:
        product = _multiply(left, right, None, "none", [], "")
    except RuntimeError:
        return False
    return bool((product == left @ right.t()).all())


ONEDNN = onednn_works()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` for `x [rows, in]` and `weight [out, in]`, without gradient."""
    if ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu" and len(x):
        output: Tensor = _multiply(x, weight, bias, "none", [], "")  # type: ignore[misc]
        return output
    return nn.functional.linear(x, weight, bias)


class Product(torch.autograd.Function):
    """`product` with its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x [rows, in]`, `weight [out, in]`, `bias [out]`."""
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of x, weight and bias."""
        x, weight = ctx.saved_tensors
        grad_x = product(grad, weight.t()) if ctx.needs_input_grad[0] else None
        grad_weight = product(grad.t(), x.t()) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, grad.sum(0) if ctx.biased else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`product` of `x [..., in]`, with gradient where it is wanted."""
    rows = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled():
        output = Product.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    else:
        output = product(rows, weight, bias)
    result: Tensor = output.view(*x.shape[:-1], weight.shape[0])
    return result


def linear_forward(module: nn.Linear, x: Tensor) -> Tensor:
    """The forward of a linear layer."""
    return linear(x, module.weight, module.bias)


def replace_forwards(module: nn.Module) -> int:
    """Put the faster forms in place in a whole model; how many layers were replaced."""
    replaced = 0
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.forward = partial(linear_forward, layer)  # type: ignore[method-assign]
            replaced += 1
    return replaced
