"""A worker: the model instances of one process, and the verbs that a plan has for them.

It runs bodies, reshards, and puts parts to sleep and wakes them; it refuses what the
state of an instance forbids. It knows no order and no other worker.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlflow.batch import make_batch
from rlflow.engines.loading import load_model, load_tokenizer
from rlflow.engines.models import TorchModel
from rlflow.engines.optim import learning_rate
from rlflow.engines.protocol import Generation, SampleKey, Sampling, StepResult
from rlflow.engines.rng import permutation
from rlflow.engines.rollout import TorchRollout
from rlflow.engines.train import TrainEngine
from rlflow.errors import Finding, RunError, UsageError
from rlflow.graph.graph import Graph, Node
from rlflow.ops.body import Call, Output
from rlflow.runtime.store import ShardStore
from rlflow.scheduler.plan import Action, Instance, Plan
from rlflow.scheduler.shapes import model_directory

if TYPE_CHECKING:
    from torch import Tensor

    from rlflow.batch import Batch
    from rlflow.ops.body import LossFunction

MICRO_TOKENS = 32768


@dataclass(slots=True)
class Loaded:
    """A model instance in this process; `version` is None while its weights are discarded."""

    instance: Instance
    model: TorchModel
    train: TrainEngine
    rollout: TorchRollout
    tokenizer: Any
    stop_tokens: tuple[int, ...]
    version: int | None = 0

    def snapshot(self) -> dict[str, Mapping[str, Tensor]]:
        """Weights and optimizer state by component; copies where they sleep on the host."""
        asleep = self._asleep()
        with self._awake():
            found = {
                self.instance.model: self.model.named_tensors(),
                f"{self.instance.model}.optimizer": self.train.optimizer_tensors(),
            }
            if not asleep:
                return dict(found)
            return {
                name: {key: tensor.clone() for key, tensor in part.items()}
                for name, part in found.items()
            }

    def restore(
        self,
        weights: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        meta: Mapping[str, int],
        version: int,
    ) -> None:
        """Take weights and optimizer state of a checkpoint, and the version they are."""
        with self._awake():
            self.model.load_tensors(weights, version)
            self.train.load_optimizer(optimizer, meta)
        self.version = version

    def _asleep(self) -> list[str]:
        optimizer = self.train.optimizer
        parts = ["weights"] if self.model.state == "offloaded" else []
        return parts + (["optimizer"] if optimizer is not None and optimizer.asleep else [])

    @contextmanager
    def _awake(self) -> Iterator[None]:
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


class InUse:
    """A loaded instance as one call of a body sees it: random numbers are tied to that call."""

    def __init__(self, loaded: Loaded, key: SampleKey) -> None:
        self._loaded = loaded
        self._key = key
        self.tokenizer = loaded.tokenizer
        self.context = loaded.model.context

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
    ) -> Generation:
        """Draw n responses to every prompt."""
        sampling = Sampling(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            n=n,
            stop_tokens=() if ignore_eos else self._loaded.stop_tokens,
        )
        return self._loaded.rollout.generate(prompts, sampling, self._key, sample_ids)

    def forward(
        self, batch: Batch, *, outputs: Collection[str], temperature: float
    ) -> dict[str, Tensor]:
        """Score response tokens without gradient."""
        return self._loaded.train.forward(batch, outputs=outputs, temperature=temperature)

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
        return self._loaded.train.step(
            batch, loss, outputs=outputs, temperature=temperature, max_grad_norm=max_grad_norm
        )


class Worker:
    """Loads the instances of a plan and runs its actions, one call an action instance."""

    def __init__(self, plan: Plan, seed: int, near: Path | None = None) -> None:
        self.plan = plan
        self.graph: Graph = plan.graph
        self.seed = seed
        self.near = near
        self.store = ShardStore(plan.graph)
        self.loaded = {instance.name: self._load(instance) for instance in plan.instances}
        self._wanted = {node.name: _fields_read(plan.graph, node) for node in plan.graph.nodes}
        self._tokenizer = functools.cache(self._load_tokenizer)
        for part in plan.parts:
            if part.name not in plan.awake_at_start:
                self._sleep(part.name, "offload")

    def trained(self) -> list[Loaded]:
        """The instances that the plan trains, in the plan's order."""
        return [loaded for loaded in self.loaded.values() if loaded.instance.trained]

    def run(self, action: Action, iteration: int) -> Mapping[str, float]:
        """Carry out one action instance; returns the numbers it logs.

        Raises what the body raises, and RunError for what the state forbids.
        """
        if action.kind == "run":
            return self._run(action, iteration)
        if action.kind == "reshard":
            self._reshard(action, iteration)
        elif action.kind == "sleep" and action.part and action.mode:
            self._sleep(action.part, action.mode)
        elif action.kind == "wake" and action.part:
            self._wake(action.part)
        return {}

    def _run(self, action: Action, iteration: int) -> Mapping[str, float]:
        node = self.graph.node(str(action.node))
        loaded = self.loaded[action.instance] if action.instance else None
        if loaded is not None:
            self._require_version(action, iteration, loaded)
        output: Output = _body(node.op.body)(self._call(node, iteration, loaded))
        for name, lag in action.writes:
            self.loaded[name].version = iteration - lag
        self.store.put(node.name, iteration, dict(output.fields))
        for source in node.sources:
            self.store.release(source, iteration)
        return output.metrics

    def _call(self, node: Node, iteration: int, loaded: Loaded | None) -> Call:
        key = SampleKey(seed=self.seed, iteration=iteration, stream=node.name)
        return Call(
            node=node.name,
            op=node.op,
            iteration=iteration,
            seed=self.seed,
            params=dict(node.params),
            wanted=self._wanted[node.name],
            permutation=functools.partial(_permutation, self.seed, iteration, node.name),
            tokenizer=self._tokenizer,
            inputs=self._inputs(node, iteration),
            model=None if loaded is None else InUse(loaded, key),
            where=node.where,
        )

    def _inputs(self, node: Node, iteration: int) -> Batch | None:
        """The fields the node reads, under the names it reads them by."""
        if not node.inputs:
            return None
        fields = {
            bound.name: self.store.get(bound.source, iteration)[bound.field.name]
            for bound in node.inputs
        }
        rows = next((len(value) for value in fields.values() if value.dim()), 0)
        return make_batch(fields, rows)

    def _require_version(self, action: Action, iteration: int, loaded: Loaded) -> None:
        for _, lag in action.reads:
            updated = self.plan.trained_instance(loaded.instance.model) is not None
            declared = max(iteration - lag, 0) if updated else 0
            if loaded.version != declared:
                raise RunError(
                    Finding(
                        code="E752",
                        what=f"{action.id} declared version {declared} of "
                        f"{loaded.instance.name}, which holds {loaded.version}",
                        expected="the plan brings the weights before they are read",
                    )
                )

    def _reshard(self, action: Action, iteration: int) -> None:
        source, target = self.loaded[str(action.instance)], self.loaded[str(action.target)]
        self._require_version(action, iteration, source)
        target.rollout.update_weights(source.model.named_tensors(), iteration)
        target.version = iteration

    def _sleep(self, part: str, mode: str) -> None:
        loaded = self.loaded[self.plan.part(part).instance]
        if self.plan.part(part).kind == "optimizer":
            loaded.train.sleep_optimizer()
            return
        loaded.model.sleep("discard" if mode == "discard" else "offload")
        if mode == "discard":
            loaded.version = None

    def _wake(self, part: str) -> None:
        loaded = self.loaded[self.plan.part(part).instance]
        if self.plan.part(part).kind == "optimizer":
            loaded.train.wake_optimizer()
        else:
            loaded.model.wake()

    def _path(self, path: str) -> str:
        directory = model_directory(path, self.near)
        return path if directory is None else str(directory)

    def _load_tokenizer(self, path: str) -> Any:
        return load_tokenizer(self._path(path))

    def _load(self, instance: Instance) -> Loaded:
        spec = self.graph.model(instance.model)
        path = self._path(spec.path)
        model = load_model(
            path,
            dtype=getattr(torch, spec.dtype),
            device="cpu",
            head=spec.head,
            seed=self.seed,
            init="random" if spec.init == "random" else "weights",
        )
        model.name = instance.name
        tokenizer = load_tokenizer(path)
        return Loaded(
            instance=instance,
            model=model,
            train=TrainEngine(
                model, spec.optimizer if instance.trained else None, micro_tokens=MICRO_TOKENS
            ),
            rollout=TorchRollout(model),
            tokenizer=tokenizer,
            stop_tokens=_stop_tokens(model, tokenizer),
        )


