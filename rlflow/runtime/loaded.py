"""A model instance in this process, as actions and bodies use it.

Knows engines and one instance; neither the plan's order nor other instances.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlflow.engines.average import move
from rlflow.engines.optim import learning_rate
from rlflow.engines.protocol import (
    Generation,
    Reach,
    SampleKey,
    Sampling,
    Shard,
    StepResult,
    Temperature,
)
from rlflow.engines.speculative import Draft
from rlflow.ops.body import Stat
from rlflow.scheduler.engines import ASLEEP, POOLED, STARTED
from rlflow.scheduler.plan import Instance, PartKind

if TYPE_CHECKING:
    from torch import Tensor

    from rlflow.batch import Batch
    from rlflow.ops.body import LossFunction, ModelInUse

# Counters of an engine that tell how well a drafter does.
DRAFTS = ("drafted", "accepted")


@dataclass(slots=True)
class Loaded:
    """A model instance in this process; `version` is None while its weights are discarded."""

    instance: Instance
    model: Any
    train: Any
    rollout: Any
    tokenizer: Any
    stop_tokens: tuple[int, ...]
    version: int | None = 0

    def trained_shards(self) -> dict[str, Shard]:
        """The pieces of the parameters that training changes."""
        names = self.model.trained_names()
        return {name: shard for name, shard in self.model.shards().items() if name in names}

    def components(self) -> dict[str, dict[str, Shard]]:
        """What a checkpoint holds of it, by component; read it inside `awake`.

        An average has no optimizer state.
        """
        found = {self.instance.model: self.trained_shards()}
        if self.train.optimizer is not None:
            found[f"{self.instance.model}.optimizer"] = self.train.optimizer.shards()
        return found

    def snapshot(self) -> dict[str, Mapping[str, Tensor]]:
        """Weights and optimizer state by component; copies where they sleep on the host."""
        asleep = self._asleep()
        with self.awake():
            found = {
                name: {key: shard.tensor for key, shard in shards.items()}
                for name, shards in self.components().items()
            }
            if not asleep:
                return dict(found)
            return {
                name: {key: tensor.clone() for key, tensor in part.items()}
                for name, part in found.items()
            }

    def restored(self, meta: Mapping[str, int], version: int) -> None:
        """Take note that the shards hold a checkpoint: its counters, and the version it is."""
        if self.train.optimizer is not None:
            self.train.optimizer.steps = meta["steps"]
        self.model.loaded(version)
        self.version = version

    def sleep(self, kind: PartKind, mode: str) -> None:
        """Put a part to sleep; discarded weights are of no version."""
        if kind == "gradients":
            self.train.release_gradients()
        elif kind == "optimizer":
            self.train.sleep_optimizer()
        elif kind == "pool":
            self.model.sleep_pool()
        else:
            self.model.sleep("discard" if mode == "discard" else "offload")
            if mode == "discard":
                self.version = None

    def wake(self, kind: PartKind) -> None:
        """Bring a part back; gradients take their memory when the next step makes them."""
        if kind == "optimizer":
            self.train.wake_optimizer()
        elif kind == "pool":
            self.model.wake_pool()
        elif kind == "weights":
            self.model.wake()

    def figures(self) -> dict[str, Stat]:
        """Numbers about an engine, to log with what it generates, of each of its devices.

        Bytes that its ranks on this host kept asleep, on a CPU of the host's memory; tokens of
        a replica's pool; seconds that its last start took.
        """
        tell = getattr(self.model, "measured", None)
        if self.instance.options is None or tell is None:
            return {}
        told = tell()
        found: dict[str, Stat] = {}
        if "residual_bytes" in told:
            ranks = told.get("ranks_here", self.instance.tp)
            found[ASLEEP] = Stat(kind="max", total=told["residual_bytes"] / ranks)
        if "pool_tokens" in told:
            found[POOLED] = Stat(kind="min", total=told["pool_tokens"])
        if "start_seconds" in told:
            found[STARTED] = Stat(kind="max", total=told["start_seconds"])
        return found

    def close(self) -> None:
        """End what runs beside this process for it."""
        if self.instance.options is not None:
            self.model.close()

    def _asleep(self) -> list[str]:
        optimizer = self.train.optimizer
        parts = ["weights"] if self.model.state == "offloaded" else []
        return parts + (["optimizer"] if optimizer is not None and optimizer.asleep else [])

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Everything awake inside the block, and asleep again after it if it was."""
        parts = self._asleep()
        self.model.wake()
        self.train.wake_optimizer()
        try:
            yield
        finally:
            if "optimizer" in parts:
                self.train.sleep_optimizer()
            if "weights" in parts:
                self.model.sleep("offload")


