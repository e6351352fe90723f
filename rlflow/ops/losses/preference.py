"""What a user says about losses of pairs, of reward models, and of a student of a teacher.

As in `rlflow.ops.losses.losses`: frozen, validated, an option that would do nothing is an error.
The formulas are in `rlflow.ops.math`; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, Unpack

from pydantic import AfterValidator, Field, model_validator

from rlflow.errors import known_names, near_names
from rlflow.ops.losses.base import Loss, Positive
from rlflow.ops.losses.losses import Coefficient
from rlflow.ops.losses.options import DPOLossOptions, RewardModelLossOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceKind:
    """A loss of pairs: the options it reads, and whether it reads the reference."""

    options: frozenset[str] = frozenset()
    reference: bool = True


def _kind(*options: str, reference: bool = True) -> PreferenceKind:
    return PreferenceKind(options=frozenset(options), reference=reference)


PREFERENCE_LOSSES: Mapping[str, PreferenceKind] = {
    "sigmoid": _kind("label_smoothing", "length", "divergence", "margin"),
    "simpo": _kind("label_smoothing", "margin", reference=False),
    "hinge": _kind("length", "divergence"),
    "ipo": _kind("length", "divergence"),
    "robust": _kind("label_smoothing", "length", "divergence"),
    "exo_pair": _kind("label_smoothing", "length", "divergence"),
    "discopop": _kind("length", "divergence", "tau"),
    "nca_pair": _kind(),
    "bco_pair": _kind(),
    "sppo_hard": _kind(),
    "apo_zero": _kind(),
    "apo_down": _kind(),
    "aot": _kind("label_smoothing"),
    "aot_unpaired": _kind("label_smoothing"),
}
"""Every loss of pairs by name, see `rlflow.ops.math.losses.preference.preference_loss`."""

KIND_OPTIONS = ("label_smoothing", "length", "divergence", "margin", "tau")
PAIRED = ("group", "pair", "chosen")
NOT_AVERAGED = "its mean is over pairs or rows, not over tokens"


def _known_kind(kind: str) -> str:
    """Refuse a kind that does not exist, naming those that are like it."""
    if kind in PREFERENCE_LOSSES:
        return kind
    near = " or ".join(repr(name) for name in near_names(kind, PREFERENCE_LOSSES))
    hint = f"; did you mean {near}?" if near else ""
    names = known_names(sorted(PREFERENCE_LOSSES))
    raise ValueError(f"no preference loss is called {kind!r} (there is {names}){hint}")


class BatchwiseLoss(Loss):
    """A loss that joins rows: its gradient is prepared over the whole mini-batch.

    Whatever the rows of a micro-batch are, it is the loss of the mini-batch over all ranks.
    """

    body: ClassVar[str] = "rlflow.ops.math.losses.batchwise:batchwise_objective"
    prepare: ClassVar[str]
    """Dotted name of what is done with a mini-batch before it is cut."""
    metrics: ClassVar[tuple[str, ...]]
    """Names of the numbers that every row has a share in."""

    @property
    def forwards(self) -> int:
        """One: what the rows of a mini-batch have in common is computed before it is cut."""
        return 1

    @property
    def measured(self) -> tuple[str, ...]:
        """What that forward computes."""
        return self.outputs()

    def corrects(self, old: str, *, own: bool) -> bool:
        """Always: pairs and scored rows are data, weighed by no probability of the sampler."""
        return True

    def idle(self) -> dict[str, str]:
        """As in `Loss`; how tokens are averaged is no option."""
        return {**super().idle(), "aggregate": NOT_AVERAGED, "constant": NOT_AVERAGED}


class DPOLoss(BatchwiseLoss):
    """A loss of pairs: the policy learns to prefer the chosen response to the other one.

    Pairs come from `ops.pair`; the loss is the mean of their losses. `DPOLoss("sigmoid",
    beta=0.1)` is DPO; the other kinds are named in `docs/algorithms.md`. `policy_weights` weights
    pairs as `pair_weights` says. `sft_coef` adds the mean of `-log p` over the tokens of the
    chosen responses.
    """

    prepare: ClassVar[str] = "rlflow.ops.bodies.steps.batchwise:prepare_pairs"
    metrics: ClassVar[tuple[str, ...]] = (
        "preference_loss",
        "sft_loss",
        "pairs",
        "accuracy",
        "reward_margin",
        "reward_chosen",
        "reward_rejected",
    )

    kind: Annotated[str, AfterValidator(_known_kind)] = "sigmoid"
    beta: Positive = 0.1
    """How much a difference of log-ratios counts; the inverse strength of the pull to the ref."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a pair is the wrong way round; `exo_pair` needs one above 0."""
    length: Literal["sum", "mean"] = "sum"
    """Whether a response counts by the sum of its tokens' scores or by their mean."""
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """The divergence from the reference whose optimal policy the loss looks for."""
    alpha: Annotated[float, Field(allow_inf_nan=False)] = 0.5
    """Of `divergence="alpha"`."""
    margin: Coefficient = 0.0
    """How far the chosen response has to be ahead."""
    tau: Positive = 0.05
    """Temperature of the mix of `discopop`."""
    sft_coef: Coefficient = 0.0
    """Weight of the negative log-likelihood of the chosen responses."""
    ld_alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    """Weight of the tokens beyond the length of the pair's shorter response."""
    policy_weights: bool = False
    """Whether a pair counts by how likely the current policy is to write both sides (WPO)."""

    def __init__(self, kind: str = "sigmoid", **options: Unpack[DPOLossOptions]) -> None:
        given: dict[str, Any] = {"kind": kind, **options}
        super().__init__(**given)

    @property
    def reference(self) -> bool:
        """Whether it reads the log-probs of a reference."""
        return PREFERENCE_LOSSES[self.kind].reference

    def needs(self) -> tuple[str, ...]:
        """Mask, pairs, and the reference's log-probs where it has one."""
        ref = ("ref_log_probs",) if self.reference else ()
        return ("response_mask", *PAIRED, *ref)

    def outputs(self) -> tuple[str, ...]:
        """The log-probs of the sampled tokens."""
        return ("log_probs",)

    @property
    def measured(self) -> tuple[str, ...]:
        """As in `BatchwiseLoss`; and what weights of pairs follow from."""
        return (*self.outputs(), *(("sum_pi_squared",) if self.policy_weights else ()))

    def options(self) -> dict[str, Any]:
        """What `preference_loss` takes."""
        names = ("kind", "beta", "label_smoothing", "length", "divergence", "alpha", "tau")
        return {name: getattr(self, name) for name in (*names, "margin")}

    def idle(self) -> dict[str, str]:
        """As in `Loss`; and options of other kinds."""
        read = PREFERENCE_LOSSES[self.kind].options
        reasons = {n: f"{self.kind} does not read it" for n in KIND_OPTIONS if n not in read}
        if self.kind in ("aot", "aot_unpaired"):
            reasons["policy_weights"] = f"a loss of {self.kind} is of ranks, not of a pair"
        if self.divergence != "alpha" or "divergence" not in read:
            reasons["alpha"] = "only divergence='alpha' reads it"
        return {**super().idle(), **reasons}

    @model_validator(mode="after")
    def _smoothed(self) -> Self:
        """EXO compares with a label that has to be uncertain."""
        if self.kind == "exo_pair" and not self.label_smoothing:
            raise ValueError(
                "exo_pair is a divergence from the label's probabilities, so it needs"
                " label_smoothing above 0, such as label_smoothing=1e-3: log 0 otherwise"
            )
        return self


