"""A model instance in this process, as actions and bodies use it.

Knows engines and one instance; neither the plan's order nor other instances.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlflow.contract.engines import (
    ContinuousEngine,
    LoadedModel,
    Measured,
    Optimizer,
    RolloutEngine,
    Trainer,
)
from rlflow.contract.pictures import PictureReader, Pictures
from rlflow.contract.tokenizers import Tokenizer
from rlflow.contract.values import (
    Advanced,
    Generation,
    InFlight,
    LossFunction,
    Reach,
    SampleKey,
    Sampling,
    Shard,
    Stat,
    StepResult,
    Temperature,
)
from rlflow.engines.hf.average import move
from rlflow.engines.hf.generate.speculative import Draft
from rlflow.engines.hf.models import TorchModel
from rlflow.engines.hf.optim.rates import learning_rate
from rlflow.engines.hf.pictures.reader import picture_reader
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.engines.tf32 import changes_products, tf32_products
from rlflow.graph.op import Use
from rlflow.scheduler.plan.instance import ASLEEP, POOLED, STARTED
from rlflow.scheduler.plan.plan import Chunk, Instance, PartKind

if TYPE_CHECKING:
    from torch import Tensor

    from rlflow.batch import Batch
    from rlflow.ops.body import ModelInUse

# Counters of an engine that tell how well a drafter does.
DRAFTS = ("drafted", "accepted")


@dataclass(slots=True)
class Loaded:
    """A model instance in this process; `version` is None while its weights are discarded.

    `train` is None for an engine that only generates, and both engines for weights that lie in
    another instance's. `path` is where its files are.
    """

    instance: Instance
    model: LoadedModel
    train: Trainer | None
    rollout: RolloutEngine | None
    tokenizer: Tokenizer
    stop_tokens: tuple[int, ...]
    version: int | None = 0
    path: str = ""

    @property
    def pictures(self) -> PictureReader:
        """What reads pictures for it, made when it is first asked for."""
        return picture_reader(self.path)

    @property
    def optimizer(self) -> Optimizer | None:
        """Its optimizer; None where it is not trained."""
        return None if self.train is None else self.train.optimizer

    @property
    def trainer(self) -> Trainer:
        """What scores and trains here; an instance that only generates has none."""
        assert self.train is not None, f"{self.instance.name} only generates"
        return self.train

    def trained_shards(self) -> dict[str, Shard]:
        """The pieces of the parameters that training changes."""
        names = self.model.trained_names()
        return {name: shard for name, shard in self.model.shards().items() if name in names}

    def saved(self) -> dict[str, dict[str, Shard]]:
        """What a checkpoint holds of it by component, where it is; not to be written.

        Nothing is woken for it. An average has no optimizer state.
        """
        found = {self.instance.model: self.trainer.saved_weights()}
        if self.optimizer is not None:
            found[f"{self.instance.model}.optimizer"] = self.optimizer.saved_moments()
        return found

    def resting(self) -> frozenset[tuple[str, str]]:
        """Of what is `saved`, by component and name, what lies on the host, asleep."""
        masters: Collection[str] = ()
        slept = self.optimizer is not None and self.optimizer.rests
        if self.optimizer is not None:
            masters = self.optimizer.saved_masters().keys()
        weights = self.model.state == "offloaded"
        return frozenset(
            (component, name)
            for component, shards in self.saved().items()
            for name in shards
            if (slept if name in masters or component != self.instance.model else weights)
        )

    def restored(self, meta: Mapping[str, int], version: int) -> None:
        """Take note that the shards hold a checkpoint: its counters, and the version it is."""
        if self.optimizer is not None:
            self.optimizer.steps = meta["steps"]
        self.model.loaded(version)
        self.version = version

    def sleep(self, kind: PartKind, mode: str) -> None:
        """Put a part to sleep; discarded weights are of no version."""
        if kind == "gradients":
            self.trainer.release_gradients()
        elif kind == "optimizer":
            self.trainer.sleep_optimizer()
        elif kind == "pool":
            self.model.sleep_pool()
        else:
            self.model.sleep("discard" if mode == "discard" else "offload")
            if mode == "discard":
                self.version = None

    def wake(self, kind: PartKind) -> None:
        """Bring a part back; gradients take their memory when the next step makes them."""
        if kind == "optimizer":
            self.trainer.wake_optimizer()
        elif kind == "pool":
            self.model.wake_pool()
        elif kind == "weights":
            self.model.wake()

    def figures(self) -> dict[str, Stat]:
        """Numbers about an engine, to log with what it generates, of each of its devices.

        Bytes that its ranks on this host kept asleep, on a CPU of the host's memory; tokens of
        a replica's pool; seconds that its last start took.
        """
        if not isinstance(self.model, Measured):
            return {}
        told = self.model.measured()
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
        self.model.close()

    def _asleep(self) -> list[str]:
        optimizer = self.optimizer
        parts = ["weights"] if self.model.state == "offloaded" else []
        return parts + (["optimizer"] if optimizer is not None and optimizer.asleep else [])

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Everything awake inside the block, and asleep again after it if it was."""
        parts = self._asleep()
        self.model.wake()
        self.trainer.wake_optimizer()
        try:
            yield
        finally:
            if "optimizer" in parts:
                self.trainer.sleep_optimizer()
            if "weights" in parts:
                self.model.sleep("offload")


