"""An optimizer whose parameters lie in groups, each with states of its own.

Muon has one moment of matrices, AdamW of 8 bits has codes of them; the rest of both is AdamW. This
file knows no loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlflow.engines.hf.optim.adamw import FULL, MASTER, MOMENTS, AdamWState
from rlflow.engines.hf.optim.coded import CodedGroup
from rlflow.engines.hf.optim.groups import StateGroup

Group = StateGroup | CodedGroup


@dataclass(frozen=True, slots=True)
class StateShapes:
    """Parameters that states are wanted of, by `shapes` of them or of parts of `whole` ones.

    States are of `dtype`; those of the kinds `beside` are kept beside moments.
    """

    shapes: Mapping[str, torch.Size]
    whole: Mapping[str, Sequence[int]]
    beside: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device
    on_host: bool

    def only(self, names: Container[str]) -> StateShapes:
        """The same of some parameters."""
        return replace(self, shapes={n: s for n, s in self.shapes.items() if n in names})

    def alike(self, kinds: Sequence[str], *, decays: bool, matrices: bool = False) -> list[Group]:
        """One group of all of them with moments of those kinds; none of no parameter."""
        if not self.shapes:
            return []
        kept, how = (*kinds, *self.beside), {"decays": decays, "matrices": matrices}
        where = {"on_host": self.on_host, **how}
        return [StateGroup(self.shapes, kept, self.dtype, self.device, **where)]

    def wide(self) -> list[Group]:
        """AdamW's states: of what has several dimensions, and of vectors, which do not decay."""
        several = {name for name in self.shapes if len(self.whole[name]) >= 2}
        vectors = self.shapes.keys() - several
        pairs = (several, True), (vectors, False)
        return [g for own, decays in pairs for g in self.only(own).alike(MOMENTS, decays=decays)]


class GroupedState(AdamWState, ABC):
    """The optimizer of one model: gradients, groups of states, and the count of steps."""

    groups: list[Group]

    def make_states(self) -> None:
        """Make the states of all groups."""
        self.groups = []
        for dtype, buffer in self.flat.buffers.items():
            slots = self.flat.slots.items()
            shapes = {name: slot.shape for name, slot in slots if slot.dtype == dtype}
            wide = dtype if dtype in FULL else torch.float32
            kinds = () if dtype in FULL else (MASTER,)
            of = StateShapes(shapes, shapes, kinds, wide, buffer.device, self.visiting)
            self.groups += self.grouped(of)
        with torch.no_grad():
            for name, master in self.by_kind()[MASTER].items():
                master.copy_(self.weight(name))

    @abstractmethod
    def grouped(self, wanted: StateShapes) -> list[Group]:
        """Groups of all parameters that states are wanted of."""

    def weight(self, name: str) -> Tensor:
        """A parameter where the model has it."""
        return self.flat.view(name, self.flat.buffers[self.flat.slots[name].dtype])

    def gradient(self, name: str) -> Tensor:
        """A parameter's gradient, summed over micro-batches."""
        return self.flat.view(name, self.sums[self.flat.slots[name].dtype])

    def step(self, scale: float) -> None:
        """Update the weights with `scale` times the gradients, which need not be kept."""
        if scale != 1:
            for total in self.sums.values():
                total.mul_(scale)
        for group in self.groups:
            self.step_group(group)
        self.steps += 1

    def step_group(self, group: Group) -> None:
        """Make AdamW's step of a group, a piece at a time."""
        for parts in group.by_piece(self.steps):
            weights = [self.weight(name).view(-1)[own] for name, own, _ in parts]
            gradients = [self.gradient(name).view(-1)[own] for name, own, _ in parts]
            trained = [
                held.get(MASTER, weight)
                for weight, (_, _, held) in zip(weights, parts, strict=True)
            ]
            moments = ([held[kind] for _, _, held in parts] for kind in MOMENTS)
            if trained:
                self.update(trained, gradients, *moments, decay=group.decays)
            for weight, wide in zip(weights, trained, strict=True):
                if wide is not weight:
                    weight.copy_(wide)

    def by_kind(self) -> dict[str, dict[str, Tensor]]:
        """See `AdamWState.by_kind`."""
        found: dict[str, dict[str, Tensor]] = {MASTER: {}}
        copies = iter(self._host)
        for group in self.groups:
            own = [next(copies) for _ in group.buffers()] if self.rests else None
            for kind, tensors in group.views(own).items():
                found.setdefault(kind, {}).update(tensors)
        return found

    def round_masters(self) -> None:
        """Make lower weights those that their float32 copies say."""
        for name, master in self.by_kind()[MASTER].items():
            self.weight(name).copy_(master)

    def state_buffers(self) -> list[Tensor]:
        """Every buffer of the state that is on the device, but for the model's own weights."""
        return [] if self.visiting else [b for group in self.groups for b in group.buffers()]
