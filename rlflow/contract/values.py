"""The values that ops, engines and the runtime hand to each other, but for rows.

Rows are `rlflow.batch`. This file imports no torch, so that a graph or a command can name these
types without loading it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlflow.batch import Batch

SleepMode = Literal["offload", "discard"]
Temperature = float | tuple[float, ...]
Head = Literal["lm", "value"]
LossFunction = Callable[["dict[str, Tensor]", "Batch"], "tuple[Tensor, dict[str, Tensor]]"]


Box = tuple[tuple[int, int], ...]
# Tensors that travel together, by what they are.
Named = Mapping[tuple[str | int, ...], "Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The piece of one parameter that this process holds.

    `box` has (start, stop) per dimension within the whole parameter's `shape`; `tensor` is a
    view of the live storage with exactly the box's sizes. A box may be empty.
    """

    shape: tuple[int, ...]
    box: Box
    tensor: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn; temperature 0 is greedy, top_k 0 and top_p 1 keep every token.

    With `routing` the experts that tokens choose are told.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    n: int = 1
    stop_tokens: tuple[int, ...] = ()
    routing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleKey:
    """Where random numbers come from, besides the sample's own id and the position."""

    seed: int
    iteration: int
    stream: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Which part of its responses one call of a rollout engine makes.

    The tokens at positions `first` to `until` - 1 (None: to the end); those before `first` are
    the last of each prompt. Of `pieces` calls with equal arguments number `piece` brings the
    rows that end next, the earliest first: together they make every row once. With `groups` those
    are all rows of the prompts that are complete next.
    """

    first: int = 0
    until: int | None = None
    piece: int = 0
    pieces: int = 1
    groups: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a rollout returns, one row per sample.

    `response_tokens` is ragged int64 `[rows, j]`, the stop token included; `log_probs` ragged
    float32 of the same lengths; `finished` bool `[rows]`, false where the length limit or an
    abort cut the row. `rows` int64 says which rows of the call these are, None for all. Of the
    `drafted` tokens that a drafter has proposed so many were `accepted`.

    Where it was asked, `prompt_experts` and `experts`, ragged int16 `[rows, j, layers * k]`, are
    those that each token of prompt and response chose, layer by layer; -1 where none read it.
    """

    response_tokens: Tensor
    log_probs: Tensor
    finished: Tensor
    rows: Tensor | None = None
    drafted: float = 0.0
    accepted: float = 0.0
    prompt_experts: Tensor | None = None
    experts: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """A drafter that an engine is to hold: its weights are those of `path`, or random ones.

    It proposes so many `tokens` at a time to the engine's model, whose dtype and tokens it has.
    """

    name: str
    path: str
    init: Literal["weights", "random"]
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What an optimizer step did; `applied` is false where it was skipped as not finite."""

    metrics: dict[str, float]
    grad_norm: float
    applied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """A number over the rows of a part, in a form that parts can be joined in.

    `mean` and `std` (of the population) are over `count` values with sum `total`, whose squared
    deviations from their own mean are `spread` on average; `max` and `min` have their value in
    `total`, and a `count` of 0 where there was none.
    """

    kind: Literal["mean", "std", "max", "min"]
    total: float
    count: float = 1.0
    spread: float = 0.0

    @property
    def value(self) -> float:
        """The number itself; 0 over nothing."""
        if not self.count:
            return 0.0
        if self.kind == "mean":
            return self.total / self.count
        return math.sqrt(self.spread) if self.kind == "std" else self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """Live rows move from the fullest replica to the emptiest, after every so many turns.

    With `reread` they bring the tokens that they have got, and what they have seen is read again;
    else keys, values and states as they are. `pass_on(named, source, target, device)` brings named
    tensors from one replica to another, on the device of the target; both call it.
    """

    every: int
    reread: bool
    pass_on: Callable[[Named, int, int, torch.device], Named]


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """Rows that a continuous rollout goes on with, or may begin: those of a group stand together.

    `seen` is ragged int64 `[rows, j]`, prompt and response so far, of which the last `made` int64
    `[rows]` tokens are response. Random numbers are those of sample `ids` in draw `draws`, both
    int64 `[rows]`. `groups` int64 `[rows]` ascends. Of `begun` groups all rows go on; the others
    begin in their order, as long as no more than `at_once` rows are live. It stops once `met` says
    so of the groups that began and of those that are complete, the earliest first, and `least`
    turns are made or fewer than `few` rows are live. In a turn every live row gets a token.

    Several `replicas` share the rows; that of number `own` decodes here. All make their turns
    together: the numbers that each gives `told` in a turn it gives to all, sorted. They do so in
    every turn, or in every so many as rows are `moving` after where `met` can wait until then.
    """

    seen: Tensor
    made: Tensor
    draws: Tensor
    ids: Tensor
    groups: Tensor
    begun: frozenset[int]
    at_once: int
    met: Callable[[Collection[int], Sequence[int]], bool]
    least: int = 0
    few: int = 1
    replicas: int = 1
    own: int = 0
    told: Callable[[Sequence[int]], Sequence[int]] = sorted
    tells: int = 1
    moving: Moving | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advanced:
    """What became of rows in flight: the tokens that each has got, ragged, none where it waited.

    `finished` bool `[rows]` says which ended by themselves, `over` which ended at all. `begun` are
    the groups that have begun, `ended` those that were completed now, the earliest first. `turns`
    is 0 where an engine counts none. Of rows that others decoded there are no tokens, and they are
    not `finished`. Where rows have `moved`, so many in all, `places` int64 says of each token here
    which one of those that its row has got now it is; `live` is how many rows each turn had here.
    """

    response_tokens: Tensor
    log_probs: Tensor
    finished: Tensor
    over: Tensor
    begun: frozenset[int]
    ended: tuple[int, ...]
    turns: int = 0
    places: Tensor | None = None
    moved: int = 0
    live: tuple[int, ...] = ()
