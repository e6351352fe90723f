"""What a user says about a loss: its kind, its coefficients, how it is averaged.

`PolicyLoss`, `ValueLoss` and `SFTLoss` are frozen and validated; an option that would do
nothing is an error, not a surprise. They name the fields a training batch must hold and the
body that computes them. This file knows the names of those bodies and imports none of them
(no torch).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from rlflow.errors import known_names, near_names
from rlflow.ops.corrections import ImportanceSampling

Aggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]
OldPolicy = Literal["auto", "current", "rollout", "recomputed"]
Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKind:
    """A kind of policy loss: the dotted name of its token loss, and the options it reads.

    The body takes `(log_probs, old_log_probs, advantages, mask)` and its options as keyword
    arguments, and returns `(token_loss, ratio)`. `corrects` says that its ratio, taken against
    the policy that sampled, makes up for samples of older weights.
    """

    body: str
    options: frozenset[str]
    corrects: bool = False


POLICY_LOSSES: dict[str, LossKind] = {
    "ppo_clip": LossKind(
        body="rlflow.ops.math.losses:ppo_clip",
        options=frozenset({"clip", "dual_clip"}),
        corrects=True,
    ),
}
"""Every kind of policy loss by name; the options of a kind are fields of `PolicyLoss`."""

KIND_OPTIONS = ("clip", "dual_clip")


def _known_kind(kind: str) -> str:
    """Refuse a kind that is not registered, naming those that are like it."""
    if kind in POLICY_LOSSES:
        return kind
    near = " or ".join(repr(name) for name in near_names(kind, POLICY_LOSSES))
    hint = f"; did you mean {near}?" if near else ""
    raise ValueError(
        f"no policy loss is called {kind!r} (there is {known_names(sorted(POLICY_LOSSES))}){hint}"
    )


def _pair(clip: Any) -> Any:
    """One number for both sides of the clip becomes a pair."""
    return (clip, clip) if isinstance(clip, int | float) else clip


def _clip_range(clip: tuple[float, float]) -> tuple[float, float]:
    """Refuse a side that is not a positive number; infinity switches a side off."""
    for side, width in zip(("low", "high"), clip, strict=True):
        if math.isnan(width) or width <= 0:
            raise ValueError(
                f"the {side} side of clip is {width}, and must be above 0: 0 would freeze the"
                " policy; to switch clipping off on a side, give it math.inf"
            )
    return clip


ClipRange = Annotated[tuple[float, float], BeforeValidator(_pair), AfterValidator(_clip_range)]


class Loss(BaseModel):
    """What every loss has: a way to average, and a printed form."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    body: ClassVar[str]
    """Dotted name of the function `(spec, outputs, batch, totals) -> (loss, metrics)`."""

    aggregate: Aggregation = "token-mean"
    constant: Positive | None = None
    """Divisor of `seq-mean-token-sum-norm`, such as the longest response allowed."""

    @abstractmethod
    def needs(self) -> tuple[str, ...]:
        """The batch fields this loss reads, in a fixed order."""

    @abstractmethod
    def outputs(self) -> tuple[str, ...]:
        """What the training forward must compute for this loss, with gradient."""

    def corrects(self, old: str, *, own: bool) -> bool:
        """Whether rows older than the weights train it right; `own` rows it has sampled itself.

        `old` is whose log-probs a policy's ratio is taken against, as the compiler chose it.
        """
        return False

    def under_lag(self, old: str) -> str:
        """Whose log-probs the ratio is taken against where rows are older than the weights."""
        return old

    def corrections(self) -> tuple[str, ...]:
        """Losses that correct for older rows, each as a line to paste, the likest first."""
        return policy_corrections()

    def idle(self) -> dict[str, str]:
        """Options that do nothing as the others stand, each with the reason."""
        if self.aggregate == "seq-mean-token-sum-norm":
            return {}
        return {"constant": "only aggregate='seq-mean-token-sum-norm' divides by it"}

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse what would do nothing, and a norm without its constant."""
        for name, reason in self.idle().items():
            if name in self.model_fields_set and getattr(self, name) is not None:
                raise ValueError(f"{name} would do nothing here: {reason}; leave {name} out")
        if self.aggregate == "seq-mean-token-sum-norm" and self.constant is None:
            raise ValueError(
                "aggregate='seq-mean-token-sum-norm' needs a constant to divide by, such as"
                " constant=max_new_tokens: the padded width would make the loss depend on"
                " the longest response of the batch"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_idle(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Saved without the options that do nothing, so that it loads again."""
        idle = self.idle()
        saved: Mapping[str, Any] = handler(self)
        return {name: value for name, value in saved.items() if name not in idle}

    def describe(self) -> str:
        """One line, stable: the kind, and the options that differ from their defaults."""
        fields = type(self).model_fields
        own_first = sorted(fields, key=lambda name: name in Loss.model_fields)
        named = [str(getattr(self, name)) for name in own_first if fields[name].is_required()]
        options = [
            f"{name}={_printed(getattr(self, name))}"
            for name in own_first
            if not fields[name].is_required() and getattr(self, name) != fields[name].default
        ]
        return f"{type(self).__name__}({', '.join([*named, *options])})"


