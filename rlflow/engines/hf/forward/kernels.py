"""Matrix products, norms and rotations with backward passes of their own.

Two libraries multiply float32 matrices on a CPU, and which is faster depends on its maker. What
is used is chosen by form and maker alone, never by a measurement, so that equal machines compute
equal numbers. This file knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

Library = Literal["mkl", "onednn", "torch"]
# What may take the gradient of outputs and the inputs that a weight's gradient is made of.
Late = Callable[[Tensor, Tensor], bool]

_multiply = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
# With fewer rows a library adds in another order. Such a product is filled up with zeros, so that
# a row's numbers do not depend on how many rows stand beside it.
LEAST_ROWS: dict[Library, int] = {"mkl": 16, "onednn": 2, "torch": 1}


def onednn_works() -> bool:
    """Whether this build has the oneDNN product, it is right, and a row of it is that row's alone.

    That of torch 2.11 (oneDNN 3.10.2 on an EPYC) adds in another order below 16 rows, and in wide
    products for every number of rows.
    """
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if _multiply is None or not available:
        return False
    left = torch.arange(32, dtype=torch.float32).view(4, 8)
    right = torch.arange(24, dtype=torch.float32).view(3, 8)
    try:
        product = _multiply(left, right, None, "none", [], "")
    except RuntimeError:
        return False
    return bool((product == left @ right.t()).all()) and rows_are_alone()


def rows_are_alone() -> bool:
    """Whether oneDNN's products of some rows are those of all of them, bit for bit."""
    for wide in (32, 1024):
        x = torch.arange(64 * wide, dtype=torch.float32).view(64, wide).sin()
        weight = torch.arange(48 * wide, dtype=torch.float32).view(48, wide).cos()
        whole = _multiply(x, weight, None, "none", [], "")  # type: ignore[misc]
        for rows in (LEAST_ROWS["onednn"], 15, 48):
            some = _multiply(x[-rows:].clone(), weight, None, "none", [], "")  # type: ignore[misc]
            if not torch.equal(whole[-rows:], some):
                return False
    return True


def cpu_maker() -> str:
    """The processor's maker as Linux names it, such as GenuineIntel; empty where it is not said."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id"))
    return next(found, "")


def chosen_library() -> Library:
    """The library of float32 products: MKL on the processors that it is made for, else oneDNN.

    `benchmarks/products.py` measures both: on a Xeon MKL is the faster one, on an EPYC oneDNN.
    MKL also stands in for a oneDNN that does not work; "torch" is what torch calls without either.
    """
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if has_mkl and cpu_maker() == "GenuineIntel":
        return "mkl"
    if onednn_works():
        return "onednn"
    return "mkl" if has_mkl else "torch"


LIBRARY = chosen_library()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` for `x [rows, in]` and `weight [out, in]`, without gradient."""
    rows = len(x)
    if not rows or x.dtype != torch.float32 or x.device.type != "cpu":
        return nn.functional.linear(x, weight, bias)
    missing = LEAST_ROWS[LIBRARY] - rows
    if missing > 0:
        return product(nn.functional.pad(x, (0, 0, 0, missing)), weight, bias)[:rows]
    if LIBRARY == "onednn":
        output: Tensor = _multiply(x, weight, bias, "none", [], "")  # type: ignore[misc]
        return output
    return nn.functional.linear(x, weight, bias)


def outer_product(left: Tensor, right: Tensor) -> Tensor:
    """`left.T @ right` for `left [rows, out]` and `right [rows, in]`.

    oneDNN copies its first operand where that is transposed, so the smaller one goes first.
    """
    if left.shape[1] <= right.shape[1]:
        return product(left.t(), right.t())
    return product(right.t(), left.t()).t()


