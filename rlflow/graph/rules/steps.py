"""Which updates take their optimizer steps in the order of the rows.

Such an update may begin before the last rows are there: its first steps need the first ones only;
and it may stop between two steps and let others go first. One that makes a single step may add up
gradients meanwhile.
"""

from __future__ import annotations

import math

from rlflow.graph.graph import Node
from rlflow.graph.roles import Learning, SamplingOptions


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


def steps_of(node: Node) -> int:
    """How many optimizer steps it makes in an iteration, in all its epochs."""
    learning = node.role(Learning)
    return 1 if learning is None else int(learning.epochs * learning.mini_batches)


def one_step(node: Node) -> bool:
    """Whether it makes one optimizer step, whose gradients add up before all rows are known."""
    learning = node.role(Learning)
    return learning is not None and steps_of(node) == 1 and bool(learning.loss.adds_up)


def groups_may_part(node: Node) -> bool:
    """Whether the samples of a prompt may lie on several ranks: each is computed by itself.

    That holds of ops by row that make no rows of others, and of updates whose loss reads neither
    groups nor pairs: its sums are of all ranks in any case.
    """
    learning = node.role(Learning)
    if learning is not None:
        return not {"group", "pair"}.intersection(learning.loss.needs())
    return node.op.per == "row" and node.op.rows in ("same", "none")


def sample_pieces(node: Node, prompts: int, parts: int) -> int:
    """In how many equal pieces the samples of a prompt are drawn, so that every part has some.

    1 where there are prompts enough, or too few samples, or rows that nothing samples. Of the
    divisors of the number of samples the one whose fullest part has the fewest; of those that
    are alike the smallest, as a prompt is read once for each piece.
    """
    sampling = node.role(SamplingOptions)
    if sampling is None or node.op.rows != "expand" or node.op.per != "row" or not sampling.n:
        return 1
    many = int(sampling.n)
    if not prompts < parts <= prompts * many:
        return 1
    able = [pieces for pieces in range(2, many + 1) if many % pieces == 0]
    enough = [pieces for pieces in able if prompts * pieces >= parts]
    return min(enough, key=lambda p: (math.ceil(prompts * p / parts) * (many // p), p))


def in_background(node: Node) -> bool:
    """Whether nothing is to wait for a node that could do something else."""
    learning = node.role(Learning)
    return learning is not None and learning.background
