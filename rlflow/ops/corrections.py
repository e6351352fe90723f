"""What a user says about samples of another policy: how a loss weighs them.

The formulas are in `rlflow.ops.math.importance`; this file holds no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Level = Literal["token", "sequence"]
Mode = Literal["truncate", "mask"]


class ImportanceSampling(BaseModel):
    """Weighs what a token adds to the loss by `pi_prox / pi_behave`, which carries no gradient.

    `pi_behave` sampled the token; `pi_prox` is the policy that the clipped ratio is taken
    against. `level="sequence"` takes the product over a response for each of its tokens.
    `mode="truncate"` holds a weight at `cap`; `mode="mask"` gives weight 0 to what lies above
    `cap`, or below `floor`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    level: Level = "token"
    mode: Mode = "truncate"
    cap: Annotated[float, Field(ge=1)] = 2.0
    """Largest weight; at least 1, the weight of a sample of the same policy."""
    floor: Annotated[float, Field(gt=0, le=1)] | None = None
    """Smallest weight that `mask` keeps; None for no bound."""

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        """Refuse a floor that nothing reads, and a mask that drops nothing."""
        if self.mode == "truncate" and self.floor is not None:
            raise ValueError("floor would do nothing here: only mode='mask' reads it; leave it out")
        if self.mode == "mask" and self.cap == float("inf") and self.floor is None:
            raise ValueError("mode='mask' would drop nothing: give it a finite cap, or a floor")
        return self

    def options(self) -> dict[str, object]:
        """The options that differ from their defaults, by name."""
        fields = type(self).model_fields
        return {
            name: getattr(self, name)
            for name, field in fields.items()
            if getattr(self, name) != field.default
        }

    def describe(self) -> str:
        """One line, stable: what differs from the defaults."""
        options = ", ".join(f"{name}={value}" for name, value in self.options().items())
        return f"ImportanceSampling({options})"

    def line(self) -> str:
        """The line that makes it."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items())
        return f"rf.ImportanceSampling({options})".replace("'", '"')
