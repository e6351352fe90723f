"""Float32 matrix products of a training step by MKL and by oneDNN on this processor.

    python benchmarks/products.py

Says which library `rlflow.engines.hf.forward.kernels` should choose for a kind of processor: both
multiply the same matrices in turn, one thread each. Writes benchmarks/results/products_CPU.json and
.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import (
    RESULTS,
    machine,
    machine_kind,
    markdown_report,
    markdown_table,
    text_table,
    write_results,
)
from torch import Tensor

HEADER = ("rows x in x out", "of", "MKL GFLOP/s", "oneDNN GFLOP/s", "MKL / oneDNN, time")
WIDTHS = ((128, 384), (128, 512), (512, 128), (256, 1024), (1024, 256), (896, 4864))
ROWS = (16, 128, 1504)
TURNS = 30
NOTES = (
    "float32, one thread, median of 30 turns in which the two libraries alternate.",
    "output: x @ weight.T. input: grad @ weight. weight: grad.T @ x, the smaller operand first "
    "where oneDNN copies it.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product by both libraries."""

    name: str
    flops: float
    mkl: Callable[[], Tensor]
    onednn: Callable[[], Tensor]


def products(rows: int, wide: int, out: int) -> list[Product]:
    """The forward of a linear layer and its two gradients."""
    multiply = torch.ops.mkldnn._linear_pointwise
    x, weight, grad = torch.randn(rows, wide), torch.randn(out, wide), torch.randn(rows, out)

    def onednn(left: Tensor, right: Tensor) -> Tensor:
        found: Tensor = multiply(left, right, None, "none", [], "")
        return found

    def of_weight() -> Tensor:
        if out <= wide:
            return onednn(grad.t(), x.t())
        return onednn(x.t(), grad.t()).t()

    flops = 2.0 * rows * wide * out
    return [
        Product(
            name="output",
            flops=flops,
            mkl=lambda: torch.mm(x, weight.t()),
            onednn=lambda: onednn(x, weight),
        ),
        Product(
            name="input",
            flops=flops,
            mkl=lambda: torch.mm(grad, weight),
            onednn=lambda: onednn(grad, weight.t()),
        ),
        Product(name="weight", flops=flops, mkl=lambda: torch.mm(grad.t(), x), onednn=of_weight),
    ]


def seconds(action: Callable[[], Tensor]) -> float:
    """How long a call takes, on the wall clock."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    """Measure, print the table, write the results."""
    torch.set_num_threads(1)
    facts = machine()
    rows, data = [], []
    for count in ROWS:
        for wide, out in WIDTHS:
            for product in products(count, wide, out):
                turns = [(seconds(product.mkl), seconds(product.onednn)) for _ in range(TURNS)]
                mkl, onednn = (statistics.median(side) for side in zip(*turns, strict=True))
                shape = f"{count} x {wide} x {out}"
                rates = (f"{product.flops / each / 1e9:.0f}" for each in (mkl, onednn))
                rows.append((shape, product.name, *rates, f"{mkl / onednn:.2f}"))
                data.append({"shape": shape, "of": product.name, "mkl": mkl, "onednn": onednn})
    middle = statistics.median(case["mkl"] / case["onednn"] for case in data)
    told = f"Over all shapes MKL takes {middle:.2f} of oneDNN's time (median)."
    page = markdown_report(
        "Matrix products of two libraries", facts, [told, markdown_table(HEADER, rows)], NOTES
    )
    name = f"products_{machine_kind()}"
    write_results(RESULTS, name, {"machine": facts, "cases": data, "ratio": middle}, page)
    print(text_table(HEADER, rows))
    print(told)


if __name__ == "__main__":
    main()
