"""What a user says about a student that learns from a teacher's log-probs of its own samples.

As in `rlflow.ops.losses`: frozen, validated, an option that would do nothing is an error. The
formulas are in `rlflow.ops.math.distillation`; nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, model_validator

from rlflow.ops.loss_base import Loss, Positive, pasted
from rlflow.ops.loss_kinds import known_kind
from rlflow.ops.losses import KLEstimator, PolicyLoss

Form = Literal["policy_gradient", "reward", "supervised"]
AVERAGED = ("aggregate", "constant")
OF_THE_TEACHER = ("form", "teacher_kl", "teacher_limit")


class DistillLoss(PolicyLoss):
    """On-policy distillation: tokens that the teacher finds likelier are reinforced.

    `policy_gradient`: a policy loss of the advantages `-KL(student || teacher)` of each sampled
    token, as the student is at this optimizer step. `reward`: the same as the student was when
    it sampled, added to the `advantages` of a reward where there are such. `supervised`: the KL
    estimate itself, backpropagated. The teacher's `ops.log_probs(teacher, samples,
    field="teacher_log_probs")` are read. The options of `PolicyLoss` are those of the policy loss.
    """

    body: ClassVar[str] = "rlflow.ops.math.distillation:distill_objective"

    form: Form
    kind: Annotated[str, AfterValidator(known_kind)] = "ppo_clip"
    teacher_kl: KLEstimator | None = None
    """The estimate of the KL; k1 unless given, and k3+ where it is backpropagated."""
    teacher_coef: Positive = 1.0
    """What the estimate is multiplied by in an advantage."""
    teacher_limit: Positive | None = 10.0
    """How large an estimate may be, either way; None for any. `reward` holds only what is given."""
    add_advantages: bool = False
    """Whether the `advantages` of a reward count too."""

    def __init__(self, form: str = "policy_gradient", **options: Any) -> None:
        Loss.__init__(self, **{"form": form, **options})

    @property
    def estimator(self) -> str:
        """The KL estimate that it makes."""
        return self.teacher_kl or ("k3+" if self.form == "supervised" else "k1")

    @property
    def limit(self) -> float | None:
        """How large an estimate may be."""
        given = "teacher_limit" in self.model_fields_set
        return None if self.form == "reward" and not given else self.teacher_limit

    @property
    def reads_old(self) -> bool:
        """Whether log-probs of an old policy are part of it."""
        return self.form != "supervised" and super().reads_old

    def needs(self) -> tuple[str, ...]:
        """The teacher's log-probs, and what the policy loss reads but for its advantages."""
        if self.form == "supervised":
            return ("response_mask", "teacher_log_probs")
        behaviour = ("rollout_log_probs",) if self.form == "reward" else ()
        read = (*super().needs(), "teacher_log_probs", *behaviour)
        unread = () if self.add_advantages else ("advantages",)
        return tuple(name for name in dict.fromkeys(read) if name not in unread)

    def outputs(self) -> tuple[str, ...]:
        """As of a policy loss; the log-probs alone where the estimate is the loss."""
        return ("log_probs",) if self.form == "supervised" else super().outputs()

    def corrects(self, old: str, *, own: bool) -> bool:
        """As a policy loss; an estimate of the KL asks for samples of the weights themselves."""
        return not own if self.form == "supervised" else super().corrects(old, own=own)

    def under_lag(self, old: str) -> str:
        """As a policy loss, where there is a ratio."""
        return old if self.form == "supervised" else super().under_lag(old)

    def corrections(self) -> tuple[str, ...]:
        """Those of the policy loss, with its options, or the form that has one."""
        if self.form == "supervised":
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
        if self.form != "supervised":
            return super().idle()
        read = (*AVERAGED, *OF_THE_TEACHER)
        unread = [name for name in type(self).model_fields if name not in read]
        return {**dict.fromkeys(unread, "a supervised form has no policy loss"), **Loss.idle(self)}

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
