"""Tensors out of the files of a component, wherever their pieces are; only what is asked for.

torch is imported inside functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from rlflow.engines.reshard.boxes import intersection, volume
from rlflow.errors import CheckpointError, Finding
from rlflow.runtime.record.shards.places import SavedPiece, StoredFile, slices_within, whole_piece

if TYPE_CHECKING:
    from torch import Tensor


class StoredTensor:
    """One tensor of a component, as a slice of safetensors is: asked for its shape and parts."""

    def __init__(self, name: str, pieces: Sequence[tuple[SavedPiece, Any]]) -> None:
        self._name = name
        self._pieces = pieces
        self.shape = pieces[0][0].shape

    def get_shape(self) -> list[int]:
        """The whole tensor's shape."""
        return list(self.shape)

    def __getitem__(self, wanted: Any) -> Tensor:
        """The part that slices say, one a dimension; `...` is all of it.

        Of each piece just what lies in the part is read. Raises CheckpointError where no
        piece has an element of it.
        """
        import torch

        asked = [slice(None)] * len(self.shape) if wanted is ... else list(wanted)
        bounds = (each.indices(size) for each, size in zip(asked, self.shape, strict=True))
        box = tuple((start, max(start, stop)) for start, stop, _ in bounds)
        if len(self._pieces) == 1 and not self.shape:
            return _read(self._pieces[0][1], ())
        numel = volume(box)
        if numel == 0:  # such as rows in flight that have no token yet
            return _read(self._pieces[0][1], tuple(slice(0) for _ in box)).new_empty(
                [stop - start for start, stop in box]
            )
        made: Tensor | None = None
        filled = 0
        for place, stored in self._pieces:
            common = intersection(place.box, box)
            if common is None:
                continue
            part = _read(stored, slices_within(common, place.box))
            if common == box:
                return part
            if made is None:
                made = torch.empty([stop - start for start, stop in box], dtype=part.dtype)
            made[slices_within(common, box)] = part
            filled += part.numel()
        if filled != numel or made is None:
            raise CheckpointError(
                Finding(
                    code="E720",
                    what=f"pieces of {self._name!r} are missing in the checkpoint",
                    got=f"{filled:,} elements",
                    expected=f"{numel:,}",
                )
            )
        return made


def _read(stored: Any, where: tuple[slice, ...]) -> Tensor:
    found: Tensor = stored[where if where else ...]
    return found


@contextmanager
def open_component(files: Sequence[StoredFile]) -> Iterator[Mapping[str, StoredTensor]]:
    """The tensors of a component by name, as long as the block lasts; nothing is read before."""
    from safetensors import safe_open

    with ExitStack() as stack:
        pieces: dict[str, list[tuple[SavedPiece, Any]]] = {}
        for file in files:
            opened = stack.enter_context(safe_open(file.path, framework="pt"))
            for name in opened.keys():  # noqa: SIM118
                stored = opened.get_slice(name)
                place = file.pieces.get(name) or whole_piece(stored.get_shape())
                pieces.setdefault(name, []).append((place, stored))
        yield {name: StoredTensor(name, found) for name, found in pieces.items()}
