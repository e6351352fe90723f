"""What a user says about a loss: its kind, its coefficients, how it is averaged.

`PolicyLoss`, `ValueLoss` and `SFTLoss` are frozen and validated; an option that would do
nothing is an error, not a surprise. They name the fields a training batch must hold and the
body that computes them. This file knows the names of those bodies and imports none of them
(no torch).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, Unpack

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rlflow.ops.controllers import AdaptiveEntropy, AdaptiveKL
from rlflow.ops.corrections import ImportanceSampling, Level, Rejection, require_fitting, rules
from rlflow.ops.losses.base import CORRECTIONS, Aggregation, Loss, Positive, pasted
from rlflow.ops.losses.kinds import (
    KIND_OPTIONS,
    POLICY_LOSSES,
    TOP_ENTROPY,
    LossKind,
    Selection,
    known_kind,
)
from rlflow.ops.losses.options import PolicyLossOptions

__all__ = [
    "KIND_OPTIONS",
    "POLICY_LOSSES",
    "Aggregation",
    "Loss",
    "LossKind",
    "PolicyLoss",
    "SFTLoss",
    "Selection",
    "ValueLoss",
]

KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]
TOP_K = ("top_log_probs", "top_ids", "top_rest")
"""What `ops.log_probs(model, samples, top_k=k)` makes of the likeliest tokens."""
AT_TOP_K = ("log_probs_at", "rest_at")
"""What a training forward makes of the same tokens."""
OldPolicy = Literal["auto", "current", "rollout", "recomputed", "loglinear"]
Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _pair(given: Any) -> Any:
    """One number for both sides of an option becomes a pair."""
    return (given, given) if isinstance(given, int | float) else given


def _clip_range(clip: tuple[float, float]) -> tuple[float, float]:
    """Refuse a side that is not a positive number; infinity switches a side off."""
    for side, width in zip(("low", "high"), clip, strict=True):
        if math.isnan(width) or width <= 0:
            raise ValueError(
                f"the {side} side of clip is {width}, and must be above 0: 0 would freeze the"
                " policy; to switch clipping off on a side, give it math.inf"
            )
    return clip


def _rising(bounds: tuple[float, float]) -> tuple[float, float]:
    """Refuse a range that holds nothing."""
    if not bounds[0] < bounds[1]:
        raise ValueError(f"no covariance lies between {bounds[0]} and {bounds[1]}")
    return bounds


ClipRange = Annotated[tuple[float, float], BeforeValidator(_pair), AfterValidator(_clip_range)]
CovRange = Annotated[tuple[float, float], AfterValidator(_rising)]
Pair = Annotated[tuple[Positive, Positive], BeforeValidator(_pair)]
Share = Annotated[float, Field(gt=0, lt=1)]


class PolicyLoss(Loss):
    """The loss of a policy: `policy + kl_coef * KL - entropy_coef * entropy`.

    All three terms are averaged the same way (`aggregate`), with the counts of the whole
    optimizer step. `PolicyLoss("ppo_clip", clip=(0.2, 0.28), kl_coef=0.02)`.
    """

    body: ClassVar[str] = "rlflow.ops.math.losses.objective:policy_objective"
    terms: ClassVar[tuple[str, ...]] = ("loss", "policy_loss")

    kind: Annotated[str, AfterValidator(known_kind)]
    clip: ClipRange = (0.2, 0.2)
    """How far the ratio may fall below and rise above 1; one number means both sides.

    (3e-4, 4e-4) for gspo, (2e-3, 2.5e-3) for luspo; for gmpo in logs, (0.4, 0.4).
    """
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Bound on the ratio where the advantage is negative; off unless given."""
    ratio_max: Annotated[float, Field(ge=1)] = 5.0
    """Largest weight of a token, absolute, with cispo; with dppo_tv and dppo_kl 20 unless given."""
    ratio_min: Annotated[float, Field(gt=0, le=1)] | None = None
    """Smallest weight of a token with cispo, absolute; None for no bound."""
    tau: Pair = (1.0, 1.05)
    """How steep the gate of sapo is for positive advantages, and for the others."""
    level: Level = "token"
    """Whether cispo and sapo take the ratio of a token, or the geometric mean over its response."""
    divergence: ClipRange = (0.15, 0.15)
    """How far dppo lets the divergence of a token go down and up; 0.05 for dppo_kl."""
    beta: Positive | None = None
    """What dro multiplies the squared log-ratio by, halved."""
    gamma_positive: Pair = (2.0, 3.0)
    """Power and rate of vespo's weight of a response where the advantage is 0 or more."""
    gamma_negative: Pair = (3.0, 2.0)
    """The same where the advantage is negative."""
    cov_share: Share = 2e-4
    """Share of all tokens that clip_cov, or kl_cov, chooses by their covariance."""
    cov_range: CovRange = (1.0, 5.0)
    """Between which covariances clip_cov chooses."""
    cov_coef: Positive = 1.0
    """What kl_cov multiplies the penalty of chosen tokens by."""
    top_entropy: Share | None = None
    """Share of all tokens, those of highest entropy, whose policy term counts; None for all."""
    off_policy_limit: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """How much less likely a response with a negative advantage may have become, in nats a token.

    Beyond, its policy term is left out; None for no limit.
    """
    off_policy_from: Literal["rollout", "old"] = "rollout"
    """Whose log-probs that is measured from: the rollout's, or those of `old`."""
    kl_coef: Coefficient | AdaptiveKL = 0.0
    kl: KLEstimator | Literal["full"] = "k3"
    """An estimate of the KL from the sampled token, or `full`: the KL over the whole vocabulary.

    `full` reads `ops.log_probs(ref, samples, top_k=...)` with the vocabulary's size.
    """
    kl_unbiased: bool = False
    """Whether the KL estimate of a token is times `pi / pi_old`, which carries a gradient."""
    entropy_coef: Coefficient | AdaptiveEntropy = 0.0
    old: OldPolicy = "auto"
    """Whose log-probs the ratio is taken against: `auto` lets the compiler choose."""
    correction: ImportanceSampling | None = None
    """Weighs tokens by how likely they are under `old` against the policy that sampled."""
    rejection: Rejection | tuple[Rejection, ...] | None = None
    """Leaves out tokens; of several rules each has to keep a token."""
    response_metrics: bool = False
    """Whether perplexities and divergences of whole responses are logged too."""

    def __init__(self, kind: str = "ppo_clip", **options: Unpack[PolicyLossOptions]) -> None:
        given: dict[str, Any] = {"kind": kind, **options}
        super().__init__(**given)

    @model_validator(mode="before")
    @classmethod
    def _of_kind(cls, given: Any) -> Any:
        """What is not given is as the kind has it."""
        kind = POLICY_LOSSES.get(str(given.get("kind"))) if isinstance(given, Mapping) else None
        return given if kind is None else {**kind.own_defaults, **given}

    @property
    def of_kind(self) -> LossKind:
        """What the kind of this loss is made of."""
        return POLICY_LOSSES[self.kind]

    def default(self, option: str) -> Any:
        """As in `Loss`; the default of the kind where it has its own."""
        return self.of_kind.own_defaults.get(option, super().default(option))

    @property
    def reads_old(self) -> bool:
        """Whether log-probs of an old policy are part of it."""
        compared = self.correction is not None or bool(self.rejections)
        measured = self.off_policy_limit is not None and self.off_policy_from == "old"
        return self.of_kind.ratio or compared or measured or self.kl_unbiased

    def selections(self) -> tuple[Selection, ...]:
        """The choices among all tokens of an optimizer step that it asks for."""
        of_kind = self.of_kind.selection
        return (*((of_kind,) if of_kind else ()), *((TOP_ENTROPY,) if self.top_entropy else ()))

    @property
    def forwards(self) -> int:
        """As in `Loss`: one where something is chosen among all tokens."""
        return 1 if self.selections() else 0

    @property
    def adds_up(self) -> bool:
        """As in `Loss`; weights of mean 1 and averages over what is kept are of all rows too."""
        normalizes = self.correction is not None and self.correction.normalize
        kept = any(rule.count == "kept" for rule in self.rejections)
        return super().adds_up and not normalizes and not kept

    def needs(self) -> tuple[str, ...]:
        """The batch fields this loss reads; with `old="auto"` the compiler may add one."""
        old = {
            "recomputed": ("old_log_probs",),
            "rollout": ("rollout_log_probs",),
            "loglinear": ("rollout_log_probs", "version"),
        }
        masked = self.off_policy_limit is not None and self.off_policy_from == "rollout"
        compared = self.correction is not None or bool(self.rejections) or masked
        compared = compared or self.response_metrics
        behaviour = ("rollout_log_probs",) if compared else ()
        ref = TOP_K if self.full_kl else ("ref_log_probs",) if self.kl_coef else ()
        fields = ("response_mask", "advantages", *old.get(self.old, ()), *behaviour, *ref)
        return tuple(dict.fromkeys(fields))

    @property
    def full_kl(self) -> bool:
        """Whether the whole distribution of the reference is part of it."""
        return bool(self.kl_coef) and self.kl == "full"

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The rules of `rejection`, none or several."""
        return rules(self.rejection)

    def outputs(self) -> tuple[str, ...]:
        """The log-probs of the sampled tokens, and what terms with a coefficient read."""
        entropy = ("entropy",) if self.entropy_coef else ()
        return ("log_probs", *entropy, *(AT_TOP_K[:1] if self.full_kl else ()))

    def corrects(self, old: str, *, own: bool) -> bool:
        """By importance weights, or by the ratio itself against the policy that sampled."""
        by_ratio = old == "rollout" and self.of_kind.corrects
        return self.correction is not None or by_ratio

    def under_lag(self, old: str) -> str:
        """The rollout's own, where the choice is the compiler's and nothing else corrects."""
        ratio = self.old == "auto" and self.correction is None and self.of_kind.corrects
        return "rollout" if ratio else old

    def corrections(self) -> tuple[str, ...]:
        """As in `Loss`, with the options of this one; one that reads `old_log_probs` keeps it."""
        ratio = [self.line(old="rollout")] if self.of_kind.corrects else []
        weights = [self.line(old="recomputed", correction=ImportanceSampling())]
        found = weights + ratio if self.old == "recomputed" else ratio + weights
        return tuple(dict.fromkeys((*found, *CORRECTIONS)))

    def line(self, **changed: Any) -> str:
        """The line that makes it, with some options changed."""
        options = {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name != "kind" and getattr(self, name) != self.default(name)
        }
        words = [f"{name}={pasted(value)}" for name, value in (options | changed).items()]
        return f"rf.PolicyLoss({', '.join([pasted(self.kind), *words])})"

    def idle(self) -> dict[str, str]:
        """As in `Loss`; and options of other kinds, and a KL estimator without a KL term."""
        unread = [name for name in KIND_OPTIONS if name not in self.of_kind.reads]
        reasons = dict.fromkeys(unread, f"{self.kind} does not read it")
        if not self.kl_coef:
            reasons["kl"] = reasons["kl_unbiased"] = "kl_coef is 0, so there is no KL term"
        if self.kl == "full":
            reasons["kl_unbiased"] = "kl='full' is no estimate from sampled tokens"
        if self.old == "rollout" and self.of_kind.corrects:
            reasons["correction"] = "old='rollout' is the policy that sampled, so the weight is 1"
        if not self.reads_old:
            reasons["old"] = f"{self.kind} takes no ratio to an old policy"
        if self.off_policy_limit is None:
            reasons["off_policy_from"] = "there is no off_policy_limit"
        elif self.off_policy_from == "old" and self.old == "current":
            reasons["off_policy_limit"] = "nothing drifts from old='current', the policy itself"
        return {**super().idle(), **reasons}

    @model_validator(mode="after")
    def _fits_the_kind(self) -> Self:
        """Refuse a kind without what it needs, and an average that its formula does not have."""
        for name in sorted(self.of_kind.required):
            if getattr(self, name) is None:
                raise ValueError(f"{self.kind} needs {name}, which has no default: {name}=...")
        wanted = self.of_kind.aggregate
        if wanted is not None and self.aggregate != wanted:
            raise ValueError(
                f"aggregate={self.aggregate!r} is not {self.kind}, whose formula averages as"
                f" {wanted!r} does; leave aggregate out"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Refuse options of which one asks for what another does not give."""
        require_fitting(
            self.old, self.correction, self.rejection, self.kl if self.kl_unbiased else None
        )
        return self

    @model_validator(mode="after")
    def _refuse_k1(self) -> Self:
        """k1 has no gradient to follow."""
        if self.kl == "k1":
            raise ValueError(
                "k1 cannot be a loss: its gradient is 0 in expectation, so it would add noise"
                " and no pull towards the reference; use k2 or k3+ (the gradient of the"
                " reverse KL) or k3, or put k1 into the reward"
            )
        return self


