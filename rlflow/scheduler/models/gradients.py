"""Bytes of gradients that are whole on a device, beside the sums that an optimizer reads.

Knows widths and how parameters lie; neither rows nor devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.modelfiles.chunks import WIDE_BYTES
from rlflow.scheduler.models.shapes import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeGradients:
    """Those of a model in numbers of `size` bytes, whose matrices `ranks` share.

    Its parameters are `gathered` for a pass or lie whole. It has logits if it `predicts`, made
    `in_chunks` of tokens or at once. Of a layer a rank computes with so many numbers less as are in
    experts that lie `elsewhere`.
    """

    shape: Shape
    size: int
    ranks: int
    gathered: bool
    predicts: bool
    trains_vocabulary: bool
    in_chunks: bool
    elsewhere: int = 0

    @property
    def _vocabulary(self) -> int:
        return self.shape.vocab * self.shape.hidden * self.trains_vocabulary

    @property
    def summed(self) -> int:
        """Bytes of the sum of a head's gradients over chunks, in float32.

        Where weights are float32 it is the gradient itself, which `embedded` counts of parameters
        that are not gathered.
        """
        own = self.size >= WIDE_BYTES and not self.gathered
        return 0 if own or not self.in_chunks else self._vocabulary * WIDE_BYTES // self.ranks

    @property
    def reduced(self) -> int:
        """Bytes of gradients of gathered parameters that a layer's backward finds.

        Those of the layer after it are on their way to the ranks, in float32; the head's wait to
        the end.
        """
        if not self.gathered:
            return 0
        head = self._vocabulary * self.size * self.predicts
        whole = (head + self.shape.layer * WIDE_BYTES) // self.ranks
        return whole - self.elsewhere * WIDE_BYTES

    @property
    def embedded(self) -> int:
        """Bytes of gradients of embedding and head on their way to their sum.

        Those of a head wait for the embedding's where both are the same weights. Where parameters
        are gathered they are among those that are whole.
        """
        if self.gathered:
            return 0
        tied = self.predicts and self.shape.embedding == self.shape.vocab * self.shape.hidden
        return (2 if tied else 1) * self._vocabulary * self.size // self.ranks
