"""The contract of an operator: what it reads, what it makes, how it may be cut.

An op names its body by a dotted name; the body is looked up by the worker that runs
it. This file knows no body, no model and no placement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from rlflow.graph.fields import DType, Field, Granularity, Level
from rlflow.graph.roles import Role

Use = Literal["train", "forward", "rollout"]
RowSet = Literal["new", "expand", "same", "gather", "none"]
Uneven = Literal["pad", "refuse"]

# How rows reach the ranks of a pool: split over its row parts and replicated within each; all
# of them to every rank; to the first rank alone; or as the producer's parts lie already.
DISPATCHES = ("split", "all", "first", "parts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A field that an op reads; `levels` are those it accepts, the first one preferred.

    `part` says of which of the row sets that the op reads it is, by number. A user's function
    gets text `as_list` of strings, or as bytes.
    """

    name: str
    dtype: DType
    levels: tuple[Level, ...]
    required: bool = True
    hint: str = ""
    part: int = 0
    as_list: bool = False

    def accepts(self, offered: Field) -> bool:
        """Whether an offered field has the dtype and a level that this input takes."""
        return offered.dtype == self.dtype and offered.level in self.levels

    def __str__(self) -> str:
        optional = "" if self.required else "?"
        return f"{self.name}{optional}:{self.dtype}[{'|'.join(self.levels)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An operator.

    `per` is what makes cutting legal: a row op may be cut anywhere along the batch, a
    group op between groups, a batch op not at all. `use` says how it needs its model.
    `rows` says what becomes of the row set: made new, each row expanded into several,
    kept, gathered from other row sets, or dropped. `effect` is `pure` where running twice
    changes nothing. A `closing` op runs once more after the last iteration, on the final weights.

    `dispatch` is one of `DISPATCHES` or the name of a registered pair of functions; left
    empty it follows from `per`. A `collective` op's body sums over all parts of the batch
    (`call.peers`), so ranks may share its rows though it is not cut in time. `uneven` says
    whether parts may differ in their number of rows, filled up with rows of zero weight
    where ranks must keep step, or the compiler refuses rows that do not divide.

    An op that `hands_on` fields makes each output of its inputs of that name: what nobody reads
    of it, and it does not require itself, it need not read.

    An op that `recalls` rows makes its own of those of this iteration and of as many earlier ones
    as its option `keep` says: they wait where it runs, and in checkpoints.

    `continued` is its body where rows go on from one iteration to the next; it then `recalls` them.

    An op that `chooses` which of its rows it makes, or where, knows them when it has made them.

    `resumed` is the op that goes on with rows which this one, given the option `until`, leaves
    unfinished: it makes every output anew that it has in common with this one.

    Of those by which it may be `divided` the first takes some of the groups that it reads, and the
    second puts the rows together that it has made of each of these parts.

    The options of a node of it may spell these `roles`.
    """

    name: str
    body: str
    inputs: tuple[Input, ...]
    outputs: tuple[Field, ...]
    per: Granularity
    use: Use | None = None
    rows: RowSet = "same"
    effect: Literal["pure", "effectful"] = "pure"
    closing: bool = False
    dispatch: str = ""
    collective: bool = False
    uneven: Uneven = "pad"
    hands_on: bool = False
    recalls: bool = False
    resumed: Op | None = None
    divided: tuple[Op, Op] | None = None
    continued: str = ""
    chooses: bool = False
    roles: tuple[type[Role], ...] = ()
    function: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    @property
    def dispatched(self) -> str:
        """How its rows reach ranks: as said, or as its granularity allows."""
        if self.dispatch:
            return self.dispatch
        if self.collective or self.per != "batch":
            return "split"
        return "first" if self.use is None else "all"

    @property
    def gathers(self) -> bool:
        """Whether which rows it makes is known only when it has made them."""
        return self.rows == "gather" or self.recalls or self.chooses

    def output(self, name: str) -> Field | None:
        """The output of that name, if the op has one."""
        return next((made for made in self.outputs if made.name == name), None)


REGISTRY: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Make an op known by name, so that messages can say which op provides a field."""
    REGISTRY[op.name] = op
    return op


def providers(field_name: str) -> list[str]:
    """The names of the registered ops that make a field of that name, sorted."""
    return sorted(op.name for op in REGISTRY.values() if op.output(field_name) is not None)


def param_text(value: object) -> str:
    """An option's value as it is printed: by its own `describe`, by name, or plainly."""
    if hasattr(value, "describe"):
        described: str = value.describe()
        return described
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
