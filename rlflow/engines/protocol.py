"""What the runtime may ask of an engine: small protocols and the values they exchange.

This file imports no torch, so that a scheduler or a command can name these types without
loading it; it knows no engine that fulfils them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from rlflow.batch import Batch

SleepMode = Literal["offload", "discard"]
Temperature = float | tuple[float, ...]
Head = Literal["lm", "value"]
Loss = Callable[["dict[str, Tensor]", "Batch"], "tuple[Tensor, dict[str, Tensor]]"]


Box = tuple[tuple[int, int], ...]


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
    """How tokens are drawn; temperature 0 is greedy, top_k 0 and top_p 1 keep every token."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    n: int = 1
    stop_tokens: tuple[int, ...] = ()


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
    rows that end next, the earliest first: together they make every row once.
    """

    first: int = 0
    until: int | None = None
    piece: int = 0
    pieces: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a rollout returns, one row per sample.

    `response_tokens` is ragged int64 `[rows, j]`, the stop token included; `log_probs` ragged
    float32 of the same lengths; `finished` bool `[rows]`, false where the length limit or an
    abort cut the row. `rows` int64 says which rows of the call these are, None for all. Of the
    `drafted` tokens that a drafter has proposed so many were `accepted`.
    """

    response_tokens: Tensor
    log_probs: Tensor
    finished: Tensor
    rows: Tensor | None = None
    drafted: float = 0.0
    accepted: float = 0.0


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


class OptimizerSpec(Protocol):
    """What an optimizer is built from (AdamW with a schedule of the learning rate)."""

    @property
    def lr(self) -> float:
        """The highest learning rate."""

    @property
    def betas(self) -> tuple[float, float]:
        """Decay of the first and the second moment."""

    @property
    def eps(self) -> float:
        """Added to the root of the second moment."""

    @property
    def weight_decay(self) -> float:
        """Decoupled decay, of matrices only."""

    @property
    def schedule(self) -> str:
        """`constant`, `linear` or `cosine`."""

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up from 0."""

    @property
    def total_steps(self) -> int:
        """Steps after which the schedule stays at its lowest rate; 0 where it has no end."""

    @property
    def min_lr_ratio(self) -> float:
        """The lowest rate of a schedule, as a part of `lr`."""


class RolloutEngine(Protocol):
    """An engine that generates."""

    def generate(
        self,
        prompts: Tensor,
        sampling: Sampling,
        key: SampleKey,
        sample_ids: Tensor,
        reach: Reach = ...,
    ) -> Generation:
        """Draw `sampling.n` responses to each prompt, rows prompt-major; of them what is asked."""

    def update_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copy new weights in, by parameter name."""

    def sleep(self, mode: SleepMode = "offload") -> None:
        """Free the device memory of the weights."""

    def wake(self) -> None:
        """Bring the memory back; after `discard` only `update_weights` fills it."""

    def abort(self) -> None:
        """Stop the generation now in flight; its rows come back unfinished."""

    def stats(self) -> Mapping[str, float]:
        """Counters since the engine was made: prompt tokens, new tokens, decode passes."""


class Trainer(Protocol):
    """An engine that computes log-probs, values and updates."""

    def forward(
        self,
        batch: Batch,
        *,
        outputs: Collection[str],
        temperature: Temperature,
        top_k: int = 0,
    ) -> dict[str, Tensor]:
        """Per response token, flat float32 `[total]`, without gradient.

        `[total, temperatures]` for several temperatures; `[total, top_k]` of the likeliest tokens.
        """

    def step(
        self,
        batch: Batch,
        loss_fn: Loss,
        *,
        outputs: Collection[str],
        temperature: float,
        max_grad_norm: float | None,
    ) -> StepResult:
        """Make one optimizer step, or none at all if a number is not finite."""
