"""Which nodes of a graph are cut into chunks together, and by what: chains that cross pools.

A chain begins with a rollout and goes on to the ops that read nothing but its rows: op by op, as
far as each may work on some of the rows at a time. Knows the graph and a plan that is bound; cuts
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import SamplingOptions
from rlflow.graph.rules.check import most_rows, num_prompts
from rlflow.graph.rules.steps import in_background, one_step, steps_in_order
from rlflow.graph.user.dispatch import RULES
from rlflow.scheduler.plan.plan import Action, Plan

By = Literal["prompts", "finish", "groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A rollout and the nodes that may be cut with it, in the order of the graph.

    `prompts` is how many whole prompts an iteration has, `rows` how many rows.
    """

    root: Node
    nodes: tuple[Node, ...]
    prompts: int
    rows: int
    by: By

    @property
    def cut(self) -> tuple[int, str]:
        """What is cut in order of completion: how many rows, or groups."""
        return (self.rows, "rows") if self.by == "finish" else (self.prompts, "groups")


@dataclass(frozen=True, slots=True)
class _Followed:
    """A rollout's way to be cut, and the updates that then follow its chunks."""

    by: By
    updates: frozenset[str] = frozenset()


def crossing_chains(plan: Plan, count: int, *, groups: bool = True) -> tuple[Chain, ...]:
    """The chains of which some op works on rows that no device of its own has made.

    Of updates those are among them whose steps can be shared out over `count` chunks, and with
    `groups` those that add up gradients of complete groups on devices of their own.

    Where the devices of every op are among those that its rows come from, nothing could run
    beside anything; the host is a device like others.
    """
    devices = {str(action.node): frozenset(action.devices) for action in plan.actions}
    runs = {str(action.node): action for action in plan.actions}
    ways = _ways(plan, runs, count, groups=groups)
    roots = _roots(plan.graph, ways, runs)
    added = {name for name in roots if _adding(plan.graph.node(name))}
    lone = {r for r, w in ways.items() if w.by == "groups" and r not in {roots[n] for n in added}}
    if lone:
        # Without an update that follows, forwards get rows sooner one by one.
        ways |= {name: _Followed("finish") for name in lone}
        roots = _roots(plan.graph, ways, runs)
    above: dict[str, frozenset[frozenset[int]]] = {}
    crossed = set()
    for name in plan.graph.order():
        if name not in roots:
            continue
        sources = [source for source in plan.graph.node(name).sources if source in roots]
        above[name] = frozenset().union(*(above[source] for source in sources), [devices[name]])
        if any(devices[name].isdisjoint(others) for others in above[name]):
            crossed.add(roots[name])
    chains = []
    for root in (node for node in plan.graph.nodes if node.name in crossed):
        nodes = tuple(n for n in plan.graph.nodes if roots.get(n.name) == root.name)
        prompts, rows = num_prompts(plan.graph, root), most_rows(plan.graph, root)
        if prompts is not None and rows is not None:
            by = ways[root.name].by
            chains.append(Chain(root=root, nodes=nodes, prompts=prompts, rows=rows, by=by))
    return tuple(chains)


def adds_gradients(plan: Plan, node: Node) -> bool:
    """Whether an update may add up gradients of some groups before it has the others.

    It makes one optimizer step, of a loss that adds up so; no other update of its model is between
    two of its chunks, and its routers are not trained by what all rows choose.
    """
    alone = len(plan.graph.updates(str(node.model))) == 1
    adds = _adding(node) and alone and node.always and not in_background(node)
    return adds and plan.graph.model(str(node.model)).router is None


def _adding(node: Node) -> bool:
    """Whether it makes one step of a loss whose gradients add up."""
    return node.op.use == "train" and one_step(node)


