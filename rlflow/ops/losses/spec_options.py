"""Options of controllers and rejections as type checkers see them.

Bounds are checked at run time.
The file is written by tests/ops/test_option_types.py.
"""

from __future__ import annotations

from typing import Literal, Required, TypedDict


class AdaptiveKLOptions(TypedDict, total=False):
    """What `AdaptiveKL` takes by name."""

    horizon: float
    init: float
    per: Literal["token", "sequence"]


class AdaptiveEntropyOptions(TypedDict, total=False):
    """What `AdaptiveEntropy` takes by name."""

    step: float
    init: float
    low: float
    high: float


class RejectionOptions(TypedDict, total=False):
    """What `Rejection` takes by name."""

    over: Literal["token", "row-sum", "row-mean", "row-max"]
    high: Required[float]
    low: float | None
    count: Literal["all", "kept"]
