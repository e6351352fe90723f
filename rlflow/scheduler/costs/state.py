"""What one trained number takes on a device, allocation by allocation, as the engines make them.

The table is that of Rajbhandari et al., "ZeRO" (arXiv:1910.02054), section 3.1, for AdamW with
gradients that are summed in float32; Muon keeps one moment less of matrices. The engines' own
`num_bytes()` are held to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rlflow.modelfiles.coded import BLOCK, CODING_BYTES, block_of
from rlflow.modelfiles.orthogonal import orthogonal_bytes
from rlflow.modelfiles.visits import PIECE_NUMBERS, SLOTS, visiting_bytes
from rlflow.scheduler.models.shapes import Shape
from rlflow.scheduler.plan.instance import Instance

Allocation = Literal["weights", "master", "moments", "gradients", "gradient sums"]

ADAM_MOMENTS = 2
FULL_BYTES = 4
LOW_BYTES = 2


def kept_full(instance: Instance, size: int) -> bool:
    """Whether what is trained of an instance is kept in float32, where it is computed with in less.

    FSDP casts what it gathers, so the weights that ranks share are the master weights.
    """
    return instance.trained and instance.sharded and size < FULL_BYTES


def state_bytes(
    instance: Instance, size: int, moment: int | None = None
) -> Mapping[Allocation, int]:
    """Bytes of each allocation for one trained number of a model of `size` bytes a number.

    In one process weights below float32 have master weights beside, and gradients of their dtype
    are added to sums in float32. In ranks that share a model what is kept is float32 as a whole. A
    `moment` is as wide as what is updated, if nothing is said.
    """
    wide = max(size, FULL_BYTES)
    if size >= FULL_BYTES or kept_full(instance, size):
        return {"weights": wide, "moments": ADAM_MOMENTS * (moment or wide), "gradients": wide}
    return {
        "weights": size,
        "master": FULL_BYTES,
        "moments": ADAM_MOMENTS * (moment or FULL_BYTES),
        "gradients": size,
        "gradient sums": FULL_BYTES,
    }


def saved_bytes(size: int, moment: int | None = None) -> int:
    """Bytes of a checkpoint for one trained number of a model of `size` bytes a number.

    AdamW's moments, of so many bytes a `moment` if it is said, and the weight as it is trained: of
    lower ones the float32 copy alone.
    """
    wide = max(size, FULL_BYTES)
    return wide + ADAM_MOMENTS * (moment or wide)


def muon_step_bytes(
    instance: Instance, shape: Shape, size: int, *, matrices: int, others: int, on_cpu: bool
) -> int:
    """Bytes that a step of Muon makes on each device, of a model of `size` bytes a number.

    A rank has so many numbers in `matrices` and in `others`. A matrix is made orthogonal in
    bfloat16, on a CPU in what it is trained in. Where states stay on the host they come by whole
    matrices, of ranks that share those by pieces, and before any is made orthogonal.
    """
    wide = max(size, FULL_BYTES)
    each = state_bytes(instance, size)
    shared = instance.ranks > 1
    shapes = [(rows, columns) for rows, columns, _ in shape.matrices]
    made = orthogonal_bytes(shapes, wide if on_cpu else LOW_BYTES, gathered=shared)
    if instance.offload != "optimizer":
        return made
    kept = wide + each.get("master", 0)
    beside = visiting_bytes(others, ADAM_MOMENTS * wide + each.get("master", 0))
    if instance.sharded:
        return max(made, beside, visiting_bytes(matrices, wide))
    largest = max((rows * columns for rows, columns in shapes), default=0)
    slots = min(SLOTS, sum(count for *_, count in shape.matrices))
    return max(beside, made + slots * largest * kept)


def coded_numbers(shape: Shape, tp: int, *, tower: bool = False) -> tuple[int, int]:
    """Numbers of a model whose moments are in 8 bits, and scales of one moment of them.

    Of its `tower` alone, which no rank cuts, or of the rest. Matrices back to the hidden width are
    those whose rows `tp` cuts. Of experts the matrices are not known: all that is no norm counts,
    in whole blocks.
    """
    width = shape.hidden
    seen = {(rows, columns): count for rows, columns, count in shape.seen_matrices}
    words = (shape.vocab, width, shape.embedding // max(shape.vocab * width, 1))
    if not shape.matrices:
        beyond = 0 if tower else max(shape.parameters - shape.norms, 0)
        return beyond, -(-beyond // BLOCK)
    numbers, scales = 0, 0
    for known in shape.seen_matrices if tower else (*shape.matrices, words):
        rows, columns, count = known
        back = rows == width and known is not words and not tower
        count -= 0 if tower or known is words else seen.get((rows, columns), 0)
        if block := block_of((rows, columns), tp if back else 1):
            numbers += rows * columns * count
            scales += rows * columns // block * count
    return numbers, scales


def coded_step_bytes(instance: Instance, size: int, coded: int, others: int) -> int:
    """Bytes that a step makes on each device of a model of `size` bytes a number.

    So many numbers have moments in 8 bits, of which a piece is wide at a time.
    """
    wide = max(size, FULL_BYTES)
    master = state_bytes(instance, size).get("master", 0)
    made = min(coded, PIECE_NUMBERS) * CODING_BYTES
    if instance.offload != "optimizer":
        return made
    slots = visiting_bytes(coded, ADAM_MOMENTS + master)
    return max(made + slots, visiting_bytes(others, ADAM_MOMENTS * wide + master))
