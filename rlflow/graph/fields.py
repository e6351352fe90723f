"""What travels on an edge: its types, the annotations users write them with, and what binds it.

A field has a dtype, a level (how many values it has) and, at the token level, the mask
it lives under. Bindings and edges name the nodes at their ends and know nothing else of them.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

Level = Literal["token", "row"]
DType = Literal["int64", "int16", "float32", "bool", "text", "image"]
Granularity = Literal["row", "group", "batch"]
EdgeKind = Literal["data", "weights", "order", "state"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """An input of a node, bound to the field of another node that feeds it.

    `part` says of which of the row sets that the node reads it is.
    """

    name: str
    source: str
    field: Field
    part: int = 0

    def __str__(self) -> str:
        renamed = "" if self.field.name == self.name else f"{self.field.name} as "
        return f"{self.source}.{renamed}{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """A field that was offered to a node and that its options leave unread."""

    source: str
    field: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """`target` in iteration i waits for `source` in iteration i - distance, because of `reason`."""

    source: str
    target: str
    kind: EdgeKind
    distance: int
    reason: str = ""
    fields: tuple[str, ...] = ()
    model: str | None = None


def references(inputs: Iterable[Binding]) -> dict[str, str | list[str]]:
    """What is read by the name it is read as: `node.field`, a list where it is read of several.

    A name of another row set than the first has its number before it: `1:reward`.
    """
    found: dict[str, list[str]] = {}
    for bound in inputs:
        name = f"{bound.part}:{bound.name}" if bound.part else bound.name
        found.setdefault(name, []).append(f"{bound.source}.{bound.field.name}")
    return {name: each[0] if len(each) == 1 else each for name, each in found.items()}
