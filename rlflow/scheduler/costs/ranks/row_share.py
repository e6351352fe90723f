"""What ranks that have parts of the same rows send each other between tokens, and hold for it.

By heads each gets all tokens of its own, and sends back what it makes of them, in layers that carry
states as in attention; round a ring keys and values are passed on, and in a backward their
gradients after them. Knows widths and links;
neither rows nor plans.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.graph.placement import ContextBy
from rlflow.modelfiles.chunks import WIDE_BYTES
from rlflow.scheduler.devices.collectives import ALONE, Group
from rlflow.scheduler.models.shapes import Shape

# Copies of what is sent on its way: as it is put together, as it leaves, as it comes.
ON_ITS_WAY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShare:
    """The ranks of a `group`, of which `tp` others share each layer, with numbers of `size` bytes.

    Without others nothing is sent, and nothing held.
    """

    shape: Shape
    size: int
    by: ContextBy | None = None
    group: Group = ALONE
    tp: int = 1

    @property
    def heads(self) -> float:
        """Heads of queries that a rank's layer has of a token before any exchange."""
        return self.shape.heads / self.tp

    @property
    def keys(self) -> float:
        """Heads of keys likewise; repeated where ranks are more, or do not divide them."""
        own = self.shape.kv_heads / self.tp
        if self.by != "ulysses" or own % self.group.ranks == 0:
            return own
        return self.heads if self.group.ranks % own else float(self.group.ranks)

    @property
    def sent(self) -> float:
        """Bytes a token that a rank sends in a forward through all layers."""
        states = self.shape.carrying
        carried = states.layers * (self._entering + states.leaving) * self.size
        whole = carried * (1 - 1 / self.group.ranks)
        return self.shape.attending * self._sent_to_attend + whole

    @property
    def sent_back(self) -> float:
        """The same in a backward; a ring sends keys and values once more, and wide gradients."""
        if self.by == "ulysses":
            return self.sent
        wide = self.group.ranks * 2 * self.keys * self.shape.head_dim * WIDE_BYTES
        return self.sent + self.shape.attending * wide

    @property
    def _entering(self) -> int:
        """Numbers of a token that the heads of a layer that carries states are made of."""
        return self.shape.carrying.entering_on(self.group.ranks)

    @property
    def _sent_to_attend(self) -> float:
        """Bytes a token and layer with attention that a rank sends in a forward."""
        width, ranks = self.shape.head_dim * self.size, self.group.ranks
        if self.by == "ulysses":
            return 2 * (self.heads + self.keys) * width * (1 - 1 / ranks)
        return (ranks - 1) * 2 * self.keys * width

    def forward(self, tokens: float) -> float:
        """Seconds in which a layer's attention exchanges `tokens` of each rank."""
        if self.group.ranks < 2:
            return 0.0
        width = self.shape.head_dim * self.size * tokens
        if self.by == "ulysses":
            into = self.group.all_to_all((self.heads + 2 * self.keys) * width)
            return into + self.group.all_to_all(self.heads * width)
        return (self.group.ranks - 1) * self.group.shift(2 * self.keys * width)

    def backward(self, tokens: float) -> float:
        """The same in its backward."""
        if self.group.ranks < 2 or self.by == "ulysses":
            return self.forward(tokens)
        wide = 2 * self.keys * self.shape.head_dim * WIDE_BYTES * tokens
        return self.forward(tokens) + self.group.ranks * self.group.shift(wide)

    def waited(self, tokens: float, attended: float, forwards: float, backwards: int) -> float:
        """Seconds of so many passes over all layers that are not beside `attended` ones of each.

        A ring's messages go while the keys before them are computed with, in a forward for so many
        seconds, and for twice as many in a backward.
        """
        if self.group.ranks < 2:
            return 0.0
        hidden = attended if self.by == "ring" else 0.0
        into, back = (self.shape.attending * way(tokens) for way in (self.forward, self.backward))
        carried = (forwards + backwards) * self.carried(tokens)
        return (
            carried + forwards * max(0.0, into - hidden) + backwards * max(0.0, back - 2 * hidden)
        )

    def carried(self, tokens: float) -> float:
        """Seconds in which all layers that carry states exchange `tokens` of each rank, one way."""
        states, width = self.shape.carrying, self.size * tokens
        ways = (self._entering * width, states.leaving * width) if states.layers else ()
        return states.layers * sum(self.group.all_to_all(way) for way in ways)

    @property
    def kept(self) -> float:
        """Bytes of a token that a layer keeps for its backward beyond those of one rank.

        By heads what attention makes is kept as it is made and as it comes back, and repeated keys.
        """
        if self.group.ranks < 2 or self.by != "ulysses":
            return 0.0
        repeated = 2 * (self.keys - self.shape.kv_heads / self.tp)
        return (self.heads + repeated) * self.shape.head_dim * self.size

    @property
    def working(self) -> float:
        """Bytes of a token that one layer holds while it exchanges, in the pass that holds most.

        Round a ring outputs and gradients are added up in float32.
        """
        if self.group.ranks < 2:
            return 0.0
        width = self.shape.head_dim
        if self.by == "ulysses":
            most = max((self.heads + 2 * self.keys) * width, self._entering)
            return ON_ITS_WAY * most * self.size
        passing = 2 * self.keys * width
        wide = self.heads * width * WIDE_BYTES + 3 * passing * WIDE_BYTES
        return ON_ITS_WAY * passing * self.size + wide
