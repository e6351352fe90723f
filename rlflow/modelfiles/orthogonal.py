"""Which weights Muon makes orthogonal updates of, and what one of them takes.

The engines and the plan go by the same rule. A Newton-Schulz step of a matrix of r rows and c
columns, the fewer being rows, has the products X X^T, its square, and that with X.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from rlflow.errors import Finding
from rlflow.modelfiles.headers import tensor_shapes
from rlflow.modelfiles.pictures.towers import PARTS, model_part

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic a x + b x^3 + c x^5 (Jordan et al. 2024): steepest at 0, about 1 at the end."""
STEPS = 5


def is_layer_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter of that name is a matrix within a numbered layer.

    Embeddings, heads and last norms have no number in their names, norms and biases one dimension.
    """
    return len(shape) == 2 and any(part.isdecimal() for part in name.split("."))


def stored_matrices(
    directory: Path, frozen: Collection[str] = (), parts: Collection[str] = PARTS
) -> tuple[tuple[int, int, int], ...]:
    """Rows, columns and count of the matrices of layers in a directory's safetensors files.

    Those of some `parts` of a model, `frozen` ones left out.
    """
    shapes, wanted = tensor_shapes(directory).items(), set(parts).difference(frozen)
    kept = ((name, s) for name, s in shapes if model_part(name) in wanted)
    found = Counter((s[0], s[1]) for name, s in kept if is_layer_matrix(name, s))
    return tuple((rows, columns, count) for (rows, columns), count in found.items())


def orthogonal_flops(rows: int, columns: int) -> int:
    """Floating-point operations of all steps for one matrix."""
    fewer, more = sorted((rows, columns))
    return STEPS * (4 * fewer**2 * more + 2 * fewer**3)


def orthogonal_bytes(matrices: Iterable[tuple[int, int]], size: int, *, gathered: bool) -> int:
    """Bytes at the most while one of some matrices is made orthogonal, `size` a number.

    It before and after a step, and the square of its fewer dimension; if ranks have gathered it,
    what has come from them too.
    """
    return size * max(
        ((3 if gathered else 2) * r * c + min(r, c) ** 2 for r, c in matrices), default=0
    )


def stacked_finding(path: str) -> Finding:
    """E527: weights of a model that are no matrices, which Muon makes updates of."""
    return Finding(
        code="E527",
        what=f"Muon cannot train the experts of model {path!r}",
        got="weights of three dimensions, a stack of many experts' matrices",
        expected="matrices in layers, each made orthogonal by itself",
        fix="optimizer=rf.AdamW(lr=...)",
    )
