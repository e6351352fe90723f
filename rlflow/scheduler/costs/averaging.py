"""What it costs to keep an average of a model's weights. Knows no graph."""

from __future__ import annotations

from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.plan.plan import Cost


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
