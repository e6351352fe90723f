"""An optimizer whose parameters lie in groups, each with states of its own.

Muon has one moment of matrices, AdamW of 8 bits has codes of them; the rest of both is AdamW. This
file knows no loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlflow.engines.hf.optim.adamw import FULL, MASTER, MOMENTS, AdamWState
from rlflow.engines.hf.optim.coded import CodedGroup
from rlflow.engines.hf.optim.groups import StateGroup

Group = StateGroup | CodedGroup


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
            self.groups += self.grouped(shapes, shapes, kinds, wide, buffer.device)
        with torch.no_grad():
            for name, master in self.by_kind()[MASTER].items():
                master.copy_(self.weight(name))

    @abstractmethod
    def grouped(
        self,
        shapes: Mapping[str, torch.Size],
        whole: Mapping[str, Sequence[int]],
        kinds: tuple[str, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[Group]:
        """Groups of parameters, or of parts of ones of `whole` shapes; `kinds` beside moments."""

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


def wide_groups(
    shapes: Mapping[str, torch.Size],
    whole: Mapping[str, Sequence[int]],
    kinds: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    *,
    on_host: bool,
) -> list[Group]:
    """States of parameters of several dimensions, and of vectors, which do not decay."""
    found: list[Group] = []
    for decays in (True, False):
        own = {n: shape for n, shape in shapes.items() if (len(whole[n]) >= 2) is decays}
        if own:
            found.append(StateGroup(own, kinds, dtype, device, on_host=on_host, decays=decays))
    return found
