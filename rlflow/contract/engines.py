"""What the runtime asks of a model, of who trains it, and of who generates with it.

Engines fulfil these without importing them. Nothing here imports torch or knows an engine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from rlflow.contract.pictures import Pictures
from rlflow.contract.values import (
    Advanced,
    Generation,
    InFlight,
    LossFunction,
    Reach,
    SampleKey,
    Sampling,
    Shard,
    SleepMode,
    StepResult,
    Temperature,
)

if TYPE_CHECKING:
    from torch import Tensor

    from rlflow.batch import Batch


class TextConfig(Protocol):
    """What a model's configuration says of its text."""

    @property
    def eos_token_id(self) -> int | list[int] | None:
        """The tokens that end a text."""

    @property
    def vocab_size(self) -> int:
        """How many tokens it has scores for."""

    @property
    def model_type(self) -> str:
        """The family, as transformers calls it."""

    @property
    def hidden_size(self) -> int:
        """The width of hidden states."""

    @property
    def num_hidden_layers(self) -> int:
        """How many layers it has."""

    @property
    def num_attention_heads(self) -> int:
        """How many heads queries have in each layer."""


class ModelConfig(Protocol):
    """A configuration as Hugging Face has it: what all families have. Ask for more by `getattr`."""

    def get_text_config(self) -> TextConfig:
        """The part of the language model."""

    def to_dict(self) -> dict[str, Any]:
        """All of it, as config.json has it."""

    @classmethod
    def from_dict(cls, said: dict[str, Any]) -> Self:
        """A configuration that says so; the inverse of `to_dict`."""


class LoadedModel(Protocol):
    """The weights of one model: written by a reshard, asleep or awake, and its pool if any."""

    @property
    def name(self) -> str:
        """The instance that it is."""

    @property
    def config(self) -> ModelConfig:
        """Its configuration."""

    @property
    def context(self) -> int | None:
        """How many tokens a row may have; None where it sets no limit."""

    @property
    def state(self) -> str:
        """`ready`; `empty`, awake and to be filled; `offloaded` or `discarded`, asleep."""

    def shards(self) -> Mapping[str, Shard]:
        """Where a reshard writes: views of the live storage, by Hugging Face names."""

    def trained_names(self) -> frozenset[str]:
        """The names of the weights that training changes, which are what a reshard brings."""

    def loaded(self, version: int) -> None:
        """Take note that every shard was written, with the weights of `version`."""

    def check(self) -> Mapping[str, tuple[int | str, int | str]]:
        """The weights that differ from their shards, by name: (shard's, engine's)."""

    def require_ready(self) -> None:
        """Raise unless the weights are awake and whole."""

    def sleep(self, mode: SleepMode) -> None:
        """Free the memory of the weights; `offload` keeps a copy for `wake`."""

    def wake(self) -> None:
        """Take the memory again; discarded weights are then to be written."""

    def sleep_pool(self) -> None:
        """Free the memory of keys and values."""

    def wake_pool(self) -> None:
        """Take that memory again."""

    def close(self) -> object:
        """End what runs beside this process."""


class Resident:
    """What a model has no more of whose weights alone lie here: a pool, a process beside it."""

    def sleep_pool(self) -> None:
        """There is none."""

    def wake_pool(self) -> None:
        """There is none."""

    def close(self) -> None:
        """Nothing runs beside this process."""

    def check(self) -> dict[str, tuple[str, str]]:
        """Nothing: the shards are the weights."""
        return {}


@runtime_checkable
class Measured(Protocol):
    """A model that tells figures of its engine."""

    def measured(self) -> Mapping[str, float]:
        """`residual_bytes` of `ranks_here`, `pool_tokens`, `start_seconds`; those that it has."""


@runtime_checkable
class HoldsDraft(Protocol):
    """A model in an engine that a drafter may lie in."""

    @property
    def draft(self) -> LoadedModel | None:
        """The drafter's weights."""


class RolloutEngine(Protocol):
    """An engine that generates."""

    def generate(
        self,
        prompts: Tensor,
        sampling: Sampling,
        key: SampleKey,
        sample_ids: Tensor,
        reach: Reach,
        *,
        pictures: Pictures | None = None,
    ) -> Generation:
        """Draw `sampling.n` responses to each prompt, rows prompt-major; of them what is asked.

        Tokens of the prompts may stand for `pictures`.
        """

    def stats(self) -> Mapping[str, float]:
        """Counters since the engine was made: prompt tokens, new tokens, decode passes."""


