"""Experts of a mixture in numbers: what a rank has of them, and what a token sends and leaves.

Knows widths and how many ranks experts lie apart on; neither devices nor seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlflow.modelfiles.families import dispatch_finding
from rlflow.scheduler.models.shapes import Shape

# Of the tokens that experts of one of several ranks get, those of the fullest rank by those of the
# mean: assumed. Routers are trained to balance, and RL trains them on. Ranks that compute with all
# experts have their own tokens, and as many.
FULLEST_RANK = 1.25
# Times that a token's hidden state goes out and comes back in a layer's forward.
THERE_AND_BACK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a model whose layers `tp` ranks share, and that lie apart on `ep` of others.

    Numbers are of a rank. Of a dense model they are 0.
    """

    shape: Shape
    tp: int = 1
    ep: int = 1

    @property
    def uneven(self) -> float:
        """The tokens that the fullest rank computes with, by those of the mean."""
        return FULLEST_RANK if self.ep > 1 else 1.0

    @property
    def held(self) -> float:
        """Parameters in experts that it computes with, in all layers."""
        return self.shape.in_experts / (self.tp * self.ep)

    @property
    def elsewhere(self) -> float:
        """Parameters in experts of its `tp` rank's that other ranks compute with, in all layers."""
        return self.shape.in_experts / self.tp - self.held

    @property
    def active(self) -> float:
        """Parameters of the experts that a token passes through, of all ranks together."""
        shape = self.shape
        return shape.in_experts * shape.chosen / shape.experts if shape.experts else 0.0

    @property
    def width(self) -> float:
        """The width inside one expert, of three matrices."""
        count = self.shape.expert_layers * self.shape.experts * 3 * self.shape.hidden
        return self.shape.in_experts / count if count else 0.0

    @property
    def routed(self) -> float:
        """Numbers that a layer keeps of a token for its backward beside gate, up and their product.

        The hidden states that its experts read, and those that they make; the unit of the gate,
        which is not computed again; and what the fullest rank has more.
        """
        own = 2 * self.shape.hidden
        more = (self.uneven - 1) * (own + 3 * self.width)
        return self.shape.chosen * (own + more) / self.tp + self.units

    @property
    def units(self) -> float:
        """Numbers among them of the units of gates."""
        return self.shape.chosen * self.width * self.uneven / self.tp

    @property
    def picked(self) -> float:
        """Numbers of hidden states that a token's experts read in a layer, of the fullest rank."""
        return self.shape.chosen * self.shape.hidden * self.uneven / self.tp

    def rows(self, tokens: float) -> float:
        """Rows of the product of one expert, in the mean, where each rank has so many tokens."""
        shape = self.shape
        return tokens * self.ep * shape.chosen / shape.experts if shape.experts else 0.0

    @property
    def sent(self) -> float:
        """Numbers of a token that go one way in a layer, those to its own rank included.

        A hidden state for each rank with any of its experts; there with weights and int32 numbers
        of k experts, in two bytes each three numbers, of which half are counted each way.
        """
        return self.met * (self.shape.hidden + 1.5 * self.shape.chosen)

    @property
    def met(self) -> float:
        """Ranks along `ep` with any of a token's experts, where all sets of k are as likely."""
        if self.ep == 1:
            return 0.0
        experts, k = self.shape.experts, self.shape.chosen
        others = experts - experts // (self.tp * self.ep)
        return self.ep * (1 - math.comb(others, k) / math.comb(experts, k))


def apart_on(shape: Shape | None, fsdp: int, tp: int, host: int) -> Iterator[int]:
    """Numbers of ranks that experts may lie apart on: those of a `host`, twice that, and so on."""
    ep = min(host, fsdp)
    while shape is not None and 1 < ep <= fsdp:
        if dispatch_finding("", shape.family, shape.experts, ep, fsdp, tp) is None:
            yield ep
        ep *= 2
