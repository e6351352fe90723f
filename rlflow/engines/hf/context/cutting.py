"""Which of a packed pass's tokens each rank has, and which predictions it makes of them.

The flat tokens of all rows are cut, wherever rows begin and end: positions are those of whole rows,
and who may attend to whom is still what the layout of all tokens says. Ranks have one chunk each,
or two, an early and a late one: a causal mask gives those as much work together as any other two
(Brandon et al., "Striped Attention", arXiv:2311.09431, section 3, after which several libraries cut
so). A response token is predicted where its predictor lies, so that nothing is to be shifted over
a cut. This file knows neither processes nor attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlflow.batch import to_device
from rlflow.engines.hf.forward.packed import PackedLayout
from rlflow.engines.hf.forward.prefixes import Index


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCut:
    """So many flat tokens, `total`, over `ranks`, each of which has as many `chunks` as any other.

    Where they do not divide, what fills up the last chunks stands for no token.
    """

    total: int
    ranks: int
    chunks: int = 1

    @property
    def size(self) -> int:
        """Tokens of a chunk."""
        return -(-self.total // (self.ranks * self.chunks))

    @property
    def part(self) -> int:
        """Tokens of a rank."""
        return self.size * self.chunks

    def numbers(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, in the order of their tokens."""
        return (rank,) if self.chunks == 1 else (rank, 2 * self.ranks - 1 - rank)

    def places(self, rank: int) -> Index:
        """The flat token in every place of a rank's part, int64; from `total` on nobody's."""
        starts = np.array(self.numbers(rank), dtype=np.int64)[:, None] * self.size
        found: Index = (starts + np.arange(self.size)).reshape(-1)
        return found

    def owners(self, tokens: Index) -> tuple[Index, Index]:
        """Of flat tokens the rank that has each, and its place in that rank's part."""
        chunk, within = np.divmod(tokens, max(self.size, 1))
        if self.chunks == 1:
            return chunk, within
        late = chunk >= self.ranks
        rank = np.where(late, 2 * self.ranks - 1 - chunk, chunk)
        return rank, within + late * self.size

    def local(self, start: Index, stop: Index, rank: int, *, late: bool | None = None) -> Index:
        """What a rank has of each run of flat tokens: first place and how many, `[2, runs]`.

        One run, since what lies between two chunks of a run is the run's too. `late` names one of
        two chunks.
        """
        numbers = self.numbers(rank)
        chosen = range(self.chunks) if late is None else (int(late),)
        first, count = np.zeros_like(start), np.zeros_like(start)
        for place in reversed(chosen):
            base = numbers[place] * self.size
            low, high = (np.clip(each - base, 0, self.size) for each in (start, stop))
            first = np.where(high > low, low + place * self.size, first)
            count += high - low
        return np.stack([first, count])


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLayout(PackedLayout):
    """A rank's part of the `whole` layout's tokens; blocks and spans are the whole's alone.

    `places` int64 `[tokens]` are its flat tokens, where something fills up the whole's first. Of
    the whole's predictions it makes `own`, int64, and others that nobody reads, so that every rank
    makes `predictions`; `joined` int64 is where each of the whole's is among those of all ranks.
    """

    whole: PackedLayout
    cut: TokenCut
    rank: int
    places: Tensor
    own: Tensor
    joined: Tensor

    @property
    def of_all(self) -> PackedLayout:
        """See `PackedLayout.of_all`."""
        return self.whole

    @property
    def part(self) -> Index:
        """Its tokens among all, int64; -1 for what fills up the last."""
        places = self.cut.places(self.rank)
        return np.where(places < self.cut.total, places, -1)

    def taken(self, values: Tensor, nothing: float) -> Tensor:
        """See `PackedLayout.taken`."""
        found = values[self.places]
        found[torch.from_numpy(self.cut.places(self.rank) >= self.cut.total)] = nothing
        return found

    def predicted(self, values: Tensor) -> Tensor:
        """See `PackedLayout.predicted`."""
        found = values.new_zeros((self.predictions, *values.shape[1:]))
        found[: len(self.own)] = values[self.own]
        return found


def part_of_layout(whole: PackedLayout, ranks: int, rank: int, *, chunks: int) -> PartLayout:
    """The part of one of so many ranks, on the device where the whole is."""
    assert whole.predictors is not None
    device = whole.tokens.device
    cut = TokenCut(total=len(whole.tokens), ranks=ranks, chunks=chunks)
    places = cut.places(rank)
    filled = to_device(torch.from_numpy(np.where(places < cut.total, places, 0)), device)
    owner, place = cut.owners(whole.predictors)
    counts = np.bincount(owner, minlength=ranks)
    most = max(int(counts.max(initial=0)), 1) if len(owner) else 0
    by_rank = np.argsort(owner, kind="stable")
    joined = np.empty(len(owner), dtype=np.int64)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    joined[by_rank] = owner[by_rank] * most + within
    own = np.flatnonzero(owner == rank)
    targets = np.pad(place[own], (0, most - len(own)))
    return PartLayout(
        tokens=whole.tokens[filled],
        positions=whole.positions[filled],
        blocks=(),
        slots=None,
        targets=to_device(torch.from_numpy(targets), device),
        real=int((places < whole.real).sum()),
        predictions=most,
        longest=whole.longest,
        rows=whole.rows,
        whole=whole,
        cut=cut,
        rank=rank,
        places=filled,
        own=to_device(torch.from_numpy(own), device),
        joined=to_device(torch.from_numpy(joined), device),
    )
