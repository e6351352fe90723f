"""A model's stages in a pipeline, by their sizes: how its layers are cut, and what each has.

Knows widths and numbers of layers; neither devices nor seconds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from rlflow.modelfiles.layouts.stages import most_stages, stage_layers
from rlflow.scheduler.models.shapes import Shape


def cut_of(shape: Shape, count: int, *, predicts: bool) -> tuple[int, ...]:
    """How many layers each of `count` stages has, so that the heaviest is as light as can be.

    A stage weighs the parameters that a token passes in it. The first has the embedding, and
    the layers that a tower adds to, the last a head where the model `predicts` tokens.
    """
    if count == 1:
        return (shape.layers,)
    words = shape.vocab * shape.hidden
    layer = max(shape.active - shape.embedding, shape.layers) / shape.layers
    return stage_layers(
        shape.layers,
        min(count, most_stages(shape.family, shape.layers)),
        layer=layer,
        first=words,
        last=words * predicts,
        least=max(1, shape.family.deep),
    )


@lru_cache(maxsize=4096)
def stage_shapes(shape: Shape, pp: int, *, virtual: int = 1, predicts: bool) -> tuple[Shape, ...]:
    """The shape of the stages at each place along `pp`, as if they were a model of their own.

    Each place has `virtual` stages. One between the first and the last has no words, and the first
    alone sees pictures.
    """
    stages = cut_of(shape, pp * virtual, predicts=predicts)
    cut = [sum(stages[place::pp]) for place in range(min(pp, len(stages)))]
    if len(cut) == 1:
        return (shape,)
    words = shape.vocab * shape.hidden
    found = []
    for place, layers in enumerate(cut):
        first, last = place == 0, place == len(cut) - 1
        own = words if first or (last and predicts) else 0
        seen = shape if first else replace(shape, **_blind(shape))
        found.append(_of_layers(seen, layers, own, words=first or last))
    return tuple(found)


def _blind(shape: Shape) -> dict[str, Any]:
    """What a shape has without its tower."""
    seen = dict.fromkeys(("tower", "projector"), 0) | dict.fromkeys(("eyes", "sight"))
    matrices = tuple((high, wide, own) for high, wide, own, _ in _matrices(shape))
    seen |= {"matrices": matrices, "seen_matrices": ()}
    return seen | {"parameters": shape.parameters - shape.tower}


def _matrices(shape: Shape) -> list[tuple[int, int, int, int]]:
    """Rows and columns of matrices, how many of them are in layers, and how many in the tower."""
    seen = {(rows, columns): count for rows, columns, count in shape.seen_matrices}
    each = ((*size, seen.get(size[:2], 0)) for size in shape.matrices)
    return [(high, wide, count - towers, towers) for high, wide, count, towers in each]


def _of_layers(shape: Shape, layers: int, embedding: int, *, words: bool) -> Shape:
    def part(whole: int) -> int:
        return whole * layers // shape.layers

    body = max(shape.parameters - shape.embedding - shape.tower, 0)
    # A stage has its part of the experts, whatever number of layers they are counted in: of fewer
    # idle ones more of its parameters would be those of every token.
    matrices = ((high, wide, part(own) + seen) for high, wide, own, seen in _matrices(shape))
    mixtures = max(1, round(shape.expert_layers * layers / shape.layers))
    return replace(
        shape,
        parameters=part(body) + embedding + shape.tower,
        embedding=embedding,
        layers=layers,
        vocab=shape.vocab if words else 0,
        idle=part(shape.idle),
        routed=shape.chosen * mixtures,
        without_attention=part(shape.without_attention),
        convolved=part(shape.convolved),
        recurrent=part(shape.recurrent),
        carrying=replace(shape.carrying, layers=part(shape.carrying.layers)),
        norms=part(shape.norms),
        routers=part(shape.routers),
        matrices=tuple(matrices),
    )
