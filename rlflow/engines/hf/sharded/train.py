"""Training over the ranks of a mesh: every rank gives its own rows, and gets the sum's gradients.

Ranks that share parameters must make equally many passes, so those with fewer micro-batches,
or no rows, pass a single token whose gradient is zero. This file knows no algorithm.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from rlflow.batch import Batch, lengths
from rlflow.contract.progress import advance
from rlflow.contract.values import LossFunction, StepResult, Temperature
from rlflow.engines.hf.microbatches import add_metrics, numbers_of, one_token
from rlflow.engines.hf.optim.kinds import Kinds
from rlflow.engines.hf.sharded.grouped import ShardedInt8AdamW, ShardedMuon
from rlflow.engines.hf.sharded.mesh import ROWS
from rlflow.engines.hf.sharded.model import ShardedModel
from rlflow.engines.hf.sharded.optim import ShardedAdamW
from rlflow.engines.hf.train import EXPERTS, TrainEngine

SHARDED: Kinds = {"adamw": ShardedAdamW, "int8": ShardedInt8AdamW, "muon": ShardedMuon}


class ShardedTrainEngine(TrainEngine):
    """Computes with the ranks that hold `model`; the results are those of one rank with all rows.

    Every rank of the mesh calls `forward` and `step` with the rows of its row part; ranks of
    one part give the same rows. Gradients are summed over `fsdp` in every micro-batch of a step, or
    are whole until it `reduces_last`.
    """

    model: ShardedModel
    steps_with = SHARDED
    reduces_last = False

    def passes(self, own: int) -> int:
        """As many as the rank makes that has most."""
        return self.model.ranks.most(own)

    def step(
        self,
        batch: Batch,
        loss_fn: LossFunction,
        *,
        outputs: Collection[str],
        temperature: float,
        max_grad_norm: float | None,
    ) -> StepResult:
        """See `TrainEngine.step`; `loss_fn` is called with micro-batches of this rank's own rows.

        Metrics, the gradient's norm and whether the step was applied are of all ranks' rows, and
        equal on every rank.
        """
        optimizer = self.require_optimizer()
        assert isinstance(optimizer, ShardedAdamW)
        self.routers.begin(batch, self.count_routing)
        optimizer.zero_grad()
        parts = [part for part in self.micro_batches(batch) if len(part[1])]
        micros = self.packing.over(parts)
        passes = max(1, self.passes(len(parts)))
        total: dict[str, Tensor] = {}
        for number in range(passes):
            self.model.reduce_gradients(number + 1 == passes, once=self.reduces_last)
            if number < len(parts):
                _, micro = next(micros)
                add_metrics(total, self.backward(micro, loss_fn, outputs, temperature))
            else:
                with self.routers.filling():
                    self.backward(one_token(batch), None, outputs, temperature)
            advance(1, "micro-batches")
        optimizer.add_parts()
        return self.finish(self.metrics(total), max_grad_norm)

    def backward(
        self,
        micro: Batch,
        loss_fn: LossFunction | None,
        outputs: Collection[str],
        temperature: float,
    ) -> dict[str, Tensor]:
        """Add a micro-batch's gradients, of zero where nothing depends on it; its metrics."""
        with torch.enable_grad():
            found = self.compute(micro, outputs, temperature)
            metrics: dict[str, Tensor] = {}
            if loss_fn is not None:
                loss, metrics = loss_fn(found, micro)
                metrics = {"loss": loss, **metrics}
            if loss_fn is not None and loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                values = tuple(each for each in found.values() if each.requires_grad)
                torch.autograd.backward(values, tuple(torch.zeros_like(v) for v in values))
        return metrics

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

    def total_of_rows(self, values: Tensor) -> Tensor:
        """A tensor added up over the ranks that have other rows, or tokens."""
        ranks = self.model.ranks
        return ranks.total(values.to(ranks.device), (*ROWS, "cp")).to(values.device)

    def metrics(self, own: dict[str, Tensor]) -> dict[str, float]:
        """The metrics of all rows, of those of every part's rows."""
        parts = self.model.ranks.gather(numbers_of(own))
        total: dict[str, Any] = {}
        for part in parts:
            add_metrics(total, {n: torch.tensor(v, dtype=torch.float64) for n, v in part.items()})
        return {name: float(value) for name, value in total.items()}