class NoTraining:
    """In the place of a train engine where there is none: an engine that only generates."""

    optimizer = None


class InUse:
    """A loaded instance as one call of a body sees it: random numbers are tied to that call.

    Not `adapted`, it scores tokens as the model that its adapters were added to. Of what it
    generates it brings one `piece`: its number, and of how many. A `drafter` proposes tokens to it.
    """

    def __init__(
        self,
        loaded: Loaded,
        key: SampleKey,
        *,
        adapted: bool = True,
        piece: tuple[int, int] = (0, 1),
        drafter: Loaded | None = None,
    ) -> None:
        self._piece = piece
        self._drafter = drafter
        self._loaded = loaded
        self._key = key
        self._adapted = adapted
        self.tokenizer = loaded.tokenizer
        self.context = loaded.model.context

    @property
    def version(self) -> int:
        """How many updates have made the weights that are here."""
        if self._loaded.version is None:
            raise AssertionError(f"the weights of {self._loaded.instance.name} are discarded")
        return self._loaded.version

    @property
    def base(self) -> InUse:
        """The same with the adapters off; scoring raises RunError where there are none."""
        return InUse(self._loaded, self._key, adapted=False)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next optimizer step; 0 for a frozen model."""
        optimizer = self._loaded.train.optimizer
        return 0.0 if optimizer is None else learning_rate(optimizer.spec, optimizer.steps)

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
    ) -> Generation:
        """Draw n responses to every prompt; of these the call's piece, by who ends first."""
        index, count = self._piece
        reach = Reach(first=first, until=until, piece=index, pieces=count)
        sampling = Sampling(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            n=n,
            stop_tokens=() if ignore_eos else self._loaded.stop_tokens,
        )
        options: dict[str, Any] = {}
        if self._drafter is not None:
            options = {"draft": Draft(model=self._drafter.model, tokens=draft_tokens)}
        engine = self._loaded.rollout
        before = engine.stats()
        made: Generation = engine.generate(
            prompts, sampling, self._key, sample_ids, reach, **options
        )
        drafts = {k: v - before[k] for k, v in engine.stats().items() if k in DRAFTS}
        return replace(made, **drafts)

    def forward(
        self,
        batch: Batch,
        *,
        outputs: Collection[str],
        temperature: Temperature,
        top_k: int = 0,
    ) -> dict[str, Tensor]:
        """Score response tokens without gradient."""
        with nullcontext() if self._adapted else self._loaded.model.adapters_off():
            made: dict[str, Tensor] = self._loaded.train.forward(
                batch, outputs=outputs, temperature=temperature, top_k=top_k
            )
        return made

    def step(
        self,
        batch: Batch,
        loss: LossFunction,
        *,
        outputs: Collection[str],
        temperature: float,
        max_grad_norm: float | None,
    ) -> StepResult:
        """Make one optimizer step."""
        made: StepResult = self._loaded.train.step(
            batch, loss, outputs=outputs, temperature=temperature, max_grad_norm=max_grad_norm
        )
        return made

    def average(self, source: ModelInUse, decay: float) -> None:
        """Move what training changes towards the source's weights, which lie as these do."""
        assert isinstance(source, InUse)
        self._loaded.model.require_ready()
        source._loaded.model.require_ready()
        move(self._loaded.trained_shards(), source._loaded.trained_shards(), decay)
