"""AdamW on this rank's shards: the formula and the learning rates of `optim/adamw.py`.

Every element is computed by itself, so an update does not depend on how parameters are
shared out. This file knows no loss, and of the ranks only how a norm adds up over them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlflow.contract.engines import OptimizerSpec
from rlflow.contract.values import Shard
from rlflow.engines.hf.host_states import KeptStates, Range, pieces_of
from rlflow.engines.hf.optim.adamw import FULL, LOW, MASTER, MOMENTS, AdamWState
from rlflow.engines.hf.optim.norms import square_sum
from rlflow.engines.hf.sharded.mesh import Axis
from rlflow.engines.hf.sharded.model import ShardedModel, local
from rlflow.engines.pinned import ALIGNMENT

# Numbers after which a shard begins among others; in any dtype on 64 bytes or more.
STEP = ALIGNMENT // 4


class ShardedAdamW(AdamWState):
    """The optimizer of one rank's shards: moments and the count of steps.

    Gradients are those that the backward pass leaves with the parameters; they go with the
    update that uses them.
    """

    def __init__(self, model: ShardedModel, spec: OptimizerSpec, *, visiting: bool = False) -> None:
        self.model: ShardedModel = model
        self.spec = spec
        self.steps = 0
        self.asleep = False
        self._host: list[Tensor] = []
        names = model.trained_names()
        self.parameters = {n: p for n, p in model.parameters.items() if n in names}
        self.visiting = visiting
        self.make_states()

    def make_states(self) -> None:
        """Make the moments of this rank's shards."""
        held = {name: local(parameter) for name, parameter in self.parameters.items()}
        self.kept: dict[torch.dtype, KeptStates] = {}
        if self.visiting or self.spec.moments == LOW:
            self._lay_out(held)
        else:
            self.averages = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
            self.squares = {name: torch.zeros_like(tensor) for name, tensor in held.items()}

    def _lay_out(self, held: dict[str, Tensor]) -> None:
        """Make the moments of all shards in one buffer a kind, decayed ones first."""
        named = sorted(held.items(), key=lambda item: self.parameters[item[0]].ndim < 2)
        self.places: dict[str, Range] = {}
        end = 0
        for name, tensor in named:
            self.places[name] = end, end + tensor.numel()
            end = -(-(end + tensor.numel()) // STEP) * STEP
        dtype = named[0][1].dtype
        kinds = dict.fromkeys(MOMENTS, self.moment_dtype(dtype))
        states = KeptStates(kinds, end, self.model.device, on_host=self.visiting)
        self.kept = {dtype: states}
        self.averages, self.squares = self._views(states.buffers.values())

    def _views(self, buffers: Iterable[Tensor]) -> list[dict[str, Tensor]]:
        """Of flat buffers each parameter's shard, by name."""
        shapes = {name: local(self.parameters[name]).shape for name in self.places}
        return [
            {name: flat[slice(*self.places[name])].view(shape) for name, shape in shapes.items()}
            for flat in buffers
        ]

    def zero_grad(self) -> None:
        """Start from no gradients."""
        self.release_gradients()

    def release_gradients(self) -> None:
        """Give back the memory of the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def accumulate(self) -> None:
        """Nothing: backward passes add to the shards of gradients themselves."""

    def add_parts(self) -> None:
        """Add up, over the ranks that share the tokens, gradients of a rank's own; all take part.

        Once a step, and in one message: they are few numbers.
        """
        seen = sorted(self.model.seen_in_part & self.parameters.keys())
        parts = [local(grad) for n in seen if (grad := self.parameters[n].grad) is not None]
        if not parts:
            return
        axes: tuple[Axis] = ("tp",)
        whole = self.model.ranks.total(torch.cat([part.reshape(-1) for part in parts]), axes)
        sizes = [part.numel() for part in parts]
        for part, total in zip(parts, torch.split(whole, sizes), strict=True):
            part.copy_(total.view(part.shape))

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
                squares += square_sum(gradient)
        return self.model.ranks.total(squares, ("pp", "fsdp", "tp")).sqrt()

    def counts(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether this rank's shard is counted among those that hold the same one."""
        ranks, stage = self.model.ranks, self.model.stage
        if stage is not None and name in stage.repeated and not stage.has_first:
            return False
        first = name in self.model.cuts or ranks.place("tp") == 0
        return first and (isinstance(parameter, DTensor) or ranks.place("fsdp") == 0)

    def step(self, scale: float) -> None:
        """Update the weights with `scale` times the gradients, and drop those."""
        gradients = self.gradients()
        for decayed in (True, False):
            names = [n for n, p in self.parameters.items() if (p.ndim >= 2) is decayed]
            held = [gradients[name] for name in names]
            if not names:
                continue
            if scale != 1:
                torch._foreach_mul_(held, scale)
            if self.kept:
                self._visit({name: gradients[name] for name in names}, decayed)
                continue
            weights = [local(self.parameters[name]) for name in names]
            moments = ([kind[name] for name in names] for kind in (self.averages, self.squares))
            self.update(weights, held, *moments, decay=decayed)
        self.steps += 1
        self.release_gradients()

    def _visit(self, gradients: dict[str, Tensor], decayed: bool) -> None:
        """Update parameters whose moments lie next to each other, a piece of them at a time."""
        ((dtype, states),) = self.kept.items()
        flat = {
            name: (local(self.parameters[name]).view(-1), gradient.reshape(-1))
            for name, gradient in gradients.items()
        }
        places = {name: self.places[name] for name in gradients}
        bounds = min(a for a, _ in places.values()), max(b for _, b in places.values())
        for (start, stop), held in states.visits(pieces_of(*bounds), dtype, self.steps):
            lists: tuple[list[Tensor], ...] = ([], [], [], [])
            for name, (first, last) in places.items():
                begin, end = max(first, start), min(last, stop)
                if begin >= end:
                    continue
                own, there = slice(begin - first, end - first), slice(begin - start, end - start)
                parts = (*(each[own] for each in flat[name]), *(held[k][there] for k in MOMENTS))
                for found, part in zip(lists, parts, strict=True):
                    found.append(part)
            if lists[0]:
                self.update(*lists, decay=decayed)

    def by_kind(self) -> dict[str, dict[str, Tensor]]:
        """See `AdamWState.by_kind`; lower weights are kept as what is trained."""
        kinds = [self.averages, self.squares]
        if self.rests and self.kept:
            kinds = self._views(self._host)
        elif self.rests:
            copies = iter(self._host)
            kinds = [{name: next(copies) for name in tensors} for tensors in kinds]
        return dict(zip(MOMENTS, kinds, strict=True)) | self.lower()

    def lower(self) -> dict[str, dict[str, Tensor]]:
        """What lower weights are made of in each pass, as a kind of the state; none elsewhere."""
        if self.model.dtype in FULL:
            return {}
        return {MASTER: {name: local(p) for name, p in self.parameters.items()}}

    def shards(self) -> dict[str, Shard]:
        """The state by the names of `tensors()`."""
        self.require_awake()
        return {
            f"{kind}.{name}": self.piece(kind, name, tensor)
            for kind, tensors in self.by_kind().items()
            for name, tensor in tensors.items()
        }

    def piece(self, kind: str, name: str, tensor: Tensor) -> Shard:
        """Which piece of the whole model's state a tensor is."""
        return self.model.piece(name, tensor)

    def saved_moments(self) -> dict[str, Shard]:
        """See `AdamWState.saved_moments`."""
        return {
            f"{kind}.{name}": self.piece(kind, name, tensor)
            for kind, tensors in self.by_kind().items()
            if kind != MASTER
            for name, tensor in tensors.items()
        }

    def saved_masters(self) -> dict[str, Shard]:
        """None: the weights that the model keeps are those in float32."""
        return {}

    def round_masters(self) -> None:
        """Nothing: lower weights are made of what is trained in each pass."""

    def state_buffers(self) -> list[Tensor]:
        """The moments on the device, which sleep; the weights do so by themselves."""
        if self.visiting:
            return []
        if self.kept:
            return [buffer for states in self.kept.values() for buffer in states.buffers.values()]
        return [*self.averages.values(), *self.squares.values()]

    def num_bytes(self) -> int:
        """Bytes of the moments on the device when awake, and of the gradients during a step."""
        gradients = sum(local(p).nbytes for p in self.parameters.values())
        return gradients + sum(b.numel() * b.element_size() for b in self.state_buffers())
