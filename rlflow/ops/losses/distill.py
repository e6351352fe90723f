"""What a user says about a student that learns from a teacher's log-probs of its own samples.

As in `rlflow.ops.losses.losses`: frozen, validated, an option that would do nothing is an error.
The formulas are in `rlflow.ops.math.losses.distillation`; nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, Unpack

from pydantic import AfterValidator, Field, model_validator

from rlflow.ops.losses.base import Loss, Positive, pasted
from rlflow.ops.losses.kinds import known_kind
from rlflow.ops.losses.losses import AT_TOP_K, TOP_K, KLEstimator, PolicyLoss, Share
from rlflow.ops.losses.options import DistillLossOptions

Form = Literal["policy_gradient", "reward", "supervised", "forward_kl", "reverse_kl", "jsd"]
DISTRIBUTIONS = ("forward_kl", "reverse_kl", "jsd")
"""The forms that compare whole distributions, not sampled tokens alone."""
READ_BY: dict[str, tuple[str, ...]] = {
    "supervised": ("teacher_kl",),
    "forward_kl": ("log_prob_min", "tail"),
    "reverse_kl": (),
    "jsd": ("jsd_beta",),
}
"""What each form without a policy loss reads of what others do not."""
SHARED = ("aggregate", "constant", "form", "teacher_limit")


class DistillLoss(PolicyLoss):
    """On-policy distillation: the policy moves towards a teacher on its own samples.

    `policy_gradient` is a policy loss whose advantages are `-KL(student || teacher)` of each
    sampled token, with the student as it is at this optimizer step. `reward` takes the student as
    it was when it sampled, and adds the result to the `advantages` of a reward where there are
    such. `supervised` backpropagates the KL estimate itself. These read the teacher's log-probs,
    `ops.log_probs(teacher, samples, field="teacher_log_probs")`, and take the options of
    `PolicyLoss`.

    `forward_kl`, `reverse_kl` and `jsd` backpropagate divergences of whole distributions: over the
    teacher's k likeliest tokens, `ops.log_probs(teacher, samples, top_k=k)`, with one more
    outcome for all other tokens in the last two. With the vocabulary's size as k they are those of
    GKD (Agarwal et al. 2023, arXiv:2306.13649) with beta 0, 1 and `jsd_beta`.
    """

    body: ClassVar[str] = "rlflow.ops.math.losses.distillation:distill_objective"
    terms: ClassVar[tuple[str, ...]] = ("loss", "policy_loss", "distill_loss")

    form: Form
    kind: Annotated[str, AfterValidator(known_kind)] = "ppo_clip"
    teacher_kl: KLEstimator | None = None
    """The estimate of the KL; k1 unless given, and k3+ where it is backpropagated."""
    teacher_coef: Positive = 1.0
    """What the estimate is multiplied by in an advantage."""
    teacher_limit: Positive | None = 10.0
    """How large an estimate may be, either way; None for any.

    `reward`, and the divergences of whole distributions, hold only what is given.
    """
    add_advantages: bool = False
    """Whether the `advantages` of a reward count too."""
    jsd_beta: Share = 0.5
    """Share of the teacher in the mixture that `jsd` measures both sides from."""
    log_prob_min: Annotated[float, Field(lt=0, allow_inf_nan=False)] | None = -10.0
    """Below which `forward_kl` holds log-probs of both sides; None for nowhere."""
    tail: bool = False
    """Whether `forward_kl` has an outcome for all tokens but the k; nothing is held then."""

    def __init__(
        self, form: str = "policy_gradient", **options: Unpack[DistillLossOptions]
    ) -> None:
        given: dict[str, Any] = {"form": form, **options}
        Loss.__init__(self, **given)

    @property
    def estimator(self) -> str:
        """The KL estimate that it makes."""
        return self.teacher_kl or ("k3+" if self.form == "supervised" else "k1")

    @property
    def limit(self) -> float | None:
        """How large an estimate may be."""
        given = "teacher_limit" in self.model_fields_set
        free = self.form == "reward" or self.distributions
        return None if free and not given else self.teacher_limit

    @property
    def distributions(self) -> bool:
        """Whether it compares whole distributions."""
        return self.form in DISTRIBUTIONS

    @property
    def of_policy(self) -> bool:
        """Whether it is a policy loss."""
        return self.form not in READ_BY

    @property
    def reads_old(self) -> bool:
        """Whether log-probs of an old policy are part of it."""
        return self.of_policy and super().reads_old

    def needs(self) -> tuple[str, ...]:
        """The teacher's log-probs, and what the policy loss reads but for its advantages."""
        if self.distributions:
            return ("response_mask", *TOP_K)
        if self.form == "supervised":
            return ("response_mask", "teacher_log_probs")
        behaviour = ("rollout_log_probs",) if self.form == "reward" else ()
        read = (*super().needs(), "teacher_log_probs", *behaviour)
        unread = () if self.add_advantages else ("advantages",)
        return tuple(name for name in dict.fromkeys(read) if name not in unread)

    def outputs(self) -> tuple[str, ...]:
        """As of a policy loss; the log-probs alone where the estimate is the loss."""
        if self.distributions:
            return AT_TOP_K
        return ("log_probs",) if self.form == "supervised" else super().outputs()

    def corrects(self, old: str, *, own: bool) -> bool:
        """As a policy loss; an estimate of the KL asks for samples of the weights themselves.

        A divergence of whole distributions weighs no sample by its probability: GKD trains on
        samples of whatever policy.
        """
        if self.distributions:
            return True
        return not own if self.form == "supervised" else super().corrects(old, own=own)

    def under_lag(self, old: str) -> str:
        """As a policy loss, where there is a ratio."""
        return super().under_lag(old) if self.of_policy else old

    def corrections(self) -> tuple[str, ...]:
        """Those of the policy loss, with its options, or the form that has one."""
        if not self.of_policy:
            return ('rf.DistillLoss("policy_gradient", old="rollout")',)
        return super().corrections()

    def line(self, **changed: Any) -> str:
        """The line that makes it, with some options changed."""
        options = {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name != "form" and getattr(self, name) != self.default(name)
        }
        words = [f"{name}={pasted(value)}" for name, value in (options | changed).items()]
        return f"rf.DistillLoss({', '.join([pasted(self.form), *words])})"

    def idle(self) -> dict[str, str]:
        """As of a policy loss; all of that where there is none."""
        others = {name for names in READ_BY.values() for name in names} - {"teacher_kl"}
        if self.of_policy:
            unread = dict.fromkeys(sorted(others), f"{self.form} compares sampled tokens alone")
            return {**super().idle(), **unread}
        read = (*SHARED, *READ_BY[self.form])
        reasons = {
            name: f"{self.form} has no policy loss"
            for name in type(self).model_fields
            if name not in read
        }
        reasons |= dict.fromkeys(others.difference(read), f"{self.form} does not read it")
        if self.tail:
            reasons["log_prob_min"] = "with a tail the two sides are distributions, as they are"
        return {**reasons, **Loss.idle(self)}

    @model_validator(mode="after")
    def _per_token(self) -> Self:
        """Refuse kinds that want other advantages, and a loss without a gradient to follow."""
        if self.form == "supervised" and self.teacher_kl == "k1":
            raise ValueError(
                "k1 cannot be a loss: its gradient is 0 in expectation; use k2 or k3+ (the"
                " gradient of the reverse KL) or k3, or form='policy_gradient'"
            )
        if self.of_kind.advantages == "row" or self.of_kind.selection is not None:
            raise ValueError(
                f"{self.kind} takes advantages that are there before the optimizer step, one a"
                " row or all together; a teacher gives one a token as the student changes: use"
                " kind='ppo_clip'"
            )
        return self