class RewardModelLoss(BatchwiseLoss):
    """The loss of a reward model: a model with `head="value"`, read after a response's last token.

    `pairwise` is Bradley-Terry over the pairs of `ops.pair`. `regression` and `logistic` fit the
    field `reward` row by row.
    """

    prepare: ClassVar[str] = "rlflow.ops.bodies.steps.batchwise:prepare_scores"

    kind: Literal["pairwise", "regression", "logistic"] = "pairwise"
    margin_coef: Coefficient = 0.0
    """How much of the pair's difference in reward the scores have to differ by at least."""
    center_coef: Coefficient = 0.0
    """Weight of the squared sum of a pair's scores, which keeps their mean at 0."""

    def __init__(self, kind: str = "pairwise", **options: Unpack[RewardModelLossOptions]) -> None:
        given: dict[str, Any] = {"kind": kind, **options}
        super().__init__(**given)

    @property
    def metrics(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the numbers that every row has a share in."""
        if self.kind == "pairwise":
            return ("reward_loss", "pairs", "accuracy", "score_margin")
        return ("reward_loss", "score_mean", "target_mean")

    def needs(self) -> tuple[str, ...]:
        """Pairs, with their margin where it counts, or rewards."""
        if self.kind != "pairwise":
            return ("reward",)
        return (*PAIRED, *(("pair_margin",) if self.margin_coef else ()))

    def outputs(self) -> tuple[str, ...]:
        """The values of the tokens, of which the last counts."""
        return ("values",)

    def idle(self) -> dict[str, str]:
        """As in `Loss`; and options of pairs where there are none."""
        paired = ("margin_coef", "center_coef") if self.kind != "pairwise" else ()
        return {**super().idle(), **dict.fromkeys(paired, f"{self.kind} compares no pairs")}
