"""What the options of a loss that have options of their own share: validation and printing.

This file knows none of them, and holds no torch.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import ConfigDict

from rlflow.graph.strict_model import Strict


class Spec(Strict):
    """A frozen, validated group of options."""

    model_config = ConfigDict(ser_json_inf_nan="strings")
    INFINITE: ClassVar[bool] = True

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
        return f"{type(self).__name__}({options})"

    def line(self) -> str:
        """The line that makes it."""
        options = ", ".join(f"{name}={_pasted(value)}" for name, value in self.options().items())
        return f"rf.{type(self).__name__}({options})"


def _pasted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value).replace("inf", "math.inf")
