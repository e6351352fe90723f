"""Seconds in which ranks add up their shares of layers, gather parameters and share out gradients.

Knows what a rank has and what joins ranks; nothing of what is computed meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlflow.scheduler.costs.ranks.rank_rates import RankRates
from rlflow.scheduler.devices.collectives import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExchanges(RankRates):
    """What ranks that share a model send each other of its layers, and how long that takes."""

    def agreed(self, tokens: float) -> float:
        """Seconds of the two all-reduces a layer by which `tp` ranks add up their shares."""
        summed = self.tp.all_reduce(tokens * self.shape.hidden * self.size)
        return 2 * self.shape.layers * summed

    def agreed_passing(self, tokens: float) -> float:
        """The same in a forward or an update, where each rank may have its part of the sum.

        A reduce-scatter after a block, and an all-gather before the next one.
        """
        if not self.sequence:
            return self.agreed(tokens)
        size = tokens * self.shape.hidden * self.size
        return 2 * self.shape.layers * (self.tp.reduce_scatter(size) + self.tp.all_gather(size))

    def gathered(self) -> float:
        """Seconds until all layers have been whole once: an all-gather each."""
        return self._over_layers("gather", self.weights, self.experts.held * self.size)

    def shared_out(self, trained: float) -> float:
        """Seconds until a rank has its `trained` bytes of the sum of all gradients of a pass.

        A reduce-scatter a layer of what all ranks will have of it. On CPU devices that is taken to
        be as much as one of them will have. Adapters are beside experts, not in them.
        """
        ranks, same = (1, 1) if self.on_cpu else (self.fsdp.ranks, self.shard.ranks)
        share = self.shape.in_experts / self.shape.parameters if self.trains_vocabulary else 0.0
        apart = trained * share * (same if self.ep.ranks > 1 else ranks)
        return self._over_layers("scatter", ranks * trained * (1 - share) + apart, apart)

    def _over_layers(self, way: Literal["gather", "scatter"], size: float, experts: float) -> float:
        """Seconds to gather `size` bytes over all layers, or scatter sums; so many of `experts`.

        Those that lie apart go among the ranks that hold the same ones. An accelerator copies what
        it gathers out of one buffer, and gradients into one; that is counted of experts, which are
        many bytes for few products.
        """
        layers, apart = self.shape.layers + 1, experts if self.ep.ranks > 1 else 0.0
        found = layers * self._ring(self.fsdp, way, (size - apart) / layers)
        found += layers * self._ring(self.shard, way, apart / layers) if apart else 0.0
        beside = 0.0 if self.on_cpu or self.fsdp.ranks < 2 else self.read(2 * experts)
        return found + beside

    @staticmethod
    def _ring(group: Group, way: Literal["gather", "scatter"], size: float) -> float:
        return group.all_gather(size) if way == "gather" else group.reduce_scatter(size)
