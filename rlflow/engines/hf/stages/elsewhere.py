"""What is in the place of layers and embeddings of other stages. This file knows no ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class PlaceWithin:
    """Where a module has a `part`, and what is put there `within` a turn."""

    def __init__(self, module: nn.Module, name: str, within: nn.Module) -> None:
        above, _, self.leaf = name.rpartition(".")
        self.above = module.get_submodule(above)
        self.part: nn.Module = getattr(self.above, self.leaf)
        self.within = within

    def put(self, part: nn.Module) -> None:
        """Put a module there."""
        setattr(self.above, self.leaf, part)


class Elsewhere(nn.Module):
    """In the place of a layer of another stage: lets hidden states through.

    It has the plain attributes by which a body asks what kind of layer one is.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        plain = {n: v for n, v in vars(layer).items() if isinstance(v, str | int | float)}
        vars(self).update({n: v for n, v in plain.items() if not n.startswith("_")})

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The hidden states themselves."""
        return hidden_states


class Unread(nn.Module):
    """In the place of an embedding of another stage: hidden states by their shape alone."""

    weight = None

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.size = size
        self.dtype = dtype

    def forward(self, tokens: Tensor) -> Tensor:
        """Zeros `[..., size]` for int64 `tokens [...]`, one number in memory."""
        zero = torch.zeros((), dtype=self.dtype, device=tokens.device)
        return zero.expand(*tokens.shape, self.size)