class Products(torch.autograd.Function):
    """One product with several weights `[out_i, in]` that lie one after the other in memory."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        joined: Tensor,
        joined_bias: Tensor | None,
        late: Late | None,
        *parts: Tensor | None,
    ) -> Tensor:
        """`x [rows, in]`, `joined [out, in]` and its bias; `parts` are its weights, then biases.

        In a backward a weight's gradient may be left for `late`.
        """
        half = len(parts) // 2
        trained = ctx.needs_input_grad[4]
        ctx.late = late
        ctx.save_for_backward(x if trained else None, joined)
        ctx.sizes = [len(weight) for weight in parts[:half] if weight is not None]
        ctx.biased = joined_bias is not None and ctx.needs_input_grad[4 + half]
        return product(x, joined, joined_bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and of the parts."""
        x, joined = ctx.saved_tensors
        grad_x = product(grad, joined.t()) if ctx.needs_input_grad[0] else None
        none = (None,) * len(ctx.sizes)
        left = x is None or (ctx.late is not None and ctx.late(grad, x))
        weights = none if left else torch.split(outer_product(grad, x), ctx.sizes)
        biases = torch.split(grad.sum(0), ctx.sizes) if ctx.biased else none
        return grad_x, None, None, None, *weights, *biases


def products(
    x: Tensor, joined: Tensor, joined_bias: Tensor | None, layers: tuple[nn.Linear, ...]
) -> Tensor:
    """The outputs of several linear layers on `x [rows, in]` side by side, `[rows, out]`."""
    if not torch.is_grad_enabled():
        return product(x, joined, joined_bias)
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers]
    late = getattr(layers[0], "late", None) if len(layers) == 1 else None
    output: Tensor = Products.apply(  # type: ignore[no-untyped-call]
        x, joined, joined_bias, late, *weights, *biases
    )
    return output


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """A linear layer's output for `x [..., in]`; it may have a `late`."""
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
        return silu_product(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up."""
        made = torch.empty_like(grad), torch.empty_like(grad)
        gated_gradients(grad, ctx.saved_tensors, made)
        return made


class GatedHalves(torch.autograd.Function):
    """The same of gate and up side by side, whose gradients lie side by side too."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        """`both [rows, 2 * size]`."""
        ctx.save_for_backward(both)
        return silu_product(*both.chunk(2, -1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The gradient of both."""
        (both,) = ctx.saved_tensors
        made = torch.empty_like(both)
        gated_gradients(grad, both.chunk(2, -1), made.chunk(2, -1))
        return made


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, without gradient."""
    return nn.functional.silu(gate).mul_(up)


def gated_gradients(grad: Tensor, parts: Sequence[Tensor], made: Sequence[Tensor]) -> None:
    """Fill `made` with the gradients of `parts`, gate and up."""
    gate, up = parts
    torch.mul(grad, up, out=made[0])
    torch.ops.aten.silu_backward.grad_input(made[0], gate, grad_input=made[0])
    torch.mul(nn.functional.silu(gate), grad, out=made[1])


def gated_unit(gate: Tensor, up: Tensor) -> Tensor:
    """`GatedUnit` with gradient where that is enabled."""
    if not torch.is_grad_enabled():
        return silu_product(gate, up)
    output: Tensor = GatedUnit.apply(gate, up)  # type: ignore[no-untyped-call]
    return output


def gated_halves(both: Tensor) -> Tensor:
    """`GatedHalves` with gradient where that is enabled."""
    if not torch.is_grad_enabled():
        return silu_product(*both.chunk(2, -1))
    output: Tensor = GatedHalves.apply(both)  # type: ignore[no-untyped-call]
    return output


class Rotation(torch.autograd.Function):
    """Rotary positions (Su et al., "RoFormer", 2021), halves of a head rotated together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x [tokens, heads, size]`; `cos`, `sin` `[tokens, 1, size]`, equal in both halves."""
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The gradient turns back."""
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Turn by the angle, or back."""
    half = x.shape[-1] // 2
    output = x * cos
    output[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    output[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return output


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`Rotation` with gradient where that is enabled."""
    if not torch.is_grad_enabled():
        return _rotated(x, cos, sin, 1)
    output: Tensor = Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return output
