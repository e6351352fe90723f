"""When the weights that an update begins with can stand for the policy that sampled its rows.

The ratio of a policy loss is taken against log-probs of an old policy. Where nothing has changed
the weights since the rows were sampled, the update's own forward gives them: the ratio is 1, and
a forward of the old policy is of no use. This is the one statement of when that is so. Ops choose
by it whose log-probs an update reads, a pass of the compiler leaves reads out by it, and the
verifier holds plans to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import Learning


def moved_by(model: str, *, epochs: int, mini_batches: int, before: Sequence[str]) -> str:
    """What moves the weights of `model` between sampling and an optimizer step; `` for nothing.

    `before` names the updates of the model that come earlier in an iteration, if any does.
    """
    if before:
        return f"{before[0]} changes {model} in between"
    counts = {"epochs": epochs, "mini-batches": mini_batches}
    several = " of ".join(f"{count} {name}" for name, count in counts.items() if count > 1)
    return f"with {several} the ratio needs log-probs from before the first step" if several else ""


def why_not_current(graph: Graph, node: Node) -> str:
    """Why an update cannot take its ratio against the weights it begins with; `` if it can.

    A loss without an old policy takes no ratio. A correction makes up for rows of older weights,
    not for steps that were made since: its proximal policy is that of the first one.
    """
    learning = node.as_a(Learning)
    loss = learning.loss
    if not getattr(loss, "reads_old", False):
        return ""
    names = [update.name for update in graph.updates(str(node.model))]
    counts = {"epochs": learning.epochs, "mini_batches": learning.mini_batches}
    moved = moved_by(str(node.model), before=names[: names.index(node.name)], **counts)
    if moved or loss.correction is not None:
        return moved
    return _older_rows(graph, node)


def _older_rows(graph: Graph, node: Node) -> str:
    """How much older its rows may be: by their rollout, or as `staleness` is stamped on it."""
    origin = graph.node(node.rows_of) if node.rows_of else node
    lag = graph.lag(origin) if origin.op.use == "rollout" else 0
    lag = max(lag, node.as_a(Learning).staleness)
    if not lag:
        return ""
    updates = f"{lag} update{'s' if lag > 1 else ''}"
    return f"the samples of {origin.name} may come from weights that are {updates} older"
