"""States of parameters that are stepped alike, side by side in one buffer a kind.

They lie on the device or in host memory. This file knows no formula of an optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rlflow.engines.hf.host_states import KeptStates, Range, pieces_of
from rlflow.engines.pinned import ALIGNMENT

# Numbers after which a parameter begins among others; in any dtype on 64 bytes or more.
STEP = ALIGNMENT // 4


class StateGroup:
    """States of each of `kinds`, zero at first, of parameters of the named `shapes`.

    `dtype` is that of the states, `matrices` whether Muon steps them, `decays` whether weights do.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        kinds: Sequence[str],
        dtype: torch.dtype,
        device: torch.device,
        *,
        on_host: bool,
        decays: bool,
        matrices: bool = False,
    ) -> None:
        self.shapes = shapes
        self.dtype = dtype
        self.matrices = matrices
        self.decays = decays
        self.places: dict[str, Range] = {}
        end = 0
        for name, shape in shapes.items():
            self.places[name] = end, end + shape.numel()
            end = -(-(end + shape.numel()) // STEP) * STEP
        self.count = end
        self.states = KeptStates(dict.fromkeys(kinds, dtype), end, device, on_host=on_host)

    def buffers(self) -> list[Tensor]:
        """Everything that is kept, a buffer a kind."""
        return list(self.states.buffers.values())

    def views(self, buffers: Sequence[Tensor] | None = None) -> dict[str, dict[str, Tensor]]:
        """The states by kind and name; or what other buffers, one a kind, have in their places."""
        flat = self.buffers() if buffers is None else buffers
        return {
            kind: {
                name: buffer[slice(*self.places[name])].view(shape)
                for name, shape in self.shapes.items()
            }
            for kind, buffer in zip(self.states.buffers, flat, strict=True)
        }

    def by_matrix(self, turn: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Each parameter with its whole states on the device, by kind, to be changed."""
        visits = self.states.visits(list(self.places.values()), self.dtype, turn)
        for (name, shape), (_, held) in zip(self.shapes.items(), visits, strict=True):
            yield name, {kind: tensor.view(shape) for kind, tensor in held.items()}

    def by_piece(self, turn: int) -> Iterator[list[tuple[str, slice, dict[str, Tensor]]]]:
        """Pieces of the group: parameters with a range of each, and its states on the device."""
        pieces = pieces_of(0, self.count) if self.states.on_host else [(0, self.count)]
        for (start, stop), held in self.states.visits(pieces, self.dtype, turn):
            found = []
            for name, (first, last) in self.places.items():
                begin, end = max(first, start), min(last, stop)
                if begin < end:
                    there = slice(begin - start, end - start)
                    parts = {kind: tensor[there] for kind, tensor in held.items()}
                    found.append((name, slice(begin - first, end - first), parts))
            yield found
