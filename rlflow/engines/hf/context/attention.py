"""Attention of a pass whose tokens lie on several ranks, by heads or round a ring.

The attention state that a model runs under on each of them. This file knows neither losses nor how
rows are cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.engines.hf.context.cutting import PartLayout, part_of_layout
from rlflow.engines.hf.context.exchange import (
    JoinedPredictions,
    gathered_rows,
    heads_of_own,
    tokens_of_all,
)
from rlflow.engines.hf.context.ring import RingAttention, Steps, ring_steps
from rlflow.engines.hf.forward.attention import PackedAttention, Traits
from rlflow.engines.hf.forward.packed import PackedLayout
from rlflow.engines.hf.forward.prefixes import Index
from rlflow.engines.hf.forward.sequences import (
    FlashSequences,
    PlainSequences,
    SequenceAttention,
    Visible,
    attends_by,
)
from rlflow.engines.hf.mixers.padded import PaddedValues
from rlflow.graph.placement import ContextBy


@dataclass(frozen=True, slots=True)
class ContextRanks:
    """The ranks of a `group`, which have parts of the same rows, and how they attend."""

    group: dist.ProcessGroup
    by: ContextBy

    @property
    def dense(self) -> bool | None:
        """A ring goes by runs of tokens, which a layout with blocks has not."""
        return None if self.by == "ulysses" else False

    @property
    def ranks(self) -> int:
        """How many there are."""
        return dist.get_world_size(self.group)

    def part_of(self, whole: PackedLayout) -> PartLayout:
        """The part of a layout that is on this rank."""
        chunks = 1 if self.by == "ulysses" else 2
        return part_of_layout(whole, self.ranks, dist.get_rank(self.group), chunks=chunks)

    def flat_tokens_in(self, part: PackedLayout) -> Index:
        """Which of all flat tokens a part has."""
        assert isinstance(part, PartLayout)
        return part.part

    def attention(self, layout: PackedLayout, routing: object) -> PackedAttention:
        """What a pass over a part runs under."""
        assert isinstance(layout, PartLayout)
        made = HeadsAttention if self.by == "ulysses" else RoundAttention
        return made(layout, group=self.group, routing=routing)

    def joined(self, own: Tensor, layout: PackedLayout) -> Tensor:
        """All predictions of a pass, of its own."""
        assert isinstance(layout, PartLayout)
        found: Tensor = JoinedPredictions.apply(  # type: ignore[no-untyped-call]
            own, layout.joined, layout.own, self.group
        )
        return found

    def of_all_tokens(self, own: Tensor, layout: PackedLayout) -> Tensor:
        """Whole numbers of all flat tokens, of those of its own."""
        assert isinstance(layout, PartLayout)
        rank, place = layout.cut.owners(np.arange(layout.cut.total))
        order = torch.from_numpy(rank * layout.cut.part + place).to(own.device)
        # Gloo has no int16.
        return gathered_rows(own.int(), self.group)[order].to(own.dtype)


class HeadsAttention(PackedAttention):
    """All tokens attend on every rank, each with a part of the heads."""

    layout: PartLayout

    def __init__(
        self, layout: PartLayout, *, group: dist.ProcessGroup, routing: object = None
    ) -> None:
        super().__init__(layout, routing=routing)
        self.group = group
        self.inner = PackedAttention(layout.whole)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, traits: Traits) -> Tensor:
        """The attention output of this rank's tokens."""
        if traits.sinks is not None:
            own = traits.sinks.chunk(dist.get_world_size(self.group))
            traits = replace(traits, sinks=own[dist.get_rank(self.group)])
        queries, keys, values = tokens_of_all(q, k, v, self.layout.cut.total, self.group)
        made = self.inner.attend(layer, queries, keys, values, traits)
        return heads_of_own(made, self.layout.cut.part, self.group)


class RoundAttention(PackedAttention):
    """Keys and values go round; a rank's own tokens attend with all heads."""

    layout: PartLayout

    def __init__(
        self, layout: PartLayout, *, group: dist.ProcessGroup, routing: object = None
    ) -> None:
        super().__init__(layout, routing=routing)
        self.group = group
        self._steps: Steps | None = None

    @property
    def steps(self) -> Steps:
        """What is computed with whose keys, the same in every layer."""
        if self._steps is None:
            assert self.layout.whole.spans is not None
            self._steps = ring_steps(self.layout.whole.spans, self.layout.cut, self.layout.rank)
        return self._steps

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, traits: Traits) -> Tensor:
        """The attention output of this rank's tokens; windows shorter than rows are not for it."""
        assert traits.window is None or traits.window >= self.layout.longest, traits
        seen = Visible(scale=traits.scaling, causal=True, softcap=traits.softcap)
        fast = attends_by(q, v, seen) == "varlen"
        way: SequenceAttention = FlashSequences() if fast else PlainSequences()
        if fast and v.shape[-1] < q.shape[-1]:
            way = PaddedValues(way)
        made: Tensor = RingAttention.apply(  # type: ignore[no-untyped-call]
            q, k, v, traits.sinks, self.steps, seen, way, self.group
        )
        return made
