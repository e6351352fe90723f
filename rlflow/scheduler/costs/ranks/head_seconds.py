"""Seconds of a model's head beside its products: distributions read and written, their gradient.

By Triton's kernels where those compute them, else by torch's operators. Knows what a rank has;
neither layers nor a graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlflow.modelfiles.chunks import PLAIN, PRODUCT, WIDE_BYTES, chunk_tokens
from rlflow.modelfiles.kernels import head
from rlflow.scheduler.costs.ranks.exchanges import RankExchanges
from rlflow.scheduler.devices import efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSeconds(RankExchanges):
    """Seconds of the head of a model on its ranks; what they are and hold, `RankMemory` says."""

    def scored(self, predictions: float) -> float:
        """Seconds until so many distributions have given log-probs and entropies."""
        moved = head.SCORED * self.size if self.by_rows else efficiency.SCORED_BYTES
        return self.over_vocabulary(predictions, self.logit(self.kind.scored, moved))

    def learned(self, predictions: float) -> float:
        """The same with a backward, in which logits are made again."""
        moved = head.LEARNED * self.size if self.by_rows else efficiency.LEARNED_BYTES
        return self.over_vocabulary(predictions, self.logit(self.kind.learned, moved))

    def summed(self, predictions: float) -> float:
        """Seconds to add the gradients of a pass's chunks of the head, where that is in float32."""
        if not (self.in_chunks and self.trains_vocabulary) or self.size >= WIDE_BYTES:
            return 0.0
        numbers = PRODUCT if self.by_rows else PLAIN
        at_once = chunk_tokens(self.own_vocabulary, self.size, numbers=numbers)
        weights = self.own_vocabulary * self.shape.hidden
        return self.read(math.ceil(predictions / at_once) * weights * head.SUMMED)

    def over_vocabulary(self, places: float, each: float) -> float:
        """Seconds of what is made of distributions at so many places, `each` a number."""
        return places * self.shape.vocab * each if self.predicts else 0.0

    def logit(self, on_cpu: float, moved: int) -> float:
        """Seconds of each logit: as measured of a CPU, else to read and write so many bytes."""
        return on_cpu if self.on_cpu else self.read(moved) / self.tp.ranks