class InUse:
    """A loaded instance as one call of a body sees it: random numbers are tied to that call.

    Not `adapted`, it scores tokens as the model that its adapters were added to. Of what it
    generates it brings one `piece`, or all. A `drafter` proposes tokens to it.
    """

    def __init__(
        self,
        loaded: Loaded,
        key: SampleKey,
        *,
        adapted: bool = True,
        piece: Chunk | None = None,
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
    def pictures(self) -> PictureReader:
        """What reads pictures for the model; raises UsageError where it sees none."""
        return self._loaded.pictures

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
        optimizer = self._loaded.optimizer
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
        draft_rows: int | None = None,
        routing: bool = False,
        pictures: Pictures | None = None,
    ) -> Generation:
        """Sample n responses to every prompt; returns this call's chunk in order of completion."""
        reach = Reach(first=first, until=until)
        if (chunk := self._piece) is not None:
            groups = chunk.by == "groups"
            reach = replace(reach, piece=chunk.index, pieces=chunk.count, groups=groups)
        sampling = Sampling(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            n=n,
            stop_tokens=() if ignore_eos else self._loaded.stop_tokens,
            routing=routing,
        )
        engine = self._loaded.rollout
        assert engine is not None, f"{self._loaded.instance.name} does not generate"
        before = engine.stats()
        asked = (prompts, sampling, self._key, sample_ids, reach)
        if pictures is not None:
            made = engine.generate(*asked, pictures=pictures)
        elif self._drafter is None:
            made = engine.generate(*asked)
        else:
            proposing = self._drafter.model
            assert isinstance(engine, TorchRollout)
            assert isinstance(proposing, TorchModel)
            draft = Draft(model=proposing, tokens=draft_tokens, rows=draft_rows)
            made = engine.generate(*asked, draft)
        after = engine.stats()
        spent = {name: after[name] - before[name] for name in DRAFTS if name in after}
        return replace(
            made,
            drafted=spent.get("drafted", made.drafted),
            accepted=spent.get("accepted", made.accepted),
        )

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
        sampling = Sampling(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop_tokens=() if ignore_eos else self._loaded.stop_tokens,
        )
        engine = self._loaded.rollout
        assert isinstance(engine, ContinuousEngine), f"{self._loaded.instance.name} drains"
        return engine.advance(rows, sampling, self._key)

    def forward(
        self,
        batch: Batch,
        *,
        outputs: Collection[str],
        temperature: Temperature,
        top_k: int = 0,
    ) -> dict[str, Tensor]:
        """Score response tokens without gradient."""
        train = self._loaded.trainer
        with nullcontext() if self._adapted else train.adapters_off():
            return train.forward(batch, outputs=outputs, temperature=temperature, top_k=top_k)

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
        return self._loaded.trainer.step(
            batch, loss, outputs=outputs, temperature=temperature, max_grad_norm=max_grad_norm
        )

    def accumulate(
        self,
        batch: Batch,
        loss: LossFunction,
        *,
        outputs: Collection[str],
        temperature: float,
        goes_on: bool,
    ) -> dict[str, float]:
        """Add the gradients of some rows of an optimizer step."""
        return self._loaded.trainer.accumulate(
            batch, loss, outputs=outputs, temperature=temperature, goes_on=goes_on
        )

    def finish(
        self, metrics: dict[str, float], max_grad_norm: float | None, scale: float
    ) -> StepResult:
        """Make the optimizer step whose gradients are there."""
        return self._loaded.trainer.finish(metrics, max_grad_norm, scale)

    def average(self, source: ModelInUse, decay: float) -> None:
        """Move what training changes towards the source's weights, which lie as these do."""
        assert isinstance(source, InUse)
        self._loaded.model.require_ready()
        source._loaded.model.require_ready()
        move(self._loaded.trained_shards(), source._loaded.trained_shards(), decay)


def products_of(loaded: Loaded | None, use: Use | None) -> AbstractContextManager[None]:
    """What a use of an instance computes within: TF32 where its placement says so and it counts."""
    if loaded is None or (use or "forward") not in loaded.instance.tf32:
        return nullcontext()
    model = loaded.model
    asked = isinstance(model, TorchModel) and changes_products(model.dtype, model.device)
    return tf32_products(on=asked)
