"""The base of every class of options: frozen, nothing unknown, and strict about types."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from rlflow.strict import kinds_of, problem


class Strict(BaseModel):
    """Options whose values are of the types that they say.

    Infinity is a value only where `INFINITE` says so of the class, and a field may still refuse.
    Where `TEXT` is set, texts are read as what they spell, as those of `--set`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    INFINITE: ClassVar[bool] = False
    TEXT: ClassVar[bool] = False

    @field_validator("*", mode="before")
    @classmethod
    def _of_its_type(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields.get(str(info.field_name))
        if field is None:
            return value
        kinds = kinds_of(field.annotation)
        expected = problem(value, kinds, infinite=cls.INFINITE, text=cls.TEXT)
        if expected:
            raise ValueError(f"Input should be {expected}")
        return value
