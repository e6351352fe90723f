"""Which updates take their optimizer steps in the order of the rows.

Such an update may begin before the last rows are there: its first steps need the first ones only;
and it may stop between two steps and let others go first.
"""

from __future__ import annotations

from rlflow.graph.graph import Node


def steps_in_order(node: Node) -> int:
    """How many optimizer steps each take the next rows of the batch; 1 where they do not.

    One pass over the batch, in mini-batches that are not shuffled.
    """
    params = dict(node.params)
    in_order = node.op.use == "train" and params.get("shuffle") is False
    return int(params["mini_batches"]) if in_order and params["epochs"] == 1 else 1


def in_background(node: Node) -> bool:
    """Whether nothing is to wait for a node that could do something else."""
    return bool(dict(node.params).get("background"))
