"""Muon on the matrices of layers, and AdamW on everything else.

Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), with the decoupled
decay and the scale of Liu et al., "Muon is scalable for LLM training" (arXiv:2502.16982), section
2.2: an update's root mean square is that of AdamW's, so that both go by one learning rate. Matrices
have one moment, everything else two. This file knows no loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from rlflow.engines.hf.optim.adamw import MASTER
from rlflow.engines.hf.optim.grouped import Group, GroupedState, StateShapes
from rlflow.engines.hf.optim.groups import StateGroup
from rlflow.engines.hf.optim.newton_schulz import orthogonal
from rlflow.engines.hf.optim.rates import learning_rate
from rlflow.errors import UsageError
from rlflow.modelfiles.orthogonal import is_layer_matrix, stacked_finding

MOMENTUM = "momentum"
# Root mean square of AdamW's updates, as Liu et al. found it.
RMS = 0.2


class MuonState(GroupedState):
    """The optimizer of one model: gradients, one or two moments, and the count of steps."""

    def grouped(self, wanted: StateShapes) -> list[Group]:
        """Matrices of layers, other parameters of several dimensions, and vectors."""
        refuse_stacks(self.model.name, wanted.whole)
        chosen = {n for n in wanted.shapes if is_layer_matrix(n, wanted.whole[n])}
        matrices = wanted.only(chosen).alike([MOMENTUM], decays=True, matrices=True)
        return [*matrices, *wanted.only(wanted.shapes.keys() - chosen).wide()]

    def step_group(self, group: Group) -> None:
        """Make Muon's step of matrices, each with its whole states on the device, or AdamW's."""
        if not isinstance(group, StateGroup) or not group.matrices:
            super().step_group(group)
            return
        for name, held in group.by_matrix(self.steps):
            weight, gradient = self.weight(name), self.gradient(name)
            self.push(held[MOMENTUM], gradient)
            trained = held.get(MASTER, weight)
            self.descend(trained, orthogonal(gradient))
            if trained is not weight:
                weight.copy_(trained)

    def push(self, momentum: Tensor, gradient: Tensor) -> None:
        """Add a gradient to the momentum, and put Nesterov's in the gradient's place."""
        keeps = self.spec.momentum
        assert keeps is not None
        momentum.lerp_(gradient, 1 - keeps)
        gradient.lerp_(momentum, keeps)

    def descend(
        self, weight: Tensor, direction: Tensor, shape: Sequence[int] | None = None
    ) -> None:
        """Decay a matrix, or the part of one of a larger `shape`, and move it."""
        rate = learning_rate(self.spec, self.steps)
        weight.mul_(1 - rate * self.spec.weight_decay)
        weight.add_(direction, alpha=-rate * RMS * math.sqrt(max(shape or weight.shape)))


def refuse_stacks(model: str, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise UsageError for weights of layers that are neither matrices nor vectors.

    Experts are stacked so. A convolution over patches of pictures is in no layer, and AdamW's.
    """
    if any(len(shape) > 2 and is_layer_matrix(name, shape[-2:]) for name, shape in shapes.items()):
        raise UsageError(stacked_finding(model))
