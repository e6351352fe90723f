"""AdamW on flat buffers.

AdamW is of Loshchilov and Hutter, "Decoupled weight decay regularization" (2019), algorithm 2;
decay applies to matrices, not to biases and norms. Weights below float32 are trained on a
float32 copy, and their gradients are summed in float32. This file knows no loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rlflow.contract.engines import OptimizerSpec
from rlflow.contract.values import Shard
from rlflow.engines.hf.flat import free, restore, to_host, whole_shards
from rlflow.engines.hf.host_states import KeptStates, Range, pieces_of
from rlflow.engines.hf.models import TorchModel
from rlflow.engines.hf.optim.norms import square_sum
from rlflow.engines.hf.optim.rates import learning_rate
from rlflow.errors import Finding, RunError, UsageError

FULL = {torch.float32, torch.float64}
MOMENTS, MASTER, LOW = ("exp_avg", "exp_avg_sq"), "master", "bfloat16"
# Numbers that are added at a time: a CPU makes a float32 copy of lower ones that it adds, of all of
# them at once as large as the sum itself.
AT_ONCE = 1 << 22


class AdamWState:
    """The optimizer of one model: gradients, moments and the count of steps.

    While it lives, every parameter's `grad` is a slice of one buffer; backward passes add to it.
    A `visiting` state stays in host memory, and a step has pieces of it on the device: results are
    the same to the bit.
    """

    def __init__(self, model: TorchModel, spec: OptimizerSpec, *, visiting: bool = False) -> None:
        if model.layers is not None:
            what = f"model {model.name!r} is trained, so its layers cannot live on the host"
            raise UsageError(Finding(code="E517", what=what, fix="leave out offload="))
        self.model = model
        self.flat = model.trained
        self.spec = spec
        self.steps = 0
        self.asleep = False
        self._host: list[Tensor] = []
        self.visiting = visiting
        self.grads: dict[torch.dtype, Tensor] = {}
        self.sums: dict[torch.dtype, Tensor] = {}
        self.make_states()

    def make_states(self) -> None:
        """Make moments, and float32 copies of lower weights."""
        self.kept: dict[torch.dtype, KeptStates] = {}
        if self.visiting or self.spec.moments == LOW:
            self._keep()
            return
        self.masters = {
            dtype: buffer if dtype in FULL else buffer.float()
            for dtype, buffer in self.flat.buffers.items()
        }
        self.exp_avg = {dtype: torch.zeros_like(m) for dtype, m in self.masters.items()}
        self.exp_avg_sq = {dtype: torch.zeros_like(m) for dtype, m in self.masters.items()}

    def moment_dtype(self, wide: torch.dtype) -> torch.dtype:
        """The dtype that moments are kept in, of weights that are updated in another."""
        return torch.bfloat16 if self.spec.moments == LOW else wide

    def _keep(self) -> None:
        """Make a state that is not computed with as it is kept; masters a piece at a time."""
        self.masters, self.exp_avg, self.exp_avg_sq = {}, {}, {}
        for dtype, buffer in self.flat.buffers.items():
            wide = dtype if dtype in FULL else torch.float32
            kinds = dict.fromkeys(MOMENTS, self.moment_dtype(wide))
            if dtype not in FULL:
                kinds[MASTER] = wide
            kept = KeptStates(kinds, len(buffer), buffer.device, on_host=self.visiting)
            self.kept[dtype] = kept
            self.exp_avg[dtype], self.exp_avg_sq[dtype] = (kept.buffers[k] for k in MOMENTS)
            self.masters[dtype] = kept.buffers.get(MASTER, buffer)
            for start, stop in pieces_of(0, len(buffer)) if dtype not in FULL else ():
                self.masters[dtype][start:stop].copy_(buffer[start:stop].float())

    def zero_grad(self) -> None:
        """Make every gradient zero, and the buffers that hold them if there are none."""
        for dtype, buffer in self.flat.buffers.items():
            if dtype not in self.grads:
                self.grads[dtype] = torch.zeros_like(buffer)
                full = dtype in FULL
                wide = None if full else torch.zeros_like(buffer, dtype=torch.float32)
                self.sums[dtype] = self.grads[dtype] if wide is None else wide
                self.attach(dtype)
            self.grads[dtype].zero_()
            self.sums[dtype].zero_()

    def attach(self, dtype: torch.dtype) -> None:
        """Point the parameters' gradients into the buffer."""
        for name, parameter in self.flat.parameters.items():
            if parameter.dtype == dtype:
                parameter.grad = self.flat.view(name, self.grads[dtype])

    def release_gradients(self) -> None:
        """Give back the memory of the gradients; `zero_grad` takes it again."""
        for parameter in self.flat.parameters.values():
            parameter.grad = None
        self.grads, self.sums = {}, {}

    def accumulate(self) -> None:
        """Add the gradients of a backward pass to float32 sums, where they are not such sums."""
        for dtype, total in self.sums.items():
            if total is self.grads[dtype]:
                continue
            parts = (torch.split(one, AT_ONCE) for one in (total, self.grads[dtype]))
            for part, own in zip(*parts, strict=True):
                part.add_(own)
                own.zero_()

    def grad_norm(self) -> Tensor:
        """The Euclidean norm of all gradients, float64, 0-d."""
        return torch.stack([square_sum(total) for total in self.sums.values()]).sum().sqrt()

    def step(self, scale: float) -> None:
        """Update the weights with `scale` times the gradients."""
        for dtype in self.masters:
            total, weights = self.sums[dtype], self.flat.buffers[dtype]
            if scale != 1:
                total *= scale
            for (start, stop), held in self._held(dtype):
                master, decay = held[MASTER], start < self.flat.matrices[dtype]
                states = [held[kind] for kind in MOMENTS]
                self.update([master], [total[start:stop]], *([s] for s in states), decay=decay)
                if weights is not self.masters[dtype]:
                    weights[start:stop].copy_(master)
        self.steps += 1

    def _held(self, dtype: torch.dtype) -> Iterator[tuple[Range, dict[str, Tensor]]]:
        """Ranges of a buffer, and its state there on the device; matrices and vectors apart."""
        master, cut = self.masters[dtype], self.flat.matrices[dtype]
        halves = [(a, b) for a, b in ((0, cut), (cut, len(master))) if a < b]
        if dtype not in self.kept:
            moments = dict(zip(MOMENTS, (self.exp_avg[dtype], self.exp_avg_sq[dtype]), strict=True))
            for start, stop in halves:
                state = {kind: buffer[start:stop] for kind, buffer in moments.items()}
                yield (start, stop), {MASTER: master[start:stop], **state}
            return
        ranges = [piece for half in halves for piece in pieces_of(*half)]
        visits = self.kept[dtype].visits(ranges, master.dtype, self.steps)
        for (start, stop), held in visits:
            yield (start, stop), {MASTER: master[start:stop], **held}

    def update(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        averages: list[Tensor],
        squares: list[Tensor],
        *,
        decay: bool,
    ) -> None:
        """Update tensors on the device and their moments in place, by the rate of this step."""
        spec = self.spec
        device = weights[0].device
        adamw(
            weights,
            gradients,
            averages,
            squares,
            [],
            [torch.full((), float(self.steps), device=device) for _ in weights],
            fused=True,
            amsgrad=False,
            beta1=spec.betas[0],
            beta2=spec.betas[1],
            lr=learning_rate(spec, self.steps),
            weight_decay=spec.weight_decay if decay else 0.0,
            eps=spec.eps,
            maximize=False,
        )

    def kinds(self) -> dict[str, dict[torch.dtype, Tensor]]:
        """The buffers a checkpoint holds, by the first part of their tensors' names."""
        low = {dtype: m for dtype, m in self.masters.items() if dtype not in FULL}
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, MASTER: low}

    def by_kind(self) -> dict[str, dict[str, Tensor]]:
        """The state by the first part of its names, on the device or as it lies on the host."""
        kinds = self.kinds()
        if self.rests:
            copies = dict(zip(map(id, self.state_buffers()), self._host, strict=True))
            kinds = {k: {d: copies[id(b)] for d, b in own.items()} for k, own in kinds.items()}
        return {
            kind: {
                name: self.flat.view(name, buffers[slot.dtype])
                for name, slot in self.flat.slots.items()
                if slot.dtype in buffers
            }
            for kind, buffers in kinds.items()
        }

    def tensors(self) -> dict[str, Tensor]:
        """Moments, and what lower weights are copies of, as `kind.weight`; views, not copies."""
        self.require_awake()
        return {
            f"{kind}.{name}": tensor
            for kind, tensors in self.by_kind().items()
            for name, tensor in tensors.items()
        }

    def shards(self) -> dict[str, Shard]:
        """The state by the names of `tensors()`, each whole."""
        return whole_shards(self.tensors())

    def saved_moments(self) -> dict[str, Shard]:
        """The moments as `kind.weight` where they are, as `TorchModel.resting` gives weights."""
        return whole_shards(
            {
                f"{kind}.{name}": tensor
                for kind, tensors in self.by_kind().items()
                if kind != MASTER
                for name, tensor in tensors.items()
            }
        )

    def saved_masters(self) -> dict[str, Shard]:
        """The float32 copies of lower weights where they are, by the weights' own names."""
        return whole_shards(self.by_kind()[MASTER])

    @property
    def rests(self) -> bool:
        """Whether the state lies on the host where nothing changes it until it is woken."""
        return self.asleep and not self.visiting

    def fitted(self, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """Moments on disk, by the names of `saved_moments()`, as this layout keeps them."""
        return stored

    def round_masters(self) -> None:
        """Make lower weights those that their float32 copies say."""
        for dtype, master in self.kinds()[MASTER].items():
            self.flat.buffers[dtype].copy_(master)

    def trained_names(self) -> frozenset[str]:
        """The names of the state that training changes: all of them."""
        return frozenset(f"{kind}.{n}" for kind, part in self.by_kind().items() for n in part)

    def sleep(self, *, keeps_gradients: bool = False) -> None:
        """Move the state to the host and drop the gradients, unless further ones add to them."""
        self.require_awake()
        if not keeps_gradients:
            self.release_gradients()
        self._host = to_host(self.state_buffers())
        free(self.state_buffers())
        self.asleep = True

    def wake(self) -> None:
        """Bring the state back to the device."""
        if self.asleep:
            restore(self.state_buffers(), self._host)
            self._host, self.asleep = [], False

    def state_buffers(self) -> list[Tensor]:
        """Every buffer of the state that is on the device, but for the model's own weights."""
        if self.visiting:
            return []
        return [buffer for buffers in self.kinds().values() for buffer in buffers.values()]

    def require_awake(self) -> None:
        """Raise RunError while the state is on the host."""
        if self.asleep:
            what = f"the optimizer of model {self.model.name!r} is asleep"
            raise RunError(Finding(code="E506", what=what, fix="wake it first"))

    def num_bytes(self) -> int:
        """Bytes of the state on the device when awake, and of the gradients during a step."""
        state = sum(buffer.numel() * buffer.element_size() for buffer in self.state_buffers())
        return state + sum(
            buffer.numel() * (buffer.element_size() if dtype in FULL else 6)
            for dtype, buffer in self.flat.buffers.items()
        )
