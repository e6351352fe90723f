"""Why a rollout that is cut hands on rows as they end, or prompts, and not complete groups.

An update follows complete groups where it adds up their gradients; what keeps it from that is said
in the order in which `chains.py` asks for it. Knows the graph and a plan that is bound.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import Learning, SamplingOptions
from rlflow.graph.rules.steps import steps_in_order
from rlflow.graph.user.dispatch import RULES
from rlflow.scheduler.passes.stream.chains import (
    Chain,
    adds_gradients,
    follows_groups,
    runs_apart,
    whole_groups,
)
from rlflow.scheduler.plan.plan import Action, Plan
from rlflow.scheduler.plan.text import counted, duration

HANDED_ON = {"prompts": "prompts, decoded chunk by chunk,", "finish": "rows in order of their end"}


def chunks_of_rows(plan: Plan, chain: Chain, count: int) -> str:
    """Why the chunks of a chain are no complete groups; empty where that is as it was asked for."""
    if chain.by == "groups":
        return ""
    graph, runs = plan.graph, _runs(plan)
    root = runs[chain.root.name]
    why = _of_rollout(chain.root, root)
    if not why and chain.by == "finish":
        why = "; ".join(dict.fromkeys(_of_updates(plan, chain, count)))
        if not why and not any(_learning_from(graph, chain.root)):
            why = "no update learns from them"
    if not why:
        return ""
    return f"{chain.root.name} hands on {HANDED_ON[chain.by]} instead of complete groups: {why}"


def rows_are_shorter(rows: float, groups: float) -> str:
    """Why chunks are of rows where complete groups would be followed: seconds of an iteration."""
    return (
        f"chunks are of rows in order of their end instead of complete groups: {duration(rows)} an "
        f"iteration by estimate, {duration(groups)} with updates that add up gradients of groups"
    )


def groups_do_not_fit(what: str) -> str:
    """Why chunks are of rows where complete groups were refused."""
    return f"chunks are of rows in order of their end: of complete groups {what}"


def _runs(plan: Plan) -> dict[str, Action]:
    return {str(action.node): action for action in plan.actions if action.kind == "run"}


def _of_rollout(root: Node, run: Action) -> str:
    """What keeps a rollout itself from handing on groups; empty where nothing does."""
    if root.as_a(SamplingOptions).ignore_eos:
        return "all responses end together (ignore_eos=True)"
    if root.op.resumed is None:
        return f"{root.op.name} is not left in the middle of its rows"
    if run.takes is not None and run.takes.rule not in RULES:
        return f"its prompts are shared out by {run.takes.rule!r}, a rule of its own"
    return ""


def _of_updates(plan: Plan, chain: Chain, count: int) -> Iterator[str]:
    """What keeps each update of a rollout's rows from adding up gradients of groups."""
    runs, root = _runs(plan), chain.root
    for node in _learning_from(plan.graph, root):
        if not adds_gradients(plan, node):
            yield f"{node.name} {_not_adding(plan.graph, node, count)}"
        elif not runs_apart(runs[node.name], runs[root.name]):
            yield f"{node.name} {_not_apart(runs[node.name], runs[root.name])}"
        elif not whole_groups(plan.graph, root, runs[root.name], count):
            yield _too_few(plan.graph, root, runs[root.name], count)
        else:
            between = _between(plan.graph, root, node)
            late = [n.name for n in between if n != root and not follows_groups(n, runs[n.name])]
            read = f"{' and '.join(late)} of all rows" if late else "other rows as well"
            yield f"{node.name} reads {read}"


def _learning_from(graph: Graph, root: Node) -> list[Node]:
    """The updates of what a rollout makes, or of what follows from it."""
    return [
        node
        for node in graph.nodes
        if node.op.use == "train" and root.name in _above(graph, node.name)
    ]


def _above(graph: Graph, name: str) -> set[str]:
    """All nodes whose rows a node's rows follow from."""
    found: set[str] = set()
    left = [*graph.node(name).sources]
    while left:
        source = left.pop()
        if source not in found:
            found.add(source)
            left += graph.node(source).sources
    return found


def _between(graph: Graph, root: Node, update: Node) -> list[Node]:
    """What makes of a rollout's rows what an update reads."""
    above = _above(graph, update.name)
    return [
        node for node in graph.nodes if node.name in above and root.name in _above(graph, node.name)
    ]


def _not_adding(graph: Graph, node: Node, count: int) -> str:
    """What keeps an update from adding up gradients before it has all rows."""
    learning, steps = node.as_a(Learning), steps_in_order(node)
    others, batches = len(graph.updates(str(node.model))), learning.mini_batches
    reasons = (
        (learning.epochs > 1, f"goes over its rows in {learning.epochs} epochs"),
        (batches > steps, f"makes {batches} steps, each of rows drawn from all"),
        (steps > 1, f"makes {steps} steps, which {count} chunks do not share out evenly"),
        (learning.background, "runs in the background"),
        (not node.always, "does not run in every iteration"),
        (not learning.loss.adds_up, "chooses or averages over all rows before its step"),
        (others > 1, f"is one of {others} updates of {node.model}"),
        (True, f"trains routers of {node.model} by what all rows choose"),
    )
    return next(text for holds, text in reasons if holds)


def _not_apart(update: Action, rollout: Action) -> str:
    if update.takes is not None and update.takes.rule not in RULES:
        return f"gets its rows by {update.takes.rule!r}, a rule of its own"
    many = len(set(update.devices) & set(rollout.devices))
    return f"has {counted(many, 'device')} of the rollout, and could not run beside it"


def _too_few(graph: Graph, root: Node, run: Action, count: int) -> str:
    """What keeps chunks of a rollout from having whole groups."""
    if run.takes is not None and run.takes.pieces > 1:
        return f"the samples of a prompt lie on {run.takes.pieces} ranks"
    return f"there are fewer groups than {count} chunks"
