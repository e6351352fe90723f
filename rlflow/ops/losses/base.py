"""What every loss has: a way to average, a printed form, and what it needs of the graph.

This file knows no loss, and holds no torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from rlflow.graph.strict_model import Strict
from rlflow.ops.spec import Spec

Aggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
Count = Literal["tokens", "rows", ""]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

CORRECTIONS = (
    'rf.PolicyLoss("ppo_clip", old="rollout")',
    'rf.PolicyLoss("ppo_clip", old="recomputed", correction=rf.ImportanceSampling())',
)
"""The plainest policy losses that correct for older rows, as lines to paste."""


class Loss(Strict):
    """What every loss has: a way to average, and a printed form."""

    model_config = ConfigDict(ser_json_inf_nan="strings")
    INFINITE: ClassVar[bool] = True

    body: ClassVar[str]
    """Dotted name of the function `(spec, outputs, batch, totals) -> (loss, metrics)`."""

    terms: ClassVar[tuple[str, ...]] = ("loss",)
    """The loss and its terms, as they are logged: what is averaged as `aggregate` says."""

    aggregate: Aggregation = "token-mean"
    constant: Positive | None = None
    """Divisor of `seq-mean-token-sum-norm`, such as the longest response allowed."""

    @abstractmethod
    def needs(self) -> tuple[str, ...]:
        """The batch fields this loss reads, in a fixed order."""

    @abstractmethod
    def outputs(self) -> tuple[str, ...]:
        """What the training forward must compute for this loss, with gradient."""

    @property
    def forwards(self) -> int:
        """How often a mini-batch is forwarded without gradient before each optimizer step."""
        return 0

    @property
    def adds_up(self) -> bool:
        """Whether gradients of some rows may be added up before a step's other rows are known.

        Not where something is chosen, or summed, over all of them first.
        """
        return not self.forwards

    def counted(self, metric: str = "loss") -> Count:
        """What of the whole optimizer step a metric is divided by, or the loss, if anything.

        Of a metric that is the largest of its values (`*_max`) it says nothing.
        """
        if metric not in self.terms:
            return "tokens"
        if self.aggregate == "token-sum":
            return ""
        return "tokens" if self.aggregate == "token-mean" else "rows"

    @property
    def reads_old(self) -> bool:
        """Whether log-probs of an old policy are part of it."""
        return False

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
        return CORRECTIONS

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

    def default(self, option: str) -> Any:
        """What an option is unless it is given."""
        return type(self).model_fields[option].default

    def describe(self) -> str:
        """One line, stable: the kind, and the options that differ from their defaults."""
        fields = type(self).model_fields
        own_first = sorted(fields, key=lambda name: name in Loss.model_fields)
        named = [str(getattr(self, name)) for name in own_first if fields[name].is_required()]
        options = [
            f"{name}={printed(getattr(self, name))}"
            for name in own_first
            if not fields[name].is_required() and getattr(self, name) != self.default(name)
        ]
        return f"{type(self).__name__}({', '.join([*named, *options])})"


def pasted(value: object) -> str:
    """A value as it is written in a file."""
    if isinstance(value, Spec):
        return value.line()
    if isinstance(value, tuple) and any(isinstance(each, Spec) for each in value):
        return f"({', '.join(map(pasted, value))},)"
    return f'"{value}"' if isinstance(value, str) else repr(value).replace("inf", "math.inf")


def printed(value: object) -> str:
    """A value as in a call, without quotes; an equal pair as its one number."""
    if isinstance(value, Spec):
        return value.describe()
    if isinstance(value, tuple) and any(isinstance(each, Spec) for each in value):
        return f"({', '.join(map(printed, value))})"
    if isinstance(value, tuple) and len(set(value)) == 1:
        return str(value[0])
    return str(value)