def _ways(
    plan: Plan, runs: Mapping[str, Action], count: int, *, groups: bool
) -> dict[str, _Followed]:
    """By what the rows of each rollout are cut, and the updates that follow then.

    Updates that make whole steps of the rows of each of `count` chunks take them by prompts.
    """
    graph, found = plan.graph, dict[str, _Followed]()
    steps = frozenset(_in_steps(graph, count))
    for root in (node for node in graph.nodes if node.op.rows == "expand"):
        run = runs[root.name]
        alike = root.as_a(SamplingOptions).ignore_eos or root.op.resumed is None
        own_rule = run.takes is not None and run.takes.rule not in RULES
        followed = any(graph.node(name).rows_of == root.name for name in steps)
        if alike or own_rule or followed:
            found[root.name] = _Followed("prompts", steps)
            continue
        added = frozenset(
            node.name
            for node in graph.nodes
            if groups and adds_gradients(plan, node) and runs_apart(runs[node.name], run)
        )
        whole = added and whole_groups(graph, root, run, count)
        found[root.name] = _Followed("groups", added) if whole else _Followed("finish")
    return found


def runs_apart(update: Action, rollout: Action) -> bool:
    """Whether an update could run beside a rollout, and a chunk's rows lie as any rows do."""
    usual = update.takes is not None and update.takes.rule in RULES
    return usual and set(update.devices).isdisjoint(rollout.devices)


def whole_groups(graph: Graph, root: Node, run: Action, count: int) -> bool:
    """Whether so many chunks have groups: a rank has all samples of the prompts that it reads."""
    prompts, rows = num_prompts(graph, root), most_rows(graph, root)
    pieces = 1 if run.takes is None else run.takes.pieces
    n = int(root.as_a(SamplingOptions).n or 0)
    return pieces == 1 and prompts is not None and prompts >= count and rows == prompts * n


def _in_steps(graph: Graph, count: int) -> Iterator[str]:
    """The updates that make whole steps of the rows of each of `count` chunks."""
    for node in graph.nodes:
        steps = steps_in_order(node)
        if steps > 1 and steps % count == 0 and node.always and not in_background(node):
            yield node.name


def _roots(
    graph: Graph, ways: Mapping[str, _Followed], runs: Mapping[str, Action]
) -> dict[str, str]:
    """The rollout that begins the chain of each node that may be cut, by the node's name.

    Updates are cut where all that they read is, if they follow that rollout's chunks.
    """
    found: dict[str, str] = {}
    learning = frozenset[str]().union(*(way.updates for way in ways.values()))
    for name in graph.order():
        node = graph.node(name)
        if not node.sources or not (_cuttable(node) or name in learning):
            continue
        begun = {found.get(source) for source in node.sources}
        if begun == {None}:
            if node.op.rows == "expand":
                found[name] = name
        elif len(begun) == 1:
            (root,) = (root for root in begun if root is not None)
            if _follows(node, ways[root], runs[name]):
                found[name] = root
    return found


def _follows(node: Node, way: _Followed, run: Action) -> bool:
    """Whether a node works on the chunks of a rollout that is cut in such a way."""
    if node.op.use == "train":
        return node.name in way.updates
    if way.by == "prompts":
        return True
    return node.op.per in _PER[way.by] and _any_rows(node, run)


def follows_groups(node: Node, run: Action) -> bool:
    """Whether an op works on the groups of a rollout as they are complete, whatever they are."""
    return _cuttable(node) and node.op.per in _PER["groups"] and _any_rows(node, run)


_PER: Mapping[By, Collection[str]] = {"finish": ("row",), "groups": ("row", "group")}


def _any_rows(node: Node, run: Action) -> bool:
    """Whether an op works on whichever rows end first, and however many a part gets."""
    spread = run.takes is not None and len(run.takes.parts) > 1
    even = node.op.uneven == "refuse" and spread
    return node.op.rows == "same" and not even


def _cuttable(node: Node) -> bool:
    """Whether an op's granularity allows working on some of the groups at a time."""
    op = node.op
    along = op.per in ("row", "group") and op.rows in ("expand", "same")
    once = op.recalls or op.chooses or op.closing or op.collective
    return along and op.effect == "pure" and node.always and not once