class PolicyLoss(Loss):
    """The loss of a policy: `policy + kl_coef * KL - entropy_coef * entropy`.

    All three terms are averaged the same way (`aggregate`), with the counts of the whole
    optimizer step. `PolicyLoss("ppo_clip", clip=(0.2, 0.28), kl_coef=0.02)`.
    """

    body: ClassVar[str] = "rlflow.ops.math.objective:policy_objective"

    kind: Annotated[str, AfterValidator(_known_kind)]
    clip: ClipRange = (0.2, 0.2)
    """How far the ratio may fall below and rise above 1; one number means both sides."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Bound on the ratio where the advantage is negative; off unless given."""
    kl_coef: Coefficient = 0.0
    kl: KLEstimator = "k3"
    entropy_coef: Coefficient = 0.0
    old: OldPolicy = "auto"
    """Whose log-probs the ratio is taken against: `auto` lets the compiler choose."""
    correction: ImportanceSampling | None = None
    """Weighs tokens by how likely they are under `old` against the policy that sampled."""

    def __init__(self, kind: str = "ppo_clip", **options: Any) -> None:
        super().__init__(**{"kind": kind, **options})

    def needs(self) -> tuple[str, ...]:
        """The batch fields this loss reads; with `old="auto"` the compiler may add one."""
        old = {"recomputed": ("old_log_probs",), "rollout": ("rollout_log_probs",)}
        behaviour = ("rollout_log_probs",) if self.correction is not None else ()
        ref = ("ref_log_probs",) if self.kl_coef else ()
        return ("response_mask", "advantages", *old.get(self.old, ()), *behaviour, *ref)

    def outputs(self) -> tuple[str, ...]:
        """The log-probs of the sampled tokens, and the entropy if it has a coefficient."""
        return ("log_probs", "entropy") if self.entropy_coef else ("log_probs",)

    def corrects(self, old: str, *, own: bool) -> bool:
        """By importance weights, or by the ratio itself against the policy that sampled."""
        by_ratio = old == "rollout" and POLICY_LOSSES[self.kind].corrects
        return self.correction is not None or by_ratio

    def under_lag(self, old: str) -> str:
        """The rollout's own, where the choice is the compiler's and nothing else corrects."""
        ratio = self.old == "auto" and self.correction is None and POLICY_LOSSES[self.kind].corrects
        return "rollout" if ratio else old

    def corrections(self) -> tuple[str, ...]:
        """As in `Loss`, with the options of this one; one that reads `old_log_probs` keeps it."""
        ratio = [self.line(old="rollout")] if POLICY_LOSSES[self.kind].corrects else []
        weights = [self.line(old="recomputed", correction=ImportanceSampling())]
        found = weights + ratio if self.old == "recomputed" else ratio + weights
        return tuple(dict.fromkeys((*found, *policy_corrections())))

    def line(self, **changed: Any) -> str:
        """The line that makes it, with some options changed."""
        options = {
            name: getattr(self, name)
            for name, field in type(self).model_fields.items()
            if name != "kind" and getattr(self, name) != field.default
        }
        words = [f"{name}={_pasted(value)}" for name, value in (options | changed).items()]
        return f"rf.PolicyLoss({', '.join([_pasted(self.kind), *words])})"

    def idle(self) -> dict[str, str]:
        """As in `Loss`; and options of other kinds, and a KL estimator without a KL term."""
        unread = [name for name in KIND_OPTIONS if name not in POLICY_LOSSES[self.kind].options]
        reasons = dict.fromkeys(unread, f"{self.kind} does not read it")
        if not self.kl_coef:
            reasons["kl"] = "kl_coef is 0, so there is no KL term"
        if self.old == "rollout":
            reasons["correction"] = "old='rollout' is the policy that sampled, so the weight is 1"
        return {**super().idle(), **reasons}

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

    Rows of older weights need no correction: returns are targets of a regression, which weighs
    no sample by its probability. The values are then those of a policy that is as old.
    """

    body: ClassVar[str] = "rlflow.ops.math.objective:value_objective"

    clip: Positive | None = 0.2
    """How far a value may move from the old one before its gradient stops; None: any."""

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

    body: ClassVar[str] = "rlflow.ops.math.objective:sft_objective"

    def corrects(self, old: str, *, own: bool) -> bool:
        """Only of responses that another model wrote: those are data, of whatever age."""
        return not own

    def needs(self) -> tuple[str, ...]:
        """Only the mask: the tokens are the model's input."""
        return ("response_mask",)

    def outputs(self) -> tuple[str, ...]:
        """The log-probs of the given tokens."""
        return ("log_probs",)


def policy_corrections() -> tuple[str, ...]:
    """Every policy loss that corrects for older rows, as lines to paste."""
    weights = PolicyLoss(old="recomputed", correction=ImportanceSampling())
    kinds = [name for name, kind in POLICY_LOSSES.items() if kind.corrects]
    return (*(PolicyLoss(kind, old="rollout").line() for kind in kinds), weights.line())


def _pasted(value: object) -> str:
    """A value as it is written in a file."""
    if isinstance(value, ImportanceSampling):
        return value.line()
    return f'"{value}"' if isinstance(value, str) else repr(value).replace("inf", "math.inf")


def _printed(value: object) -> str:
    """A value as in a call, without quotes; an equal pair as its one number."""
    if isinstance(value, ImportanceSampling):
        return value.describe()
    if isinstance(value, tuple) and len(set(value)) == 1:
        return str(value[0])
    return str(value)
