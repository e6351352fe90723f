"""Matrix products, norms and rotations with backward passes of their own.

On a CPU, oneDNN multiplies float32 matrices up to twice as fast as the library that
`torch.nn.functional.linear` calls. What is used is chosen by form alone, never by a
measurement, so that equal machines compute equal numbers. This file knows no model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_multiply = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def onednn_works() -> bool:
    """Whether this build has the oneDNN product and it gives the right numbers."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if _multiply is None or not available:
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


def outer_product(left: Tensor, right: Tensor) -> Tensor:
    """`left.T @ right` for `left [rows, out]` and `right [rows, in]`.

    The product copies its first operand where that is transposed, so the smaller one goes first.
    """
    if left.shape[1] <= right.shape[1]:
        return product(left.t(), right.t())
    return product(right.t(), left.t()).t()


class Products(torch.autograd.Function):
    """One product with several weights `[out_i, in]` that lie one after the other in memory."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, joined: Tensor, joined_bias: Tensor | None, *parts: Tensor | None
    ) -> Tensor:
        """`x [rows, in]`, `joined [out, in]` and its bias; `parts` are its weights, then biases."""
        half = len(parts) // 2
        trained = ctx.needs_input_grad[3]
        ctx.save_for_backward(x if trained else None, joined)
        ctx.sizes = [len(weight) for weight in parts[:half] if weight is not None]
        ctx.biased = joined_bias is not None and ctx.needs_input_grad[3 + half]
        return product(x, joined, joined_bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and of the parts."""
        x, joined = ctx.saved_tensors
        grad_x = product(grad, joined.t()) if ctx.needs_input_grad[0] else None
        none = (None,) * len(ctx.sizes)
        weights = none if x is None else torch.split(outer_product(grad, x), ctx.sizes)
        biases = torch.split(grad.sum(0), ctx.sizes) if ctx.biased else none
        return grad_x, None, None, *weights, *biases


def products(
    x: Tensor, joined: Tensor, joined_bias: Tensor | None, layers: tuple[nn.Linear, ...]
) -> Tensor:
    """The outputs of several linear layers on `x [rows, in]` side by side, `[rows, out]`."""
    if not torch.is_grad_enabled():
        return product(x, joined, joined_bias)
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers]
    output: Tensor = Products.apply(  # type: ignore[no-untyped-call]
        x, joined, joined_bias, *weights, *biases
    )
    return output


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """A linear layer's output for `x [..., in]`."""
    rows = x.reshape(-1, x.shape[-1])
    output = products(rows, layer.weight.detach(), layer.bias, (layer,))
    return output.view(*x.shape[:-1], layer.out_features)


class LowRank(torch.autograd.Function):
    """`scale * (x @ down.T) @ up.T` (Hu et al., "LoRA", 2021, section 4.1)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        """`x [rows, in]`, `down [rank, in]` and `up [out, rank]`."""
        inner = product(x, down).mul_(scale)
        ctx.save_for_backward(x, down, up, inner)
        ctx.scale = scale
        return product(inner, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        """Gradients of x, down and up."""
        x, down, up, inner = ctx.saved_tensors
        # A slice of wider rows would be multiplied a hundred times slower.
        grad = grad.contiguous()
        grad_inner = product(grad, up.t()).mul_(ctx.scale)
        grad_x = product(grad_inner, down.t()) if ctx.needs_input_grad[0] else None
        return grad_x, outer_product(grad_inner, x), outer_product(grad, inner), None


def low_rank(x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """`LowRank` for `x [rows, in]`, with gradient where that is enabled."""
    if not torch.is_grad_enabled():
        return product(product(x, down).mul_(scale), up)
    output: Tensor = LowRank.apply(x, down, up, scale)  # type: ignore[no-untyped-call]
    return output


class RootNorm(torch.autograd.Function):
    """x / rms(x) * weight (Zhang and Sennrich, "Root mean square layer normalization", 2019)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x [..., size]`, `weight [size]`."""
        scale = inverse_root(x, eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Gradients of x and weight."""
        x, weight, scale = ctx.saved_tensors
        unit = x * scale
        product = grad * unit
        grad_weight = product.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        mean = product.mul_(weight).mean(-1, keepdim=True)
        grad_x = (grad * weight).sub_(unit.mul_(mean)).mul_(scale)
        return grad_x, grad_weight, None


def inverse_root(x: Tensor, eps: float) -> Tensor:
    """1 / rms of the last dimension, `[..., 1]`."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def root_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`RootNorm` with gradient where that is enabled."""
    if not torch.is_grad_enabled():
        return (x * inverse_root(x, eps)).mul_(weight)
    output: Tensor = RootNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return output


class GatedUnit(torch.autograd.Function):
    """silu(gate) * up (Shazeer, "GLU variants improve transformer", 2020, SwiGLU)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """`gate` and `up` of one shape."""
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up."""
        gate, up = ctx.saved_tensors
        grad_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, nn.functional.silu(gate).mul_(grad)


def gated_unit(gate: Tensor, up: Tensor) -> Tensor:
    """`GatedUnit` with gradient where that is enabled."""
    if not torch.is_grad_enabled():
        return nn.functional.silu(gate).mul_(up)
    output: Tensor = GatedUnit.apply(gate, up)  # type: ignore[no-untyped-call]
    return output


class Rotation(torch.autograd.Function):
    """Rotary positions (Su et al., "RoFormer", 2021), halves of a head rotated together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x [tokens, heads, size]`; `cos`, `sin` `[tokens, 1, size]`, equal in both halves."""
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The gradient turns back."""
        cos, sin = ctx.saved_tensors
        return rotated(grad, cos, sin, -1), None, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Turn by the angle, or back."""
    half = x.shape[-1] // 2
    output = x * cos
    output[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    output[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return output


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`Rotation` with gradient where that is enabled."""
    if not torch.is_grad_enabled():
        return rotated(x, cos, sin, 1)
    output: Tensor = Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return output
