"""Rates of what a rank computes: products by their rows, attention by its kernel, memory.

By measured curves where there are any, else by the table. Knows what a rank has; no seconds of a
pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.scheduler.costs.ranks.attending import DTYPES
from rlflow.scheduler.costs.ranks.rank_memory import RankMemory
from rlflow.scheduler.devices import efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRates(RankMemory):
    """Rates of one model on its ranks; what they are and hold, `RankMemory` says."""

    def read(self, size: float) -> float:
        """Seconds to read bytes from a device's memory."""
        return size / (self.kind.bandwidth * self.kind.reached)

    def attending_rate(self, rate: float, row: float) -> float:
        """Flop/s of attention over rows of so many tokens, where all ranks compute at `rate`."""
        measured = self.kind.curves.attended(DTYPES.get(self.size, ""), row)
        if measured is not None:
            return measured * self.tp.ranks
        return rate * efficiency.attended(self.kind.chip, row)

    def filled(self, tokens: float) -> float:
        """The part of its rate that products of so many rows get, as measured or by their tiles."""
        width = self.shape.ffn / self.tp.ranks
        measured = self.kind.curves.filled(DTYPES.get(self.size, ""), tokens, width)
        if measured is not None:
            return measured
        return 1.0 if self.on_cpu else efficiency.filled(self.kind.chip, tokens, width)

    @property
    def attention_share(self) -> float:
        """What its kernel gets of FlashAttention-2's rate."""
        return efficiency.FLEX_SHARE if self.attention.by == "flex" else 1.0
