"""Matrices of which ranks hold parts, whole on one rank each for as long as that computes.

In a round each of the ranks that share a model is the owner of one matrix. Parts go to owners and
results come back by an all-to-all along `fsdp`, where they are rows, and one along `tp`. A rank
then computes one matrix in as many as there are ranks, and sends and receives what it holds of a
round twice. Were every matrix gathered by all, each would compute all of them: of a
7B model that is as much as an update on 11,000 tokens. This file knows no optimizer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.engines.hf.sharded.mesh import Axis, MeshRanks, chunk
from rlflow.engines.hf.sharded.model import ShardedModel

Size = tuple[int, ...]


class WholeMatrices:
    """The named matrices of a model, largest first, so that those of a round are alike."""

    def __init__(self, model: ShardedModel, names: Sequence[str]) -> None:
        self.model = model
        self.ranks: MeshRanks = model.ranks
        self.names = sorted(names, key=lambda name: -math.prod(self.shape(name)))

    def shape(self, name: str) -> Size:
        """The shape of a whole matrix."""
        return whole_shape(self.model, name)

    def computed(
        self, shards: Mapping[str, Tensor], compute: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """What `compute` makes of each whole matrix, of its shape: this rank's part in `dtype`.

        Of replicas each computes for itself, from the same numbers. All ranks take part.
        """
        tp, fsdp = self.ranks.sizes["tp"], self.ranks.sizes["fsdp"]
        for first in range(0, len(self.names), fsdp * tp):
            starts = range(first, first + fsdp * tp, tp)
            blocks = [self.names[start : start + tp] for start in starts]
            yield from self._round(blocks, shards, compute, dtype)

    def _round(
        self,
        blocks: list[list[str]],
        shards: Mapping[str, Tensor],
        compute: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> Iterator[tuple[str, Tensor]]:
        """One matrix an owner: ranks along `fsdp` have a block each, those along `tp` one of it."""
        mine = blocks[self.ranks.place("fsdp")]
        owned = mine[self.ranks.place("tp") :][:1]
        sent = [[shards[name] for name in block] for block in blocks]
        whole = self._together(mine, owned, sent, dtype)
        made = [compute(matrix) for matrix in whole]
        del whole
        shapes = [[tuple(shards[name].shape) for name in block] for block in blocks]
        found = self._apart(mine, owned, made, shapes, dtype)
        for block, tensors in zip(blocks, found, strict=True):
            yield from zip(block, tensors, strict=True)

    def _together(
        self,
        mine: list[str],
        owned: list[str],
        sent: list[list[Tensor]],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """The whole matrices of `owned`, of what ranks have `sent` of their blocks."""
        tp, fsdp = range(self.ranks.sizes["tp"]), range(self.ranks.sizes["fsdp"])
        rows = [[self._rows(name, f) for name in mine] for f in fsdp]
        found = self._swap("fsdp", sent, rows, dtype)
        held = [torch.cat(parts) for parts in zip(*found, strict=True)]
        del found
        columns = [[self._columns(name, t) for name in owned] for t in tp]
        found = self._swap("tp", [held[t : t + 1] for t in tp], columns, dtype)
        return [self._joined(name, [one for (one,) in found]) for name in owned]

    def _apart(
        self,
        mine: list[str],
        owned: list[str],
        made: list[Tensor],
        shapes: list[list[Size]],
        dtype: torch.dtype,
    ) -> list[list[Tensor]]:
        """Parts for this rank, of the `shapes` of all blocks, of what owners have `made`."""
        tp, fsdp = range(self.ranks.sizes["tp"]), range(self.ranks.sizes["fsdp"])
        cuts = [[self._part(n, m, t) for n, m in zip(owned, made, strict=True)] for t in tp]
        place = self.ranks.place("tp")
        columns = [[self._columns(name, place) for name in mine[t : t + 1]] for t in tp]
        held = [one for each in self._swap("tp", cuts, columns, dtype) for one in each]
        return self._swap("fsdp", [[self._shard(m, f) for m in held] for f in fsdp], shapes, dtype)

    def _rows(self, name: str, place: int) -> Size:
        """What a rank along `fsdp` holds of the part of a matrix that is on its `tp` rank."""
        rows, columns = self.model.parameters[name].shape
        start, stop = chunk(rows, self.ranks.sizes["fsdp"], place)
        return stop - start, columns

    def _columns(self, name: str, place: int) -> Size:
        """What a rank along `tp` has of a matrix when its rows are together."""
        shape = list(self.shape(name))
        cut = self.model.cuts.get(name)
        if cut is not None:
            start, stop = chunk(cut.size, self.ranks.sizes["tp"], place)
            shape[cut.dim] = stop - start
        return tuple(shape)

    def _joined(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """A matrix of what ranks along `tp` have of it; all have all of one that is not cut."""
        cut = self.model.cuts.get(name)
        return parts[0] if cut is None else torch.cat(list(parts), cut.dim)

    def _part(self, name: str, matrix: Tensor, place: int) -> Tensor:
        cut = self.model.cuts.get(name)
        if cut is None:
            return matrix
        start, stop = chunk(cut.size, self.ranks.sizes["tp"], place)
        return matrix.narrow(cut.dim, start, stop - start)

    def _shard(self, matrix: Tensor, place: int) -> Tensor:
        start, stop = chunk(len(matrix), self.ranks.sizes["fsdp"], place)
        return matrix[start:stop]

    def _swap(
        self,
        axis: Axis,
        sent: Sequence[Sequence[Tensor]],
        shapes: Sequence[Sequence[Size]],
        dtype: torch.dtype,
    ) -> list[list[Tensor]]:
        """What each rank along an axis sends this one, which has `sent` for each; in `dtype`."""
        if axis not in self.ranks.groups:
            return [[tensor.to(dtype) for tensor in each] for each in sent]
        counts = [sum(tensor.numel() for tensor in each) for each in sent]
        out = torch.empty(sum(counts), dtype=dtype, device=self.model.device)
        own = torch.split(out, [tensor.numel() for each in sent for tensor in each])
        for part, tensor in zip(own, itertools.chain.from_iterable(sent), strict=True):
            part.view(tensor.shape).copy_(tensor)
        sizes = [[math.prod(shape) for shape in each] for each in shapes]
        come = torch.empty(sum(map(sum, sizes)), dtype=dtype, device=self.model.device)
        dist.all_to_all_single(
            come, out, list(map(sum, sizes)), counts, group=self.ranks.groups[axis]
        )
        parts = iter(torch.split(come, list(itertools.chain.from_iterable(sizes))))
        return [[next(parts).view(shape) for shape in each] for each in shapes]


def whole_shape(model: ShardedModel, name: str) -> Size:
    """The shape of a parameter of which this rank has a part."""
    found = list(model.parameters[name].shape)
    cut = model.cuts.get(name)
    if cut is not None:
        found[cut.dim] = cut.size
    return tuple(found)
