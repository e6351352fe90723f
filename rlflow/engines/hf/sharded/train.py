"""Training over the ranks of a mesh: every rank gives its own rows, and gets the sum's gradients.

Ranks that share parameters must make equally many passes, so those with fewer micro-batches,
or no rows, pass a single token whose gradient is zero. This file knows no algorithm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlflow.batch import Batch, lengths
from rlflow.contract.progress import advance
from rlflow.contract.values import LossFunction, Temperature
from rlflow.engines.hf.forward.ahead import Part
from rlflow.engines.hf.microbatches import (
    EXPERTS,
    WantedOutputs,
    add_metrics,
    numbers_of,
    one_token,
)
from rlflow.engines.hf.optim.kinds import Kinds
from rlflow.engines.hf.sharded.grouped import ShardedInt8AdamW, ShardedMuon
from rlflow.engines.hf.sharded.mesh import ROWS
from rlflow.engines.hf.sharded.model import ShardedModel
from rlflow.engines.hf.sharded.optim import ShardedAdamW
from rlflow.engines.hf.train import TrainEngine

SHARDED: Kinds = {"adamw": ShardedAdamW, "int8": ShardedInt8AdamW, "muon": ShardedMuon}


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A micro-batch's forward: where its backward begins, and its metrics.

    That is a loss where it `learns`, and all its outputs where nothing depends on them.
    """

    ends: tuple[Tensor, ...]
    metrics: dict[str, Tensor] = field(default_factory=dict)
    learns: bool = False

    def backward(self) -> None:
        """Add its gradients, of zero where nothing depends on it."""
        ends = tuple(each for each in self.ends if each.requires_grad)
        torch.autograd.backward(
            ends, tuple((torch.ones_like if self.learns else torch.zeros_like)(e) for e in ends)
        )


class ShardedTrainEngine(TrainEngine):
    """Computes with the ranks that hold `model`; the results are those of one rank with all rows.

    Every rank of the mesh calls `forward` and `step` with the rows of its row part; ranks of
    one part give the same rows. Gradients are summed over `fsdp` in every micro-batch of a step, or
    are whole until it `reduces_last`.
    """

    model: ShardedModel
    steps_with = SHARDED
    alone = False
    reduces_last = False

    def passes(self, own: int) -> int:
        """As many as the rank makes that has most."""
        return self.model.ranks.most(own)

    def sum_gradients(
        self, batch: Batch, loss_fn: LossFunction, outputs: Collection[str], temperature: float
    ) -> dict[str, float]:
        """See `TrainEngine.sum_gradients`; `loss_fn` gets micro-batches of this rank's own rows.

        Metrics, the gradient's norm and whether the step was applied are of all ranks' rows, and
        equal on every rank.
        """
        parts = [part for part in self.micro_batches(batch) if len(part[1])]
        passes = max(1, self.passes(len(parts)))
        micros = self.filled_up(self.packing.over(parts), batch, passes)
        asked = WantedOutputs(tuple(outputs), temperature)
        return self.metrics(self.pass_all(micros, passes, loss_fn, asked))

    def join_gradients(self) -> None:
        """See `TrainEngine.join_gradients`: those of weights that ranks of `tp` hold alike."""
        optimizer = self.require_optimizer()
        assert isinstance(optimizer, ShardedAdamW)
        optimizer.add_parts()

    def filled_up(
        self, own: Iterator[Part], batch: Batch, passes: int
    ) -> Iterator[tuple[Batch, bool]]:
        """So many micro-batches, and whether they are this rank's own: after those single tokens.

        What is done with one is done before the next is asked for.
        """
        made = 0
        for _, micro in own:
            yield micro, True
            made += 1
        for _ in range(made, passes):
            yield one_token(batch), False

    def pass_all(
        self,
        micros: Iterator[tuple[Batch, bool]],
        passes: int,
        loss_fn: LossFunction,
        asked: WantedOutputs,
    ) -> dict[str, Tensor]:
        """Add up the gradients of so many micro-batches; the metrics of this rank's own."""
        total: dict[str, Tensor] = {}
        for number, (micro, own) in enumerate(micros):
            self.model.reduce_gradients(number + 1 == passes, once=self.reduces_last)
            found = self.forwarded(micro, loss_fn if own else None, asked)
            found.backward()
            add_metrics(total, found.metrics)
            advance(1, "micro-batches")
        return total

    def forwarded(
        self, micro: Batch, loss_fn: LossFunction | None, asked: WantedOutputs
    ) -> Forwarded:
        """A micro-batch's forward and its metrics, without a `loss_fn` of nobody's rows."""
        with torch.enable_grad(), self.routers.filling(loss_fn is None):
            found = self.compute(micro, asked.outputs, asked.temperature)
            if loss_fn is None:
                return Forwarded(tuple(found.values()))
            loss, metrics = loss_fn(found, micro)
        ends = (loss,) if loss.requires_grad else tuple(found.values())
        return Forwarded(ends, {"loss": loss, **metrics}, learns=loss.requires_grad)

    def compute(
        self, batch: Batch, outputs: Collection[str], temperature: Temperature, top_k: int = 0
    ) -> dict[str, Tensor]:
        """One forward pass, also where there is no response token."""
        if int(lengths(batch["response_tokens"]).sum()):
            return super().compute(batch, outputs, temperature, top_k)
        plain = tuple(name for name in outputs if name not in EXPERTS)
        found = self.fill(batch, plain, temperature, top_k)
        none = self.routers.unread(batch) if len(plain) < len(outputs) else {}
        return none | {name: values[:0] for name, values in found.items()}

    @property
    def alike(self) -> int:  # type: ignore[override]
        """How many ranks have the same rows, and other tokens or layers."""
        return self.model.ranks.sizes["cp"] * self.model.ranks.sizes["pp"]

    def total_of_rows(self, values: Tensor) -> Tensor:
        """A tensor added up over the ranks that have other rows, tokens or layers."""
        ranks = self.model.ranks
        return ranks.total(values.to(ranks.device), (*ROWS, "cp", "pp")).to(values.device)

    def metrics(self, own: dict[str, Tensor]) -> dict[str, float]:
        """The metrics of all rows, of those of every part's rows."""
        parts = self.model.ranks.gather(numbers_of(own), (*ROWS, "pp"))
        total: dict[str, Any] = {}
        for part in parts:
            add_metrics(total, {n: torch.tensor(v, dtype=torch.float64) for n, v in part.items()})
        return {name: float(value) for name, value in total.items()}
