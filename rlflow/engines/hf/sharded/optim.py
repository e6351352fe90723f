"""AdamW on this rank's shards: the formula and the learning rates of `optim`.

Every element is computed by itself, so an update does not depend on how parameters are
shared out. This file knows no loss, and of the ranks only how a norm adds up over them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from rlflow.contract.engines import OptimizerSpec
from rlflow.contract.values import Shard
from rlflow.engines.hf.optim import FULL, AdamWState, learning_rate
from rlflow.engines.hf.sharded.model import ShardedModel, local


class ShardedAdamW(AdamWState):
    """The optimizer of one rank's shards: moments and the count of steps.

    Gradients are those that the backward pass leaves with the parameters; they go with the
    update that uses them.
    """

    def __init__(self, model: ShardedModel, spec: OptimizerSpec) -> None:
        self.model: ShardedModel = model
        self.spec = spec
        self.steps = 0
        self.asleep = False
        self._host: list[Tensor] = []
        names = model.trained_names()
        self.parameters = {n: p for n, p in model.parameters.items() if n in names}
        held = {name: local(parameter) for name, parameter in self.parameters.items()}
        self.averages = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
        self.squares = {name: torch.zeros_like(tensor) for name, tensor in held.items()}

    def zero_grad(self) -> None:
        """Start from no gradients."""
        self.release_gradients()

    def release_gradients(self) -> None:
        """Give back the memory of the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def accumulate(self) -> None:
        """Nothing: backward passes add to the shards of gradients themselves."""

    def gradients(self) -> dict[str, Tensor]:
        """The gradient of each shard, zero where there is none."""
        return {
            name: torch.zeros_like(local(p)) if p.grad is None else local(p.grad)
            for name, p in self.parameters.items()
        }

    def grad_norm(self) -> Tensor:
        """The Euclidean norm of the whole model's gradients, 0-d; all ranks take part.

        What several ranks hold alike counts once.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self.model.device)
        for name, gradient in self.gradients().items():
            if self.counts(name, self.parameters[name]):
                squares += torch.linalg.vector_norm(gradient).double().square()
        return self.model.ranks.total(squares, ("fsdp", "tp")).sqrt()

    def counts(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether this rank's shard is counted among those that hold the same one."""
        ranks = self.model.ranks
        first = name in self.model.cuts or ranks.place("tp") == 0
        return first and (isinstance(parameter, DTensor) or ranks.place("fsdp") == 0)

    def step(self, scale: float) -> None:
        """Update the weights with `scale` times the gradients, and drop those."""
        spec, rate = self.spec, learning_rate(self.spec, self.steps)
        gradients = self.gradients()
        for decayed in (True, False):
            names = [n for n, p in self.parameters.items() if (p.ndim >= 2) is decayed]
            held = [gradients[name] for name in names]
            if not names:
                continue
            if scale != 1:
                torch._foreach_mul_(held, scale)
            adamw(
                [local(self.parameters[name]) for name in names],
                held,
                [self.averages[name] for name in names],
                [self.squares[name] for name in names],
                [],
                [torch.tensor(float(self.steps), device=held[0].device) for _ in names],
                fused=True,
                amsgrad=False,
                beta1=spec.betas[0],
                beta2=spec.betas[1],
                lr=rate,
                weight_decay=spec.weight_decay if decayed else 0.0,
                eps=spec.eps,
                maximize=False,
            )
        self.steps += 1
        self.release_gradients()

    def tensors(self) -> dict[str, Tensor]:
        """Moments, and what lower weights are copies of, as `kind.weight`; views of this rank's."""
        self.require_awake()
        return {
            f"{kind}.{name}": tensor
            for kind, tensors in self.by_kind().items()
            for name, tensor in tensors.items()
        }

    def by_kind(self) -> dict[str, dict[str, Tensor]]:
        """The state by the first part of its names; lower weights are kept as what is trained."""
        found = {"exp_avg": self.averages, "exp_avg_sq": self.squares}
        if self.model.dtype not in FULL:
            found["master"] = {name: local(p) for name, p in self.parameters.items()}
        return found

    def shards(self) -> dict[str, Shard]:
        """The state by the names of `tensors()`."""
        self.require_awake()
        return {
            f"{kind}.{name}": shard
            for kind, tensors in self.by_kind().items()
            for name, shard in self.model.pieces(tensors).items()
        }

    def trained_names(self) -> frozenset[str]:
        """The names of the state that training changes: all of them."""
        return frozenset(f"{kind}.{n}" for kind, part in self.by_kind().items() for n in part)

    def state_buffers(self) -> list[Tensor]:
        """The moments, which sleep; the weights do so by themselves."""
        return [*self.averages.values(), *self.squares.values()]

    def num_bytes(self) -> int:
        """Bytes of the moments when awake, and of the gradients during a step."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in self.averages.values()]
        return 3 * sum(sizes)
