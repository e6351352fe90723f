"""The kinds of policy loss by name: the body of each, its options, and what it needs.

A kind is data. This file knows the names of the bodies and imports none of them (no torch);
what the options mean is said by the fields of `rlflow.ops.losses.losses.PolicyLoss`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlflow.errors import known_names, near_names

LOSSES = "rlflow.ops.math.losses.clipped"
WEIGHED = "rlflow.ops.math.losses.weighted"
SEQUENCE = "rlflow.ops.math.losses.sequence"
COVARIANCE = "rlflow.ops.math.losses.covariance"
SELECT = "rlflow.ops.bodies.steps.selection"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A choice among all tokens of an optimizer step, made before its micro-batches.

    The body reads the `outputs` of a forward without gradient, and the `options` of the loss,
    and returns the token fields that it `makes`.
    """

    body: str
    outputs: tuple[str, ...]
    makes: tuple[str, ...]
    options: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKind:
    """A kind of policy loss: the dotted name of its token loss, and the options it reads.

    The body takes `(log_probs, old_log_probs, advantages, mask)` and its options as keyword
    arguments, and returns `(token_loss, ratio)`; `clipped` takes that ratio and the same, and
    says where a token's gradient was stopped or its weight cut. `corrects` says that its ratio,
    taken against the policy that sampled, makes up for samples of older weights.

    `defaults` are those of options that differ from the field's own; an option in `required` has
    none. `aggregate` is the one way of averaging that the formula has, None where any does.
    A kind without a `ratio` reads no old policy. `advantages="row"` takes one number a row.
    A body with a `selection` takes the field `chosen` that this makes as well.
    """

    body: str
    options: frozenset[str]
    corrects: bool = False
    clipped: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    aggregate: str | None = None
    ratio: bool = True
    advantages: Literal["any", "row"] = "any"
    selection: Selection | None = None

    @property
    def own_defaults(self) -> Mapping[str, Any]:
        """The defaults of this kind, the one way of averaging among them."""
        return {**self.defaults, **({"aggregate": self.aggregate} if self.aggregate else {})}

    @property
    def reads(self) -> frozenset[str]:
        """Every option that does something: those of the body and of the selection."""
        return self.options | (self.selection.options if self.selection else frozenset())


KIND_OPTIONS = (
    "clip",
    "dual_clip",
    "ratio_max",
    "ratio_min",
    "tau",
    "level",
    "divergence",
    "beta",
    "gamma_positive",
    "gamma_negative",
    "cov_share",
    "cov_range",
    "cov_coef",
)
"""The options that only some kinds read."""

BY_ROW_MEANS = {"aggregate": "seq-mean-token-mean"}

_GSPO = LossKind(
    body=f"{SEQUENCE}:gspo",
    clipped=f"{LOSSES}:ppo_clipped",
    options=frozenset({"clip", "dual_clip"}),
    defaults={"clip": (3e-4, 4e-4), **BY_ROW_MEANS},
    corrects=True,
)

POLICY_LOSSES: dict[str, LossKind] = {
    "ppo_clip": LossKind(
        body=f"{LOSSES}:ppo_clip",
        clipped=f"{LOSSES}:ppo_clipped",
        options=frozenset({"clip", "dual_clip"}),
        corrects=True,
    ),
    "reinforce": LossKind(
        body=f"{WEIGHED}:reinforce",
        options=frozenset(),
        defaults={"aggregate": "seq-mean-token-sum"},
        ratio=False,
    ),
    "gpg": LossKind(body=f"{WEIGHED}:reinforce", options=frozenset(), ratio=False),
    "gspo": LossKind(
        body=_GSPO.body,
        clipped=_GSPO.clipped,
        options=_GSPO.options,
        defaults=_GSPO.defaults,
        corrects=True,
        advantages="row",
    ),
    "gspo_token": _GSPO,
    "luspo": LossKind(
        body=_GSPO.body,
        clipped=_GSPO.clipped,
        options=_GSPO.options,
        defaults={"clip": (2e-3, 2.5e-3)},
        aggregate="seq-mean-token-sum",
        corrects=True,
        advantages="row",
    ),
    "sequence_clip": LossKind(
        body=f"{SEQUENCE}:sequence_clip",
        clipped=_GSPO.clipped,
        options=_GSPO.options,
        aggregate="seq-mean-token-sum",
        corrects=True,
        advantages="row",
    ),
    "gmpo": LossKind(
        body=f"{SEQUENCE}:gmpo",
        clipped=f"{SEQUENCE}:gmpo_clipped",
        options=frozenset({"clip"}),
        defaults={"clip": (0.4, 0.4)},
        aggregate="seq-mean-token-mean",
        corrects=True,
        advantages="row",
    ),
    "cispo": LossKind(
        body=f"{WEIGHED}:cispo",
        clipped=f"{WEIGHED}:cispo_clipped",
        options=frozenset({"ratio_max", "ratio_min", "level"}),
        defaults={"ratio_max": 5.0},
        corrects=True,
    ),
    "sapo": LossKind(
        body=f"{WEIGHED}:sapo",
        options=frozenset({"tau", "level"}),
        defaults=BY_ROW_MEANS,
        corrects=True,
    ),
    "vespo": LossKind(
        body=f"{SEQUENCE}:vespo",
        options=frozenset({"gamma_positive", "gamma_negative"}),
        corrects=True,
    ),
    "dppo_tv": LossKind(
        body=f"{WEIGHED}:dppo_tv",
        clipped=f"{WEIGHED}:dppo_tv_outside",
        options=frozenset({"divergence", "ratio_max"}),
        defaults={"ratio_max": 20.0},
        corrects=True,
    ),
    "dppo_kl": LossKind(
        body=f"{WEIGHED}:dppo_kl",
        clipped=f"{WEIGHED}:dppo_kl_outside",
        options=frozenset({"divergence", "ratio_max"}),
        defaults={"divergence": (0.05, 0.05), "ratio_max": 20.0},
        corrects=True,
    ),
    "dro": LossKind(
        body=f"{WEIGHED}:dro",
        options=frozenset({"beta"}),
        required=frozenset({"beta"}),
        corrects=True,
    ),
    "clip_cov": LossKind(
        body=f"{COVARIANCE}:clip_cov",
        clipped=f"{COVARIANCE}:clip_cov_inert",
        options=frozenset({"clip"}),
        corrects=True,
        selection=Selection(
            body=f"{SELECT}:clip_cov",
            outputs=("log_probs",),
            makes=("chosen", "covariance"),
            options=frozenset({"clip", "cov_share", "cov_range"}),
        ),
    ),
    "kl_cov": LossKind(
        body=f"{COVARIANCE}:kl_cov",
        options=frozenset({"cov_coef"}),
        corrects=True,
        selection=Selection(
            body=f"{SELECT}:kl_cov",
            outputs=("log_probs",),
            makes=("chosen", "covariance"),
            options=frozenset({"cov_share"}),
        ),
    ),
}
"""Every kind of policy loss by name; the options of a kind are fields of `PolicyLoss`."""

TOP_ENTROPY = Selection(body=f"{SELECT}:top_entropy", outputs=("entropy",), makes=("uncertain",))
"""What the option `top_entropy` chooses."""


def known_kind(kind: str) -> str:
    """Refuse a kind that is not registered, naming those that are like it."""
    if kind in POLICY_LOSSES:
        return kind
    near = " or ".join(repr(name) for name in near_names(kind, POLICY_LOSSES))
    hint = f"; did you mean {near}?" if near else ""
    raise ValueError(
        f"no policy loss is called {kind!r} (there is {known_names(sorted(POLICY_LOSSES))}){hint}"
    )
