"""Gradients of weights that a backward leaves for later, when a rank would wait for others.

Layers that multiply by a weight give the gradient of their input at once, which the stage before
waits for, and leave the product that is their weight's (Qi et al., "Zero Bubble Pipeline
Parallelism", arXiv:2401.10241, section 1: B and W). Nothing is computed twice. This file knows
neither the order of passes nor losses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from rlflow.engines.hf.forward.kernels import outer_product
from rlflow.engines.hf.recompute import decoder_layers
from rlflow.engines.hf.routing.experts import all_experts, grouped_outer
from rlflow.engines.hf.sharded.expert_parallel import STACKS, expert_layers
from rlflow.engines.hf.sharded.model import ShardedModel

# A weight's name, the gradient of a layer's outputs `[rows, out]`, its inputs `[rows, in]`, and of
# a stack of experts how many of those rows are each expert's, one after the other.
Left = tuple[str, Tensor, Tensor, Tensor | None]


class LateWeights:
    """What backwards of a model have left of the weights of its layers, one after the other.

    Those of norms, routers, biases, of what is beside layers, and of adapters, which are small, are
    never left. Gradients are whole on a rank until `give` shares them out, in float32 at least
    where ranks share weights or compute with lower ones. Make it before the first forward: experts
    that lie on one rank whole are computed by forwards of ours from then on, as others are.
    """

    def __init__(self, model: ShardedModel) -> None:
        self.model = model
        self._taking: list[Left] | None = None
        self._left: deque[list[Left]] = deque()
        self._sums: dict[str, Tensor] = {}
        trained, stacks = set(model.trained_names()), set(expert_layers(model.module))
        for outer, layer in decoder_layers(model.module).items():
            for inner, part in layer.named_modules():
                above = ".".join(each for each in (outer, inner) if each)
                if part in stacks:
                    self._split_experts(part, above, trained)
                elif isinstance(part, nn.Linear) and f"{above}.weight" in trained:
                    part.late = partial(self.take, f"{above}.weight")  # type: ignore[assignment]

    def _split_experts(self, layer: nn.Module, name: str, trained: Collection[str]) -> None:
        """Have a layer of experts leave the gradients of its stacks."""
        own = {leaf: f"{name}.{leaf}" for leaf in STACKS if f"{name}.{leaf}" in trained}
        if not own:
            return
        late = {leaf: partial(self.take, known) for leaf, known in own.items()}
        layer.late = late  # type: ignore[assignment]
        if self.model.apart is None and self.model.ranks.sizes["tp"] == 1:
            layer.forward = partial(all_experts, layer)

    def take(self, name: str, gradient: Tensor, x: Tensor, sizes: Tensor | None = None) -> bool:
        """Whether the weight's gradient is left for later: in a backward that leaves them."""
        if self._taking is not None:
            self._taking.append((name, gradient, x, sizes))
        return self._taking is not None

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Leave what a backward within the block finds."""
        self._taking = []
        try:
            yield
            self._left.append(self._taking)
        finally:
            self._taking = None

    @torch.no_grad()
    def add(self) -> None:
        """Add up the gradients of the first backward that left any, and let go of it."""
        for name, gradient, x, sizes in self._left.popleft():
            if sizes is None:
                found = outer_product(gradient, x)
            else:
                found = grouped_outer(gradient, x, sizes)
            if name in self._sums:
                self._sums[name] += found
            else:
                # In the order of its weight, by which an optimizer goes.
                self._sums[name] = found.to(self.model.parameters[name].dtype).contiguous()

    @torch.no_grad()
    def give(self) -> None:
        """Add to parameters' gradients what was added up; ranks that share them all take part."""
        assert not self._left
        for name in sorted(self._sums):
            parameter, found = self.model.parameters[name], self._sums.pop(name)
            if isinstance(parameter, DTensor):
                found = _shared(parameter, found)
            parameter.grad = found if parameter.grad is None else parameter.grad + found


def _shared(parameter: DTensor, whole: Tensor) -> DTensor:
    """The sum over its ranks of a parameter's whole gradients, laid out as it is.

    First to shares, which are then added up over replicas.
    """
    mesh, last = parameter.device_mesh, parameter.placements[-1]
    parts = [Partial() for _ in range(mesh.ndim)]
    found = DTensor.from_local(whole, mesh, parts, run_check=False)
    found = found.redistribute(placements=[*parts[:-1], last])
    return found.redistribute(placements=parameter.placements)
