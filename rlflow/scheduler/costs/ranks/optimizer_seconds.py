"""Seconds of what an optimizer step has beside AdamW: averages of weights, orthogonal matrices.

Knows rooflines; no graph.
"""

from __future__ import annotations

import math

from rlflow.modelfiles.orthogonal import orthogonal_flops
from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.plan.plan import Cost

FULL_BYTES = 4
# How often Muon reads or writes what it steps, beyond AdamW: it and its momentum in four passes.
MUON_PASSES = 4


def averaging(roof: Roofline, trained: int, of: int, *, period: int, source: str) -> Cost:
    """The cost of taking `trained` weights, numbers of `of` bytes each, into an average of them.

    Both are read and one is written; of another dtype a weight is converted first. Taken every
    `period` iterations it costs so much less in each.
    """
    ranks = roof.tp.ranks * roof.fsdp.ranks
    whole = roof.shape.embedding * roof.size // ranks if of != roof.size else 0
    return Cost(
        seconds=roof.read((2 * roof.size + of) * trained) / period,
        transient=whole,
        holds=(("converted weight", whole),) if whole else (),
        source=source,
    )


def orthogonal_seconds(roof: Roofline, held: float) -> float:
    """Seconds of Muon beyond those of AdamW, of `held` numbers in matrices a rank.

    Each matrix is computed whole by one of the ranks that share it, where its parts come and from
    where they go back, as many at once as there are ranks.
    """
    shape, wide = roof.shape, max(roof.size, FULL_BYTES)
    size = wide if roof.kind.name == "cpu" else 2
    count = sum(number for *_, number in shape.matrices)
    rounds = math.ceil(count / (roof.tp.ranks * roof.fsdp.ranks))
    one = size * shape.in_matrices / count
    sent = 2 * rounds * (roof.tp.all_gather(one) + roof.fsdp.all_gather(one))
    flops = sum(orthogonal_flops(r, c) * number for r, c, number in shape.matrices)
    computed = flops / count * rounds / (roof.kind.rate(size) * roof.kind.sustained)
    return computed + sent + roof.read(MUON_PASSES * wide * held)