@runtime_checkable
class ContinuousEngine(RolloutEngine, Protocol):
    """An engine that rows may enter while others go on."""

    def advance(self, rows: InFlight, sampling: Sampling, key: SampleKey) -> Advanced:
        """Go on with rows, and begin others, until enough groups are complete.

        What rows have seen is read with the weights as they are; of the key the draw is each row's
        own. `sampling.n` is of no effect: every row is one sample.
        """


class OptimizerSpec(Protocol):
    """What an optimizer is built from: AdamW or Muon, with a schedule of the learning rate."""

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
    def moments(self) -> str:
        """`int8`, `bfloat16`, or `float32` for as wide as what is updated, at least so wide."""

    @property
    def momentum(self) -> float | None:
        """Decay of the one moment that Muon keeps of matrices; None for AdamW everywhere."""

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


class RouterSpec(Protocol):
    """How routers of a mixture of experts are trained beside an update's loss."""

    @property
    def balance_coef(self) -> float:
        """Of the load-balancing loss."""

    @property
    def balance_over(self) -> str:
        """Of what that is the loss: each `layer`, or all layers of a `model` as one."""

    @property
    def z_coef(self) -> float:
        """Of the router z-loss."""

    @property
    def bias_rate(self) -> float:
        """What a step adds to an expert's bias, or takes from it."""


class Optimizer(Protocol):
    """The state of an optimizer; `asleep` while it is on the host."""

    steps: int

    @property
    def spec(self) -> OptimizerSpec:
        """What it was built from."""

    @property
    def asleep(self) -> bool:
        """Whether its state is on the host."""

    @property
    def rests(self) -> bool:
        """Whether its state lies on the host, where nothing changes it until it is woken."""

    def shards(self) -> dict[str, Shard]:
        """Its state by name, awake: moments, and `master.` copies of lower weights."""

    def saved_moments(self) -> dict[str, Shard]:
        """The moments where they are, on the device or asleep on the host; not to be written."""

    def saved_masters(self) -> dict[str, Shard]:
        """The same of float32 copies that it keeps of lower weights, by the weights' names."""

    def fitted(self, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """Moments on disk, by the names of `saved_moments()`, as this layout keeps them."""

    def round_masters(self) -> None:
        """Make lower weights those that their float32 copies say."""


class Trainer(Protocol):
    """An engine that scores tokens, and makes updates where it has an optimizer.

    Micro-batches have `micro_tokens` tokens at most, None for no bound: `planned_tokens`, or fewer
    once there was no memory for them. Sums over other cuts are others in their last bits.
    """

    micro_tokens: int | None
    planned_tokens: int | None

    @property
    def optimizer(self) -> Optimizer | None:
        """None for a model that is not trained."""

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
        loss_fn: LossFunction,
        *,
        outputs: Collection[str],
        temperature: float,
        max_grad_norm: float | None,
    ) -> StepResult:
        """Make one optimizer step, or none at all if a number is not finite."""

    def accumulate(
        self,
        batch: Batch,
        loss_fn: LossFunction,
        *,
        outputs: Collection[str],
        temperature: float,
        goes_on: bool = False,
    ) -> dict[str, float]:
        """Add the gradients of some rows to those of their step, which begins unless it goes on."""

    def finish(
        self, metrics: dict[str, float], max_grad_norm: float | None, scale: float = 1.0
    ) -> StepResult:
        """Make the optimizer step with `scale` times the gradients of all its rows."""

    def saved_weights(self) -> dict[str, Shard]:
        """What a checkpoint holds of the weights, where it is; not to be written.

        Of lower weights that are trained on float32 copies those copies alone.
        """

    def adapters_off(self) -> AbstractContextManager[None]:
        """Score as the model that adapters were added to, within the block."""

    def optimizer_meta(self) -> dict[str, int]:
        """What belongs to the optimizer's state and is no tensor; plain JSON."""

    def release_gradients(self) -> None:
        """Give back the memory of the gradients; the next step takes it again."""

    def sleep_optimizer(self) -> None:
        """Move the optimizer's state to the host and free gradients that no rows add to."""

    def wake_optimizer(self) -> None:
        """Bring the optimizer's state back."""
