"""What a user says about samples of another policy: how a loss weighs them, which it drops.

The formulas are in `rlflow.ops.math.importance` and `rlflow.ops.math.losses.rejection`; this file
holds no torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, Unpack

from pydantic import Field, model_validator

from rlflow.ops.losses.spec_options import RejectionOptions
from rlflow.ops.spec import Spec

Level = Literal["token", "sequence"]
Mode = Literal["truncate", "mask"]
Statistic = Literal["k1", "k2", "k3"]
Over = Literal["token", "row-sum", "row-mean", "row-max"]
Count = Literal["all", "kept"]


class ImportanceSampling(Spec):
    """Multiplies what a token adds to the loss by `pi_prox / pi_behave`, without a gradient.

    `pi_behave` is the policy that sampled the token. `pi_prox` is the policy that the clipped
    ratio is taken against. `level="sequence"` takes the product over a response for each of its
    tokens. `mode="truncate"` clips the weight to at most `cap` and at least `floor`;
    `mode="mask"` sets weights above `cap` or below `floor` to 0. `normalize` then divides by the
    mean weight of the optimizer step.
    """

    level: Level = "token"
    mode: Mode = "truncate"
    cap: Annotated[float, Field(ge=1)] = 2.0
    """Largest weight; at least 1, the weight of a sample of the same policy."""
    floor: Annotated[float, Field(gt=0, le=1)] | None = None
    """Smallest weight that `truncate` gives and `mask` keeps; None for no bound."""
    normalize: bool = False
    """Whether weights are divided by their mean, after truncation."""

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        """Refuse a mask that drops nothing."""
        if self.mode == "mask" and self.cap == float("inf") and self.floor is None:
            raise ValueError("mode='mask' would drop nothing: give it a finite cap, or a floor")
        return self


class Rejection(Spec):
    """Leaves out tokens, or whole responses, on which the two policies differ too much.

    With `x = log pi_prox - log pi_behave`, `k1` is x, `k2` is x^2 / 2 and `k3` is e^x - 1 - x: of
    the token, or as sum, mean or maximum over its response. With `k1` tokens are kept where
    `low <= exp(k1) <= high`, a ratio of probabilities; with `k2` and `k3` where the estimate is at
    most `high`, in nats.
    """

    statistic: Statistic
    over: Over = "token"
    high: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """The largest ratio (above 1) or divergence that is kept."""
    low: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The smallest ratio that is kept; 1 / high unless given."""
    count: Count = "all"
    """Whether the policy term is averaged over all tokens, or over those that are kept."""

    def __init__(self, statistic: str, **options: Unpack[RejectionOptions]) -> None:
        given: dict[str, Any] = {"statistic": statistic, **options}
        super().__init__(**given)

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        """Refuse bounds that the statistic cannot have."""
        if self.statistic != "k1":
            if self.low is not None:
                raise ValueError(
                    f"low would do nothing here: {self.statistic} is never negative and small is"
                    " good; leave it out"
                )
            return self
        if self.over == "row-max":
            raise ValueError(
                "the largest k1 of a response would say nothing of ratios that are too small;"
                " use k2 or k3 with over='row-max'"
            )
        if self.high <= 1:
            raise ValueError(
                f"high={self.high} bounds the ratio of k1, which is 1 for samples of the same"
                " policy: it has to be above 1"
            )
        return self


Rejections = Rejection | tuple[Rejection, ...] | None


def rules(rejection: Rejections) -> tuple[Rejection, ...]:
    """The rules of a loss, none or several."""
    if rejection is None:
        return ()
    return rejection if isinstance(rejection, tuple) else (rejection,)


def require_fitting(
    old: str, correction: ImportanceSampling | None, rejection: Rejections, unbiased: str | None
) -> None:
    """Raise ValueError where one of these options asks for what another does not give.

    `unbiased` is the KL estimator that is multiplied by the ratio of policies, None for none.
    """
    if rejection == ():
        raise ValueError("rejection=() would do nothing; leave rejection out")
    counts = {rule.count for rule in rules(rejection)}
    if len(counts) > 1:
        raise ValueError("several rejections have one average: give all of them the same count")
    if unbiased is not None and unbiased.endswith("+"):
        raise ValueError(
            f"kl_unbiased and kl={unbiased!r} are two ways to the gradient of the reverse KL;"
            f" use kl={unbiased.removesuffix('+')!r} with kl_unbiased, or leave that out"
        )
    whole = {
        "rejection with count='kept'": "kept" in counts,
        "correction with normalize": correction is not None and correction.normalize,
    }
    for what, asked in whole.items():
        if asked and old != "recomputed":
            raise ValueError(
                f"a {what} needs old='recomputed': its divisor is of the whole optimizer step,"
                f" so it has to be known before the first backward; with old={old!r} it would"
                " follow from log-probs that are not there yet"
            )