class ValueLoss(Loss):
    """The loss of a critic: half the squared error to the returns, clipped or not.

    Rows of older weights need no correction: returns are targets of a regression, which weights
    no sample by its probability. The critic then values the older policy.
    """

    body: ClassVar[str] = "rlflow.ops.math.losses.objective:value_objective"
    terms: ClassVar[tuple[str, ...]] = ("loss", "value_loss")

    clip: Positive | None = 0.2
    """How far a value may move from the old one before its gradient stops; None: any."""
    huber: Positive | None = None
    """Error beyond which the loss grows as a line; None for squares throughout."""

    def corrects(self, old: str, *, own: bool) -> bool:
        """Always: a regression weighs no sample by its probability."""
        return True

    def needs(self) -> tuple[str, ...]:
        """The batch fields this loss reads; the old values only where it clips."""
        old = ("values",) if self.clip is not None else ()
        return ("response_mask", "returns", *old)

    def outputs(self) -> tuple[str, ...]:
        """The values of the critic."""
        return ("values",)


class SFTLoss(Loss):
    """Negative log-likelihood of the given responses."""

    body: ClassVar[str] = "rlflow.ops.math.losses.objective:sft_objective"
    terms: ClassVar[tuple[str, ...]] = ("loss", "sft_loss")

    def corrects(self, old: str, *, own: bool) -> bool:
        """Only of responses that another model wrote: those are data, of whatever age."""
        return not own

    def needs(self) -> tuple[str, ...]:
        """Only the mask: the tokens are the model's input."""
        return ("response_mask",)

    def outputs(self) -> tuple[str, ...]:
        """The log-probs of the given tokens."""
        return ("log_probs",)
