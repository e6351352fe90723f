"""Optimizers with groups of states, on this rank's shards.

States are computed number by number where they lie. Muon makes a matrix orthogonal whole, on the
rank that `whole_matrices` makes its owner. This file knows no loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlflow.contract.values import Shard
from rlflow.engines.hf.optim.coded import SCALES
from rlflow.engines.hf.optim.grouped import Group, GroupedState, StateShapes
from rlflow.engines.hf.optim.groups import StateGroup
from rlflow.engines.hf.optim.int8 import Int8AdamWState
from rlflow.engines.hf.optim.muon import MOMENTUM, MuonState
from rlflow.engines.hf.optim.newton_schulz import orthogonal, orthogonal_dtype
from rlflow.engines.hf.sharded.model import local
from rlflow.engines.hf.sharded.optim import ShardedAdamW
from rlflow.engines.hf.sharded.whole_matrices import WholeMatrices, whole_shape
from rlflow.modelfiles.coded import block_of


class ShardedGroups(ShardedAdamW, GroupedState):
    """The optimizer of one rank's shards: groups of states and the count of steps."""

    def make_states(self) -> None:
        """Make the states of this rank's shards."""
        held = {name: local(parameter) for name, parameter in self.parameters.items()}
        shapes = {name: tensor.shape for name, tensor in held.items()}
        dtype = next(iter(held.values())).dtype
        whole = {name: whole_shape(self.model, name) for name in held}
        of = StateShapes(shapes, whole, (), dtype, self.model.device, self.visiting)
        self.groups = self.grouped(of)
        self.held: dict[str, Tensor] = {}

    def weight(self, name: str) -> Tensor:
        """The shard of a parameter that this rank has."""
        return local(self.parameters[name])

    def gradient(self, name: str) -> Tensor:
        """The gradient of this rank's shard."""
        return self.held[name]

    def step(self, scale: float) -> None:
        """Update the weights with `scale` times the gradients, and drop those."""
        self.held = self.gradients()
        if scale != 1:
            torch._foreach_mul_(list(self.held.values()), scale)
        for group in self.groups:
            self.step_group(group)
        self.steps += 1
        self.held = {}
        self.release_gradients()

    def by_kind(self) -> dict[str, dict[str, Tensor]]:
        """See `AdamWState.by_kind`; lower weights are kept as what is trained."""
        return GroupedState.by_kind(self) | self.lower()

    def state_buffers(self) -> list[Tensor]:
        """The moments on the device, which sleep; the weights do so by themselves."""
        return GroupedState.state_buffers(self)


class ShardedMuon(ShardedGroups, MuonState):
    """Muon on one rank's shards."""

    def make_states(self) -> None:
        """Make the states of this rank's shards."""
        super().make_states()
        groups = [g for g in self.groups if isinstance(g, StateGroup) and g.matrices]
        self.whole = WholeMatrices(self.model, [name for group in groups for name in group.shapes])

    def step_group(self, group: Group) -> None:
        """Of matrices the momentum first, which is then in the gradients; of others all."""
        if not isinstance(group, StateGroup) or not group.matrices:
            GroupedState.step_group(self, group)
            return
        for parts in group.by_piece(self.steps):
            for name, own, held in parts:
                self.push(held[MOMENTUM], self.gradient(name).view(-1)[own])
        pushed = {name: self.gradient(name) for name in group.shapes}
        dtype = orthogonal_dtype(next(iter(pushed.values())))
        for name, direction in self.whole.computed(pushed, orthogonal, dtype):
            self.descend(self.weight(name), direction, self.whole.shape(name))


class ShardedInt8AdamW(ShardedGroups, Int8AdamWState):
    """AdamW with moments in 8 bits on one rank's shards."""

    def block(self, name: str, shape: Sequence[int]) -> int:
        """Numbers of a row with one scale, which lie on one rank."""
        cut = self.model.cuts.get(name)
        by_columns = cut is not None and cut.dim == len(shape) - 1
        return block_of(shape, self.model.ranks.sizes["tp"] if by_columns else 1)

    def piece(self, kind: str, name: str, tensor: Tensor) -> Shard:
        """Scales lie as the blocks do that they are of."""
        if not kind.endswith(SCALES):
            return super().piece(kind, name, tensor)
        *rows, (start, stop) = self.model.piece(name, tensor).box
        shape, block = whole_shape(self.model, name), self.blocks[name]
        box = (*rows, (start // block, stop // block))
        return Shard(shape=(*shape[:-1], shape[-1] // block), box=box, tensor=tensor)
