"""Training over the stages of a pipeline: micro-batches one behind the other, there and back.

One forward, one backward, or that in two halves, see `turns`. This file knows no algorithm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rlflow.batch import Batch, lengths
from rlflow.contract.progress import advance
from rlflow.contract.values import LossFunction, Temperature
from rlflow.engines.hf.forward.ahead import PackedRows
from rlflow.engines.hf.forward.attention import PackedAttention
from rlflow.engines.hf.microbatches import (
    EXPERTS,
    WantedOutputs,
    add_metrics,
    blank_outputs,
    in_batch_order,
)
from rlflow.engines.hf.sharded.model import local
from rlflow.engines.hf.sharded.optim import ShardedAdamW
from rlflow.engines.hf.sharded.train import Forwarded, ShardedTrainEngine
from rlflow.engines.hf.stages.stage import LayerStage
from rlflow.engines.hf.stages.turns import forwards, turns
from rlflow.engines.hf.stages.weights import LateWeights
from rlflow.graph.placement import Schedule


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A micro-batch between its forward and its backward in a stage: what came, where it ends."""

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
    outputs are made by the last stage, and told to the others. Backwards are in halves where it
    `splits` them, of which some is `late`; those of a first stage are whole.
    """

    splits = False
    late: LateWeights | None = None

    def follow(self, schedule: Schedule) -> None:
        """Say when ranks do what, as a placement says it; called before the first forward."""
        self.splits = schedule == "zero-bubble"
        self.late = LateWeights(self.model) if self.splits and not self.stage.has_first else None

    @property
    def stage(self) -> LayerStage:
        """The stage of this rank."""
        assert self.model.stage is not None
        return self.model.stage

    def told(
        self, found: dict[str, Tensor], batch: Batch, asked: WantedOutputs
    ) -> dict[str, Tensor]:
        """See `TrainEngine.told`; of experts that tokens chose every stage has some layers."""
        self.stage.flush()
        experts = {name: self.stage.joined(found.pop(name)) for name in sorted(EXPERTS & {*found})}
        if not self.stage.has_last:
            plain = replace(asked, outputs=tuple(n for n in asked.outputs if n not in EXPERTS))
            wide = torch.promote_types(self.model.dtype, torch.float32)
            tokens = int(lengths(batch["response_tokens"]).sum())
            found = blank_outputs(batch, plain, tokens, dtype=wide)
        return self.stage.last_says(found) | experts

    def passes(self, own: int) -> int:
        """See `ShardedTrainEngine.passes`; of ranks with several stages whole rounds of them."""
        most = super().passes(own)
        return most if self.stage.virtual == 1 else -(-most // self.stage.count) * self.stage.count

    def forward_parts(
        self, batch: Batch, outputs: Collection[str], temperature: Temperature, top_k: int
    ) -> dict[str, Tensor]:
        """See `TrainEngine.forward_parts`; with several stages in their turns."""
        if self.stage.virtual == 1:
            return super().forward_parts(batch, outputs, temperature, top_k)
        parts = list(self.micro_batches(batch))
        passes = self.passes(len(parts))
        computed: list[dict[str, Tensor]] = [{} for _ in parts]
        for turn in forwards(passes, self.stage.count, self.stage.virtual):
            with self.stage.in_turn(turn.turn):
                if turn.micro >= len(parts):
                    self.fill(batch, outputs, temperature, top_k)
                    continue
                micro = parts[turn.micro][1]
                found = self.compute(micro, outputs, temperature, top_k)
                computed[turn.micro] = _with_turn(computed[turn.micro], found)
            advance(turn.turn + 1 == self.stage.virtual, "micro-batches")
        ordered = in_batch_order(batch, [rows for rows, _ in parts], computed)
        return self.told(ordered, batch, WantedOutputs(tuple(outputs), temperature, top_k))

    def at_once(
        self, packed: PackedRows, attention: PackedAttention, asked: WantedOutputs
    ) -> dict[str, Tensor]:
        """See `TrainEngine.at_once`; no outputs where other layers follow."""
        if self.stage.last:
            return super().at_once(packed, attention, asked)
        layout = packed.layout
        self.model.logits(layout.tokens, layout.positions, attention, layout.targets[:1])
        return {}

    def in_chunks(
        self, packed: PackedRows, attention: PackedAttention, asked: WantedOutputs
    ) -> dict[str, Tensor]:
        """See `TrainEngine.in_chunks`; the head is on the last stage."""
        scored = super().in_chunks if self.stage.last else self.at_once
        return scored(packed, attention, asked)

    def forwarded(
        self, micro: Batch, loss_fn: LossFunction | None, asked: WantedOutputs
    ) -> Forwarded:
        """See `ShardedTrainEngine.forwarded`; there is a loss on the last stage alone."""
        if self.stage.last:
            return super().forwarded(micro, loss_fn, asked)
        with torch.enable_grad(), self.routers.filling(loss_fn is None):
            self.compute(micro, asked.outputs, asked.temperature)
        return Forwarded(())

    def pass_all(
        self,
        micros: Iterator[tuple[Batch, bool]],
        passes: int,
        loss_fn: LossFunction,
        asked: WantedOutputs,
    ) -> dict[str, Tensor]:
        """See `ShardedTrainEngine.pass_all`: forwards and backwards in the turns of this rank."""
        stage, total = self.stage, dict[str, Tensor]()
        begun: list[tuple[Batch, bool]] = []
        under_way: dict[tuple[int, int], UnderWay] = {}
        late = self.late
        for turn in turns(passes, stage.place, stage.count, stage.virtual, split=self.splits):
            if late is not None and turn.way == "weights":
                late.add()
                continue
            with stage.in_turn(turn.turn):
                if turn.back:
                    last = turn.micro + 1 == passes
                    self.model.reduce_gradients(last, once=self.reduces_last)
                    if stage.first:
                        self.gather_tower()
                    with nullcontext() if late is None else late.leaving():
                        under_way.pop((turn.micro, turn.turn)).backward(stage)
                    advance(turn.turn == 0, "micro-batches")
                    continue
                if turn.turn == 0:
                    begun.append(next(micros))
                micro, own = begun[turn.micro]
                found = self.forwarded(micro, loss_fn if own else None, asked)
                add_metrics(total, found.metrics)
                ends = found if stage.last else None
                under_way[turn.micro, turn.turn] = UnderWay(*stage.passed(), ends)
        stage.flush()
        if late is not None:
            late.give()
        return total

    def gather_tower(self) -> None:
        """Make what is beside layers whole before a backward that goes on into a tower.

        FSDP gathers it when the backward of its module's output begins, which is on another stage.
        """
        module = self.model.module
        if self.model.sight is not None and isinstance(module, FSDPModule):
            module.unshard()

    def join_gradients(self) -> None:
        """See `TrainEngine.join_gradients`: also of what the first and the last stage both hold."""
        optimizer = self.optimizer
        assert isinstance(optimizer, ShardedAdamW)
        for name in sorted(self.stage.repeated & optimizer.parameters.keys()):
            gradient = optimizer.parameters[name].grad
            assert gradient is not None
            self.stage.add_repeated(local(gradient))
        super().join_gradients()


def _with_turn(before: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a micro-batch's turns have found, with that of the next: experts are of all layers."""
    experts = EXPERTS & before.keys() & found.keys()
    return before | found | {n: torch.cat([before[n], found[n]], -1) for n in sorted(experts)}
