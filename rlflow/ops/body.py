"""What a body is given and what it returns.

A body is a function `(Call) -> Output` of the fields that its op declares. It never
knows where it runs: models, random numbers and tokenizers come with the call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rlflow.contract.pictures import PictureReader, Pictures
from rlflow.contract.tokenizers import Tokenizer
from rlflow.contract.values import (
    Advanced,
    Generation,
    InFlight,
    LossFunction,
    Named,
    Stat,
    StepResult,
)
from rlflow.errors import Source
from rlflow.graph.op import Op
from rlflow.graph.schedule import Scheduled, dues

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlflow.batch import Batch


class ModelInUse(Protocol):
    """The model of a node, as far as bodies may use it."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's Hugging Face tokenizer."""

    @property
    def pictures(self) -> PictureReader:
        """What reads pictures for the model; raises where it sees none."""

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
        draft_rows: int | None = None,
        routing: bool = False,
        pictures: Pictures | None = None,
    ) -> Generation:
        """Draw n responses to every prompt (ragged int64 [prompts, j]), prompt-major.

        Tokens among them may stand for `pictures`.

        Of each the tokens at positions `first` to `until` - 1, the last tokens of a prompt being
        those before. It may be some of the rows that come: the others come in other calls. With
        `routing` the experts that tokens chose come too.
        """

    def advance(
        self,
        rows: InFlight,
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        ignore_eos: bool,
    ) -> Advanced:
        """Go on with rows in flight until enough groups are complete."""

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
    ) -> StepResult:
        """Make one optimizer step on the whole batch."""

    def accumulate(
        self,
        batch: Batch,
        loss: LossFunction,
        *,
        outputs: Collection[str],
        temperature: float,
        goes_on: bool,
    ) -> dict[str, float]:
        """Add the gradients of some rows of an optimizer step, which begins unless it goes on."""

    def finish(
        self, metrics: dict[str, float], max_grad_norm: float | None, scale: float
    ) -> StepResult:
        """Make that step with `scale` times the gradients; the metrics are those of all rows."""

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

    def pass_on(self, named: Named, source: int, target: int, device: torch.device) -> Named:
        """Bring named tensors from one part to another, on its `device`: these two call it alone.

        The source is answered none.
        """


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

    def pass_on(self, named: Named, source: int, target: int, device: torch.device) -> Named:
        """There is nobody to pass anything on to."""
        raise AssertionError(f"part {source} passes on to {target}, and there is one")


def no_reader(path: str) -> PictureReader:
    """What a call has that knows no files of models."""
    raise AssertionError(f"pictures of a node that was called without a reader for {path}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One run of a node: its inputs, options, and what it may draw on.

    `wanted` names the outputs that somebody reads. `permutation(n, *salt)` gives the numbers below
    n in an order that depends on seed, iteration, node and salt only. Where a loop ends, `trips` of
    it have run, and `surplus` is left of the iteration before. `source` is the model whose weights
    a node averages, and `others` are the inputs of further row sets that it reads, whole; `memory`
    has the rows that it has kept of earlier iterations, None where it has kept none.
    The inputs are a part of the batch: `rows` int64 `[rows]` numbers them within
    its `total` rows, and `peers` have the others. Where each row of the batch lies in `pieces`, one
    after the other, an equal share of what is made of it is made of each of them. `state`
    is what the node keeps from call to call:
    numbers that a checkpoint holds, and that all who run the node change alike. Rollouts may run
    `staleness` updates ahead; `updates` are those of the model that sampled the tokens it
    reads, each due in some iterations. It is call
    `piece[0]` of `piece[1]` of the node in this iteration, and `carried` is what its earlier calls
    have left for it.
    """

    node: str
    op: Op
    iteration: int
    seed: int
    params: Mapping[str, Any]
    wanted: frozenset[str]
    permutation: Callable[..., Any]
    tokenizer: Callable[[str], Tokenizer]
    reader: Callable[[str], PictureReader] = no_reader
    inputs: Batch | None = None
    others: tuple[Batch, ...] = ()
    rows: Tensor | None = None
    total: int = 0
    pieces: int = 1
    peers: Peers = field(default_factory=Alone)
    model: ModelInUse | None = None
    source: ModelInUse | None = None
    state: dict[str, float] = field(default_factory=dict)
    where: Source | None = None
    draw: int | None = None
    staleness: int = 0
    updates: Sequence[Scheduled] = ()
    trips: int = 0
    surplus: Batch | None = None
    memory: Batch | None = None
    piece: tuple[int, int] = (0, 1)
    carried: dict[str, Any] = field(default_factory=dict)

    @property
    def drawn(self) -> int:
        """Which draw of its kind this is: the iteration, or counted on over trips of a loop."""
        return self.iteration if self.draw is None else self.draw

    def updates_since(self, version: int) -> int:
        """How many updates a version of the model that sampled is behind this iteration."""
        if not self.updates:
            return self.iteration - version
        return len(list(dues(self.updates, version, self.iteration)))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the fields the op makes."""
        return tuple(made.name for made in self.op.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a body made: fields of `rows` rows each, and numbers to log.

    `factor` is how many rows it makes of each row of its inputs, said also where there was none;
    `kept` int64 says which of all those rows these are, by place, None for all. Rows of its `own`
    are a whole batch, whatever it has read. `surplus` are rows
    for the same node in the next iteration, and so is its `memory`, which a checkpoint holds.
    A plain number among the metrics is the same for every part; a `Stat` is of this part.
    """

    fields: Mapping[str, Tensor] = field(default_factory=dict)
    rows: int = 0
    factor: int = 1
    kept: Tensor | None = None
    own: bool = False
    surplus: Batch | None = None
    memory: Batch | None = None
    metrics: Mapping[str, float | Stat] = field(default_factory=dict)
