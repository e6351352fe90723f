"""Random weights of a model, one parameter in memory at a time.

A constructor draws weights one after the other from one generator, so that a weight depends on
all drawn before it. `Draws` runs the constructor as it is, but keeps the contents of one tensor
only: for the others it keeps what was done to them and the generator's state, and does it again
when they are read. This file knows neither architectures nor shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
EMPTY = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default}
# What gives every element a value, whatever it was.
OVERWRITES = {
    aten.normal_.default,
    aten.uniform_.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.copy_.default,
}


class _Step(NamedTuple):
    """One thing done to a tensor; `state` is the generator's before it, if it drew."""

    call: Callable[[], Any]
    state: Tensor | None


class Kept:
    """A storage that was allocated without contents, and what was done to it since."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.size: int = storage.nbytes()
        self.steps: list[_Step] = []

    def free(self) -> None:
        """Forget the contents."""
        self.storage.resize_(0)

    @torch.no_grad()
    def fill(self) -> None:
        """Make the contents again, by doing the same once more."""
        if self.storage.nbytes() == self.size:
            return
        self.storage.resize_(self.size)
        state = torch.get_rng_state()
        for step in self.steps:
            if step.state is not None:
                torch.set_rng_state(step.state)
            step.call()
        torch.set_rng_state(state)


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, tensors on the CPU that start without contents are kept as said above."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: dict[int, Kept] = {}
        self.last: Kept | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Do one operation, with the contents that it reads in place."""
        kwargs = kwargs or {}
        found = [kept for leaf in tree_leaves((args, kwargs)) if (kept := self.find(leaf))]
        written = found[0] if func._schema.is_mutable and self.find(args[0]) else None
        for kept in found:
            if kept is written and self.overwrites(func, args):
                kept.steps.clear()
                kept.storage.resize_(kept.size)
            kept.fill()
        draws = torch.Tag.nondeterministic_seeded in func.tags
        state = torch.get_rng_state() if draws and written else None
        output = func(*args, **kwargs)
        if written:
            written.steps.append(_Step(lambda: func(*args, **kwargs), state))
        if func in EMPTY and output.device.type == "cpu":
            written = self.kept[key(output)] = Kept(output.untyped_storage())
        self.settle(found, written)
        return output

    def find(self, value: Any) -> Kept | None:
        """What is kept of a tensor's storage."""
        return self.kept.get(key(value)) if isinstance(value, Tensor) else None

    def overwrites(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether an operation writes all that the storage of its first tensor holds."""
        kept = self.find(args[0])
        size = args[0].numel() * args[0].element_size()
        return kept is not None and func in OVERWRITES and size == kept.size

    def settle(self, found: list[Kept], written: Kept | None) -> None:
        """Forget all contents but those written last."""
        before, self.last = self.last, written or self.last
        for kept in (*found, before):
            if kept is not None and kept is not self.last:
                kept.free()

    @contextmanager
    def contents(self, tensor: Tensor) -> Iterator[Tensor]:
        """A tensor with its contents, within the block; outside of the mode."""
        kept = self.find(tensor)
        if kept is not None:
            kept.fill()
        yield tensor
        if kept is not None:
            kept.free()


def key(tensor: Tensor) -> int:
    """The identity of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def drawn_parameters(make: Callable[[], nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Each parameter of the module that `make` makes, by name, valid until the next is taken."""
    draws = Draws()
    with draws:
        module = make()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            with draws.contents(parameter.detach()) as tensor:
                yield name, tensor
