"""What becomes of the rows of a rollout: all end, or it never drains, or those that are late go."""

from __future__ import annotations

from rlflow.graph.graph import Node
from rlflow.graph.roles import Balanced, Oversampled, Recalling
from rlflow.scheduler.costs.lengths import Load
from rlflow.scheduler.costs.pieces import Piece
from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.costs.rows.balanced import balanced_seconds
from rlflow.scheduler.costs.rows.oversampled import first_seconds
from rlflow.scheduler.costs.rows.steady import continuous_seconds


def rollout_seconds(roof: Roofline, node: Node, load: Load, piece: Piece) -> float:
    """Seconds of a rollout, or of a leg of it: until all rows have ended, or enough groups."""
    if (lasting := node.role(Recalling)) is not None:
        return continuous_seconds(roof, load, lasting.keep)
    some, moving = node.role(Oversampled), node.role(Balanced)
    if moving is not None and load.peers > 1:
        wanted = None if some is None else some.first_groups
        return balanced_seconds(roof, load, moving.every, wanted)
    if some is not None:
        return first_seconds(roof, load, some.first_groups)
    if not piece.leg:
        return roof.rollout(load)
    n = max(load.rows / load.prompts, 1.0) if piece.groups else 1
    return roof.rollout(load, piece.index, piece.count, n)
