"""Floating-point operations of a model's products: what a plan estimates and MFU is measured by.

A multiplication and an addition count as two. A forward takes 2 a parameter and token (of experts
those that the token chooses; the embedding is looked up, and the head computes for predictions
alone) and 4 a head's width and pair of a token with one that it attends to, in each layer and head:
2 for the score and 2 for the value. Of causal attention half of the square counts, so that a
row of n tokens has n (n + 1) / 2 pairs. A backward takes twice a forward. What is computed again
for a backward is not counted. (Chowdhery et al., "PaLM", 2022, appendix B, with 6 a parameter and
12 a layer, head, width and pair of a whole square; Narayanan et al., "Efficient large-scale
language model training on GPU clusters using Megatron-LM", 2021, section 3.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlflow.graph.placement import Recompute
from rlflow.scheduler.models.shapes import Shape

# Forward and backward together, in forwards.
TRAINED_FORWARDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductSizes:
    """What the products of a model are made of: parameters of its layers and head, and widths.

    `layers` are those with attention.
    """

    body: int
    head: int
    layers: int
    heads: int
    head_dim: int

    def forward(self, tokens: float, predictions: float, pairs: float) -> float:
        """Operations of a forward of tokens, of which so many predict, with pairs of attention."""
        attention = 4 * pairs * self.layers * self.heads * self.head_dim
        return 2 * self.body * tokens + 2 * self.head * predictions + attention


def recomputed_layers(recompute: Recompute, layers: int) -> int:
    """Layers of so many whose activations a backward computes again."""
    if isinstance(recompute, bool | str):
        return layers if recompute else 0
    return min(recompute, layers)


def product_sizes(shape: Shape, *, predicts: bool, ranks: int = 1) -> ProductSizes:
    """Those of a model that `predicts` tokens, or has no head over the vocabulary.

    On `ranks` beyond the key-value heads those compute the projections to them as often as they
    have them.
    """
    return ProductSizes(
        body=max(shape.active - shape.embedding, 0) + ranks * shape.repeated_keys(ranks),
        head=shape.vocab * shape.hidden if predicts else 0,
        layers=shape.attending,
        heads=shape.heads,
        head_dim=shape.head_dim,
    )


def sizes_from_json(found: Mapping[str, int]) -> ProductSizes:
    """Those that a run has noted."""
    return ProductSizes(**found)
