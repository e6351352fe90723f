"""Training over the stages of a pipeline: micro-batches one behind the other, there and back.

One forward, one backward (Narayanan et al., "Memory-efficient pipeline-parallel DNN training",
arXiv:2006.09503): a stage begins a backward as soon as it can, so that of `count` stages number
`place` has at most `count - place` passes under way. This file knows no algorithm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from rlflow.batch import Batch, lengths
from rlflow.contract.progress import advance
from rlflow.contract.values import LossFunction
from rlflow.engines.hf.forward.ahead import PackedRows
from rlflow.engines.hf.forward.attention import PackedAttention
from rlflow.engines.hf.microbatches import Asked, add_metrics, blank
from rlflow.engines.hf.sharded.model import local
from rlflow.engines.hf.sharded.optim import ShardedAdamW
from rlflow.engines.hf.sharded.train import Forwarded, ShardedTrainEngine
from rlflow.engines.hf.stages.stage import LayerStage
from rlflow.engines.hf.train import EXPERTS

Turn = Literal["forward", "backward"]


def turns(passes: int, place: int, count: int) -> Iterator[Turn]:
    """What a stage does with the next micro-batch in turn: forwards ahead, then one of each."""
    ahead = min(passes, count - place - 1)
    for begun in range(passes + ahead):
        if begun < passes:
            yield "forward"
        if begun >= ahead:
            yield "backward"


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A micro-batch between its forward and its backward here: what came, and where it ends."""

    entered: Tensor | None
    left: Tensor | None
    ends: Forwarded | None

    def backward(self, stage: LayerStage) -> None:
        """Add its gradients; take that of its end from the stage after, and give one back."""
        if self.ends is not None:
            self.ends.backward()
        else:
            assert self.left is not None
            gradient = stage.gradient(self.left)
            if self.left.requires_grad:
                torch.autograd.backward((self.left,), (gradient,))
        if self.entered is not None:
            stage.give_back(self.entered)


class StagedTrainEngine(ShardedTrainEngine):
    """Computes with the stages of `model`; results are those of one rank with all rows and layers.

    Ranks of all stages call `forward` and `step` with the rows of their row part. Losses and
    outputs are made by the last stage, and told to the others.
    """

    @property
    def stage(self) -> LayerStage:
        """The stage of this rank."""
        assert self.model.stage is not None
        return self.model.stage

    def told(self, found: dict[str, Tensor], batch: Batch, asked: Asked) -> dict[str, Tensor]:
        """See `TrainEngine.told`; of experts that tokens chose every stage has some layers."""
        self.stage.flush()
        experts = {name: self.stage.joined(found.pop(name)) for name in sorted(EXPERTS & {*found})}
        if not self.stage.last:
            plain = replace(asked, outputs=tuple(n for n in asked.outputs if n not in EXPERTS))
            wide = torch.promote_types(self.model.dtype, torch.float32)
            tokens = int(lengths(batch["response_tokens"]).sum())
            found = blank(batch, plain, tokens, dtype=wide)
        return self.stage.last_says(found) | experts

    def at_once(
        self, packed: PackedRows, attention: PackedAttention, asked: Asked
    ) -> dict[str, Tensor]:
        """See `TrainEngine.at_once`; no outputs where other layers follow."""
        if self.stage.last:
            return super().at_once(packed, attention, asked)
        layout = packed.layout
        self.model.logits(layout.tokens, layout.positions, attention, layout.targets[:1])
        return {}

    def forwarded(self, micro: Batch, loss_fn: LossFunction | None, asked: Asked) -> Forwarded:
        """See `ShardedTrainEngine.forwarded`; there is a loss on the last stage alone."""
        if self.stage.last:
            return super().forwarded(micro, loss_fn, asked)
        with torch.enable_grad():
            self.compute(micro, asked.outputs, asked.temperature)
        return Forwarded(())

    def pass_all(
        self,
        micros: Iterator[tuple[Batch, bool]],
        passes: int,
        loss_fn: LossFunction,
        asked: Asked,
    ) -> dict[str, Tensor]:
        """See `ShardedTrainEngine.pass_all`: forwards and backwards in the turns of this stage."""
        total: dict[str, Tensor] = {}
        under_way: deque[UnderWay] = deque()
        done = 0
        for turn in turns(passes, self.stage.place, self.stage.count):
            if turn == "forward":
                micro, own = next(micros)
                found = self.forwarded(micro, loss_fn if own else None, asked)
                add_metrics(total, found.metrics)
                ends = found if self.stage.last else None
                under_way.append(UnderWay(*self.stage.passed(), ends))
                continue
            done += 1
            self.model.reduce_gradients(done == passes, once=self.reduces_last)
            under_way.popleft().backward(self.stage)
            advance(1, "micro-batches")
        self.stage.flush()
        self._add_repeated()
        return total

    def _add_repeated(self) -> None:
        """Add up gradients of what the first and the last stage both hold."""
        optimizer = self.optimizer
        assert isinstance(optimizer, ShardedAdamW)
        for name in sorted(self.stage.repeated & optimizer.parameters.keys()):
            gradient = optimizer.parameters[name].grad
            assert gradient is not None
            self.stage.add_repeated(local(gradient))
