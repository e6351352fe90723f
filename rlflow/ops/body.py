"""What a body is given and what it returns.

A body is a function `(Call) -> Output` of the fields that its op declares. It never
knows where it runs: models, random numbers and tokenizers come with the call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

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
    ) -> Generated:
        """Draw n responses to every prompt (ragged int64 [prompts, j]), prompt-major."""

    def forward(
        self, batch: Batch, *, outputs: Collection[str], temperature: float
    ) -> dict[str, Tensor]:
        """Per response token, flat float32 [total], without gradient."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One run of a node: its inputs, options, and what it may draw on.

    `wanted` names the outputs that somebody reads. `permutation(n, *salt)` gives the
    numbers below n in an order that depends on seed, iteration, node and salt only.
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
    model: ModelInUse | None = None
    where: Source | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the fields the op makes."""
        return tuple(made.name for made in self.op.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a body made: fields of `rows` rows each, and numbers to log."""

    fields: Mapping[str, Tensor] = field(default_factory=dict)
    rows: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
