"""What one trained number takes on a device, allocation by allocation, as the engines make them.

The table is that of Rajbhandari et al., "ZeRO" (arXiv:1910.02054), section 3.1, for AdamW with
gradients that are summed in float32. The engines' own `num_bytes()` are held to it. Knows
dtypes and layouts, no models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rlflow.scheduler.plan.instance import Instance

Allocation = Literal["weights", "master", "moments", "gradients", "gradient sums"]

ADAM_MOMENTS = 2
FULL_BYTES = 4


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
