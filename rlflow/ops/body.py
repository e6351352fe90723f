"""What a body is given and what it returns.

A body is a function `(Call) -> Output` of the fields that its op declares. It never
knows where it runs: models, random numbers and tokenizers come with the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlflow.errors import Source
from rlflow.graph.op import Op

if TYPE_CHECKING:
    from torch import Tensor

    from rlflow.batch import Batch

    LossFunction = Callable[[dict[str, Tensor], Batch], tuple[Tensor, dict[str, Tensor]]]


class Generated(Protocol):
    """Responses, one row per sample: ragged int64 tokens, ragged float32 log-probs, bool [rows]."""

    @property
    def response_tokens(self) -> Tensor:
        """The sampled tokens, the stop token included."""

    @property
    def log_probs(self) -> Tensor:
        """The log-probs they were sampled with."""

    @property
    def finished(self) -> Tensor:
        """Whether the row ended by itself."""

    @property
    def rows(self) -> Tensor | None:
        """Which rows of those asked for these are, int64; None for all of them."""

    @property
    def drafted(self) -> float:
        """How many tokens a drafter has proposed; 0 without one."""

    @property
    def accepted(self) -> float:
        """How many of them were what the model samples."""


class Stepped(Protocol):
    """What one optimizer step did."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Numbers of the loss, exact for the whole mini-batch."""

    @property
    def grad_norm(self) -> float:
        """Norm of all gradients before clipping."""

    @property
    def applied(self) -> bool:
        """False where a number was not finite and nothing was changed."""


class ModelInUse(Protocol):
    """The model of a node, as far as bodies may use it."""

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""

    @property
    def context(self) -> int | None:
        """How many tokens a row may have; None for no limit."""

    @property
    def version(self) -> int:
        """How many updates have made its weights; 0 for a model that is not trained."""

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next optimizer step."""

    def generate(
        self,
        prompts: Tensor,
        sample_ids: Tensor,
        *,
        n: int,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        ignore_eos: bool,
        first: int = 0,
        until: int | None = None,
        draft_tokens: int = 0,
    ) -> Generated:
        """Draw n responses to every prompt (ragged int64 [prompts, j]), prompt-major.

        Of each the tokens at positions `first` to `until` - 1, the last tokens of a prompt being
        those before. It may be some of the rows that come: the others come in other calls.
        """

    @property
    def base(self) -> ModelInUse:
        """The model that its adapters were added to, for `forward`."""

    def forward(
        self,
        batch: Batch,
        *,
        outputs: Collection[str],
        temperature: float | tuple[float, ...],
        top_k: int = 0,
    ) -> dict[str, Tensor]:
        """Per response token, flat float32 [total], without gradient.

        For several temperatures [total, temperatures]; of the likeliest tokens [total, top_k].
        """

    def step(
        self,
        batch: Batch,
        loss: LossFunction,
        *,
        outputs: Collection[str],
        temperature: float,
        max_grad_norm: float | None,
    ) -> Stepped:
        """Make one optimizer step on the whole batch."""

    def average(self, source: ModelInUse, decay: float) -> None:
        """Make its weights w what decay * w + (1 - decay) * those of `source` are."""


class Peers(Protocol):
    """Those who run the same node on the other parts of its batch.

    Each method is called by all of them, in the same order, and gives all the same answer.
    """

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add up number by number over the parts."""

    def union(self, ids: Tensor) -> Tensor:
        """The distinct values of int64 `ids [n]` of all parts, sorted."""

    def gather(self, values: Tensor) -> Tensor:
        """Float64 `values [n, columns]` of all parts, one after the other in part order."""

    def share(self, n: int) -> range:
        """Which of n things that no part of a batch brings along are this part's."""


class Alone:
    """The peers of a call that has the whole batch."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """The values themselves."""
        return list(values)

    def union(self, ids: Tensor) -> Tensor:
        """The distinct values, sorted."""
        found: Tensor = ids.unique()  # type: ignore[no-untyped-call]
        return found

    def gather(self, values: Tensor) -> Tensor:
        """The values themselves."""
        return values

    def share(self, n: int) -> range:
        """All of them."""
        return range(n)


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
class Call:
    """One run of a node: its inputs, options, and what it may draw on.

    `wanted` names the outputs that somebody reads. `permutation(n, *salt)` gives the
    numbers below n in an order that depends on seed, iteration, node and salt only.
    Where a loop ends, `trips` of it have run, and `surplus` is left of the iteration before.
    `source` is the model whose weights a node averages.
    The inputs are a part of the batch: `rows` int64 `[rows]` numbers them within its
    `total` rows, and `peers` have the others. `state` is what the node keeps from call to call:
    numbers that a checkpoint holds, and that all who run the node change alike. Rollouts may run
    `staleness` updates ahead. It is call `piece[0]` of `piece[1]` of the node in this iteration,
    and `carried` is what its earlier calls have left for it.
    """

    node: str
    op: Op
    iteration: int
    seed: int
    params: Mapping[str, Any]
    wanted: frozenset[str]
    permutation: Callable[..., Any]
    tokenizer: Callable[[str], Any]
    inputs: Batch | None = None
    rows: Tensor | None = None
    total: int = 0
    peers: Peers = field(default_factory=Alone)
    model: ModelInUse | None = None
    source: ModelInUse | None = None
    state: dict[str, float] = field(default_factory=dict)
    where: Source | None = None
    draw: int | None = None
    staleness: int = 0
    trips: int = 0
    surplus: Batch | None = None
    piece: tuple[int, int] = (0, 1)
    carried: dict[str, Any] = field(default_factory=dict)

    @property
    def drawn(self) -> int:
        """Which draw of its kind this is: the iteration, or counted on over trips of a loop."""
        return self.iteration if self.draw is None else self.draw

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the fields the op makes."""
        return tuple(made.name for made in self.op.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a body made: fields of `rows` rows each, and numbers to log.

    `factor` is how many rows it makes of each row of its inputs, said also where there was none;
    `kept` int64 says which of all those rows these are, by place, None for all. `surplus` are rows
    for the same node in the next iteration.
    A plain number among the metrics is the same for every part; a `Stat` is of this part.
    """

    fields: Mapping[str, Tensor] = field(default_factory=dict)
    rows: int = 0
    factor: int = 1
    kept: Tensor | None = None
    surplus: Batch | None = None
    metrics: Mapping[str, float | Stat] = field(default_factory=dict)
