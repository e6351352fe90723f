"""What a user says about a coefficient that follows what is measured.

The formulas are in `rlflow.ops.math.controllers`; this file holds no torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, Unpack

from pydantic import Field, model_validator

from rlflow.ops.losses.spec_options import AdaptiveEntropyOptions, AdaptiveKLOptions
from rlflow.ops.spec import Spec

Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AtLeast = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class AdaptiveKL(Spec):
    """A KL coefficient that rises while the divergence is above `target`, and falls below it.

    The controller of Ziegler et al. 2019 (arXiv:1909.08593, section 2.2). Its coefficient is
    part of a checkpoint.
    """

    target: Above
    """The divergence to hold, in nats."""
    horizon: Above = 10_000.0
    """Responses over which a deviation of 20% or more changes the coefficient by 20%."""
    init: Above = 0.001
    """The first coefficient."""
    per: Literal["token", "sequence"] = "token"
    """Of what the divergence is the mean: of tokens, or of the sums of whole responses."""

    def __init__(self, target: float, **options: Unpack[AdaptiveKLOptions]) -> None:
        given: dict[str, Any] = {"target": target, **options}
        super().__init__(**given)


class AdaptiveEntropy(Spec):
    """An entropy coefficient that rises by `step` below the `target` entropy and falls above it.

    It stays within `low` and `high`, and acts only while the entropy is at most the target
    (Skywork-OR1, He et al. 2025, arXiv:2505.22312). The coefficient and the last entropy are part
    of a checkpoint.
    """

    target: Above
    """The mean entropy of a token to hold, in nats."""
    step: Above = 0.005
    """What one optimizer step adds to the coefficient, or takes from it."""
    init: AtLeast = 0.0
    """The first coefficient."""
    low: AtLeast = 0.0
    high: Above = 1.0

    def __init__(self, target: float, **options: Unpack[AdaptiveEntropyOptions]) -> None:
        given: dict[str, Any] = {"target": target, **options}
        super().__init__(**given)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        """Refuse a range that is empty or does not hold the first coefficient."""
        if not self.low <= self.init <= self.high or self.low == self.high:
            raise ValueError(
                f"the coefficient starts at init={self.init} and stays from low={self.low} to"
                f" high={self.high}: init has to lie in that range, and the range needs a width"
            )
        return self