def _stop_tokens(model: TorchModel, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a response: the tokenizer's EOS and those of the model's config.

    Raises UsageError where the model cannot make the tokenizer's EOS.
    """
    named = model.config.get_text_config().eos_token_id
    listed = named if isinstance(named, list) else [] if named is None else [named]
    known = model.config.get_text_config().vocab_size
    if tokenizer.eos_token_id >= known:
        raise UsageError(
            Finding(
                code="E502",
                what=f"the EOS token of {model.name}'s tokenizer, {tokenizer.eos_token!r}, is "
                "unknown to the model, so no response can end",
                got=f"token {tokenizer.eos_token_id}",
                expected=f"a token below {known}, the size of the model's vocabulary",
                fix='"eos_token" in tokenizer_config.json',
            )
        )
    return tuple(sorted({tokenizer.eos_token_id, *listed}))


def _permutation(seed: int, iteration: int, node: str, n: int, *salt: int | str) -> Any:
    return permutation(n, seed, iteration, node, *salt)


@functools.cache
def _body(name: str) -> Any:
    """The body behind a dotted name: the one door from the runtime to the ops' bodies."""
    return pkgutil.resolve_name(name)


def _fields_read(graph: Graph, node: Node) -> frozenset[str]:
    """The outputs of a node that some other node reads."""
    return frozenset(
        bound.field.name
        for other in graph.nodes
        for bound in other.inputs
        if bound.source == node.name
    )
