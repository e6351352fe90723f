"""The types of what travels on an edge, and the annotations users write them with.

A field has a dtype, a level (how many values it has) and, at the token level, the mask
it lives under. This file does not know which op makes a field or who reads it.
"""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

Level = Literal["token", "row"]
DType = Literal["int64", "int16", "float32", "bool", "text", "image"]
Granularity = Literal["row", "group", "batch"]

IMAGE: DType = "image"
"""Pictures of a row as they are encoded in files, any number of them."""
PIXELS, PICTURES = "prompt_pixels", "prompt_pictures"
"""What is made of pictures for a model to read: numbers of their tokens, and their shapes."""

PYTHON_DTYPES: dict[type, DType] = {
    int: "int64",
    float: "float32",
    bool: "bool",
    str: "text",
}

T = TypeVar("T")

if TYPE_CHECKING:
    from torch import Tensor

    class _Of(Tensor, Generic[T]):
        """A tensor whose entries are said to be of a type."""

    # What torch computes of such a tensor is a plain one, and may be returned as such.
    Token = Tensor | _Of[T]
    Row = Tensor | _Of[T]

else:

    class Token(Generic[T]):
        """One value per token of a row: a jagged tensor `[rows, j]`."""

    class Row(Generic[T]):
        """One value per row: a tensor `[rows]`."""


TEXTS = list[str]
"""The annotation of a field of text that is read and made as one `str` a row."""
LEVELS: dict[Any, Level] = {Token: "token", Row: "row"}
LEVEL_NAMES: dict[Level, str] = {level: f"rf.{kind.__name__}" for kind, level in LEVELS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A typed value on an edge; `mask` names the token field that says which tokens count.

    `width` is how many values there are of each token, or row: None for one, without a dimension.
    Of numbers of experts (int16) it follows from the model that is `routed`: layers times experts a
    token, layer by layer. Of pixels it follows from the model that they are `seen` by.
    """

    name: str
    dtype: DType
    level: Level
    mask: str | None = None
    width: int | None = None
    routed: str | None = None
    seen: str | None = None

    def __str__(self) -> str:
        under = f"|{self.mask}" if self.mask else ""
        wide = "" if self.width is None else f",{self.width}"
        return f"{self.name}:{self.dtype}[{self.level}{wide}{under}]"

    @property
    def ragged(self) -> bool:
        """Whether rows have lengths of their own in it."""
        return self.level == "token" or self.dtype in ("text", IMAGE)

    @property
    def of_prompt(self) -> bool:
        """Whether it is as long as the prompt of its row, not as the response."""
        return self.name.startswith("prompt") or self.dtype == IMAGE


def token(
    name: str,
    dtype: DType = "float32",
    mask: str | None = "response_mask",
    width: int | None = None,
    routed: str | None = None,
    seen: str | None = None,
) -> Field:
    """A token field, by default under the mask of the response."""
    return Field(
        name=name, dtype=dtype, level="token", mask=mask, width=width, routed=routed, seen=seen
    )


def row(name: str, dtype: DType = "float32") -> Field:
    """A field with one value per row."""
    return Field(name=name, dtype=dtype, level="row")


def read_annotation(annotation: Any) -> tuple[DType, Level] | None:
    """The dtype and level an annotation such as `rf.Row[float]` stands for, or None.

    `list[str]` is text, one a row.
    """
    if annotation == TEXTS:
        return "text", "row"
    origin = typing.get_origin(annotation)
    if origin not in LEVELS:
        return None
    (argument,) = typing.get_args(annotation)
    if argument not in PYTHON_DTYPES:
        return None
    return PYTHON_DTYPES[argument], LEVELS[origin]


def is_optional(annotation: Any) -> tuple[bool, Any]:
    """Whether an annotation is `X | None`, and the X."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        rest = [part for part in typing.get_args(annotation) if part is not type(None)]
        if len(rest) == 1:
            return True, rest[0]
    return False, annotation
