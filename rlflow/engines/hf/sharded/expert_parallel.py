"""Expert parallelism: along `ep` every rank holds other experts, and tokens go to where they are.

Ranks along `ep` are neighbours among those along `fsdp`: they see different rows and share the
rest of a layer as all ranks along `fsdp` do. A layer's experts are cut over `tp` first, then over
`ep`, and what is left is shared out over ranks along `fsdp` that hold the same ones. This file
knows how experts are cut and which forward they have, neither routers nor rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlflow.engines.hf.routing.experts import dispatched_experts, own_experts
from rlflow.engines.hf.sharded.mesh import MeshRanks, chunk
from rlflow.engines.hf.sharded.tensor_parallel import Cut, Split

STACKS = ("gate_up_proj", "down_proj")


def expert_layers(module: nn.Module) -> list[nn.Module]:
    """The layers whose parameters are stacks of experts, in the module's order."""
    return [
        layer
        for layer in module.modules()
        if all(getattr(getattr(layer, leaf, None), "ndim", 0) == 3 for leaf in STACKS)
    ]


class ExpertParallel:
    """The experts of a model of which a rank has a part along `ep`; `split` has cut it over `tp`.

    The parts are ordinary, smaller parameters; `cuts` says by their identity what of.
    """

    def __init__(self, module: nn.Module, ranks: MeshRanks, split: Split | None) -> None:
        self.group: dist.ProcessGroup = ranks.expert_group
        self.size, self.place = ranks.ep, ranks.expert_place
        self.split = split
        self.layers = expert_layers(module)
        self.cuts: dict[int, Cut] = {}
        self._whole: dict[nn.Module, SimpleNamespace] = {}
        for layer in self.layers:
            for leaf in STACKS:
                self._cut(layer, leaf)
            layer.forward = partial(self.forward, layer)

    def _cut(self, layer: nn.Module, leaf: str) -> None:
        """Put this rank's experts in the place of those of its `tp` rank."""
        held = getattr(layer, leaf)
        count = len(held)
        known = None if self.split is None else self.split.cuts.get(id(held))
        base, total = (0, count) if known is None else (known.start, known.size)
        start, stop = chunk(count, self.size, self.place)
        part = held.new_empty((stop - start, *held.shape[1:]))
        made = nn.Parameter(part, requires_grad=held.requires_grad)
        self.cuts[id(made)] = Cut(dim=0, start=base + start, stop=base + stop, size=total)
        setattr(layer, leaf, made)

    def first(self, layer: nn.Module) -> int:
        """The first expert of the `tp` rank, whose experts the ranks along `ep` share."""
        return 0 if self.split is None else self.split.weights[layer].start

    def forward(self, layer: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """What all experts make of this rank's tokens; see `dispatched_experts`."""
        first = self.first(layer)
        if self.split is not None:
            x, weights = self.split.copied(x), self.split.copied(weights)
        if layer in self._whole:
            made = own_experts(self._whole[layer], first, x, chosen, weights)
        else:
            made = dispatched_experts(layer, first, self.group, x, chosen, weights)
        return made if self.split is None else self.split.summed(made)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Every rank computes with the experts of all within the block, by itself.

        Takes their memory beside this rank's part. Weights are whole along `fsdp` meanwhile. All
        ranks along `ep` take part at the start; within, they need not keep step.
        """
        for layer in self.layers:
            stacks = {leaf: self._gather(getattr(layer, leaf)) for leaf in STACKS}
            self._whole[layer] = SimpleNamespace(**stacks, act_fn=layer.act_fn)
        try:
            yield
        finally:
            self._whole.clear()

    @torch.no_grad()
    def _gather(self, part: Tensor) -> Tensor:
        assert not isinstance(part, DTensor), "experts are gathered along fsdp first"
        whole = part.new_empty((self.size * len(part), *part.shape[1:]))
        dist.all_gather(list(whole.chunk(self.size)), part.contiguous(), group=self.group)
        return whole
