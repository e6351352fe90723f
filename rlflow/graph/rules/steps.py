"""Which updates take their optimizer steps in the order of the rows.

Such an update may begin before the last rows are there: its first steps need the first ones only;
and it may stop between two steps and let others go first.
"""

from __future__ import annotations

from rlflow.graph.graph import Node
from rlflow.graph.roles import Learning


def steps_in_order(node: Node) -> int:
    """How many optimizer steps each take the next rows of the batch; 1 where they do not.

    One pass over the batch, in mini-batches that are not shuffled.
    """
    learning = node.role(Learning)
    if learning is None or learning.shuffle or learning.epochs != 1:
        return 1
    return learning.mini_batches


def mini_batches(node: Node) -> int:
    """How many parts its rows are cut into, an optimizer step each; 1 where it takes none."""
    learning = node.role(Learning)
    return 1 if learning is None else int(learning.mini_batches)


def groups_may_part(node: Node) -> bool:
    """Whether the samples of a prompt may lie on several ranks: each is computed by itself.

    That holds of ops by row that make no rows of others, and of updates whose loss reads neither
    groups nor pairs: its sums are of all ranks in any case.
    """
    learning = node.role(Learning)
    if learning is not None:
        return not {"group", "pair"}.intersection(learning.loss.needs())
    return node.op.per == "row" and node.op.rows in ("same", "none")


def in_background(node: Node) -> bool:
    """Whether nothing is to wait for a node that could do something else."""
    learning = node.role(Learning)
    return learning is not None and learning.background
