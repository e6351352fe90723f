"""Bytes that decoder layers hold of a token, and what a forward leaves of them to its backward.

Knows widths; neither rows nor devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.graph.placement import Recompute
from rlflow.modelfiles.chunks import WIDE_BYTES
from rlflow.modelfiles.hosted import layers_on_device, layers_on_host
from rlflow.scheduler.models.flops import recomputed_layers
from rlflow.scheduler.models.mixtures import Experts
from rlflow.scheduler.models.shapes import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """The layers of a model in numbers of `size` bytes, each shared by `ranks`.

    Those have all tokens between the blocks of a layer, or of `sequence` ranks each a part; experts
    lie apart on `ep` others. Ranks that exchange tokens keep `exchanged` bytes of each more. What
    layers leave to a backward goes to the host in between if they are `hosted`. Where a layer is
    computed again but for its attention, what that made is kept if it `keeps_attention`.
    """

    shape: Shape
    size: int
    ranks: int = 1
    sequence: int = 1
    ep: int = 1
    exchanged: float = 0.0
    hosted: bool = False
    keeps_attention: bool = True

    @property
    def between(self) -> float:
        """Numbers of a token that lie between blocks on a rank: the input of one."""
        return self.shape.hidden / self.sequence

    @property
    def kept(self) -> float:
        """Bytes of a token for a layer's backward; below float32 norms keep float32 copies."""
        wide = 0 if self.size >= WIDE_BYTES else 8 * self.between
        return self.passing + self.exchanged + wide + self.normed

    @property
    def normed(self) -> float:
        """Bytes of a token that norms of queries and keys keep: float32 inputs, and outputs."""
        shape = self.shape
        heads = (shape.heads + shape.kv_heads) / self.ranks if shape.head_norms else 0
        return heads * shape.head_dim * (max(self.size, WIDE_BYTES) + self.size)

    @property
    def passing(self) -> float:
        """Bytes that one layer holds of a token while it computes.

        In and out of two norms; queries, keys, values and what attention makes of them; gate,
        up and their product (Korthikanti et al. 2022, for gated layers whose unit is computed
        again), and of experts what they read and make. What goes into blocks is on every rank
        whole, and so is what goes into norms where ranks do not share the sequence.
        """
        shape, experts = self.shape, Experts(shape=self.shape, tp=self.ranks, ep=self.ep)
        heads = shape.heads + shape.kv_heads + self.ranks * shape.repeated_heads(self.ranks)
        cut = 2 * heads * shape.head_dim + 3 * shape.ffn
        beside = 2 * self.between + 2 * shape.hidden
        return (beside + cut / self.ranks + experts.routed) * self.size

    @property
    def for_weights(self) -> float:
        """Bytes of a token that one layer's gradients of weights are made of.

        Inputs and gradients of outputs of its products, whole on ranks that share the sequence; not
        the unit of an expert's gate, nor what routers read.
        """
        experts = Experts(shape=self.shape, tp=self.ranks, ep=self.ep)
        whole = 2 * (self.shape.hidden - self.between)
        return self.passing + (whole - experts.units) * self.size

    @property
    def attended(self) -> float:
        """Bytes of what one layer's attention makes of a token, with a log-sum for each head."""
        return self.shape.heads * (self.shape.head_dim * self.size + WIDE_BYTES) / self.ranks

    @property
    def gated(self) -> float:
        """Bytes of a token that a backward of gate, up and their product makes beside them."""
        return 3 * self.shape.ffn * self.size / self.ranks

    def worked_on(self, tokens: float, recompute: Recompute) -> float:
        """Bytes of the activations that a layer's backward finds: what is left, or one layer more.

        A layer that is computed again comes after layers that are not, whose bytes are free by
        then.
        """
        again = recomputed_layers(recompute, self.shape.layers)
        none_left = again == self.shape.layers
        return self.left(tokens, recompute) + none_left * self.kept * tokens

    def left(self, tokens: float, recompute: Recompute) -> float:
        """Bytes that a forward leaves to its backward.

        Of what goes to the host two layers are there; what attention makes stays.
        """
        again = recomputed_layers(recompute, self.shape.layers)
        there = layers_on_device if self.hosted else int
        left = there(self.shape.layers - again) * self.kept * tokens
        left += there(again) * self.between * self.size * tokens
        if recompute == "selective" and self.keeps_attention:
            left += again * self.attended * tokens
        return left

    def sent(self, tokens: float, recompute: Recompute) -> float:
        """Bytes that go to the host in a forward, and come back in its backward."""
        leaving = layers_on_host(self.shape.layers) if self.hosted else 0
        again = min(recomputed_layers(recompute, self.shape.layers), leaving)
        return (again * self.between * self.size + (leaving - again) * self.kept) * tokens
