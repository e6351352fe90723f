"""Which nodes of a plan are recorded, and how much of each: rules held against the graph.

By default these are the rollouts and whatever has their rows, 8 groups of each iteration. That is
a choice of a run and no action of its plan: it changes no number and nobody waits for it, so one
plan, with one hash, runs with a record and without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rlflow.errors import Finding, UsageError, known_names, near_names
from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import SamplingOptions
from rlflow.graph.rules.nesting import declared_name
from rlflow.graph.user.recording import DEFAULT_GROUPS, RecordRule
from rlflow.runtime.record.edges.names import About, How
from rlflow.runtime.record.edges.secrets import is_secret


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedNode:
    """One node that is recorded: which iterations, and how many of its first rows, None for all.

    `rows_of` is the node that numbers its rows, itself or one before it; `size` how many rows
    a group has, None where groups differ. `extra` are fields that nobody reads and are recorded.
    """

    node: str
    rule: RecordRule
    limit: int | None
    rows_of: str
    size: int | None
    texts: frozenset[str]
    extra: frozenset[str]
    graph: str

    def due(self, iteration: int) -> bool:
        """Whether an iteration is recorded."""
        return iteration % self.rule.every == 0

    def about(
        self, iteration: int, total: int, parts: tuple[tuple[int, int, int], ...] = ()
    ) -> About:
        """What the file of an iteration, or of several, says of itself."""
        how: How = "first" if self.rule.first else "rows" if self.rule.rows else "every"
        return About(
            node=self.node,
            iteration=iteration,
            how=how,
            total=total,
            graph=self.graph,
            rows_of=self.rows_of,
            parts=parts,
        )


@dataclass(frozen=True)
class Recording:
    """What a run records, where, and how many bytes of it stay at most."""

    chosen: tuple[RecordedNode, ...]
    run: Path
    cap: int

    @cached_property
    def by_node(self) -> dict[str, RecordedNode]:
        """The nodes by their names."""
        return {each.node: each for each in self.chosen}

    def rules(self) -> list[str]:
        """The rules as they would be typed, one a declared node."""
        return list(dict.fromkeys(_declared(each) for each in self.chosen))

    def line(self) -> str:
        """What `rlflow run` says of it."""
        if not self.chosen:
            return "record: nothing (--record EDGE)"
        return f"record: {', '.join(self.rules())}   at most {self.cap / 1e9:g} GB"


def recording_of(
    graph: Graph, rules: Sequence[RecordRule] | None, run: Path, cap: int, declared: Graph
) -> Recording:
    """What a run of a plan's graph records under some rules; by default, for None, the rollouts.

    `declared` is the graph before its passes. Raises UsageError E319 for a rule of a node that
    is not there, that the plan drops, or that makes no rows.
    """
    chosen = _by_default(graph) if rules is None else _by_rules(graph, rules, declared)
    return Recording(chosen=tuple(chosen), run=run, cap=cap)


def _declared(chosen: RecordedNode) -> str:
    rule = chosen.rule
    named = RecordRule(
        edge=declared_name(rule.edge), every=rule.every, first=rule.first, rows=rule.rows
    )
    return str(named)


def _by_default(graph: Graph) -> list[RecordedNode]:
    """The rollouts of a graph and every node that has rows of one."""
    sampled = {node.name for node, _ in graph.having(SamplingOptions)}
    return [
        _chosen(graph, node, RecordRule(edge=node.name, first=DEFAULT_GROUPS))
        for node in graph.nodes
        if node.op.outputs and sampled & {each.name for each in _before(graph, node)}
    ]


def _by_rules(graph: Graph, rules: Sequence[RecordRule], declared: Graph) -> list[RecordedNode]:
    """The nodes that rules name; all trips of one that is within a loop."""
    found: dict[str, RecordedNode] = {}
    for rule in rules:
        named = [n for n in graph.nodes if rule.edge in (n.name, declared_name(n.name))]
        made = [node for node in named if node.op.outputs]
        if not made:
            raise UsageError(_unknown(graph, rule, declared, there=bool(named)))
        found |= {node.name: _chosen(graph, node, rule) for node in made}
    return list(found.values())


def _unknown(graph: Graph, rule: RecordRule, declared: Graph, *, there: bool) -> Finding:
    names = [declared_name(node.name) for node in graph.nodes if node.op.outputs]
    names = list(dict.fromkeys(names))
    what = f"--record {rule.edge}: the pipeline has no node {rule.edge!r}"
    if there:
        what = f"--record {rule.edge}: the node makes no rows to record"
    elif declared.has_node(rule.edge):
        what = f"--record {rule.edge}: the plan drops the node, since nothing reads it"
    return Finding(
        code="E319", what=what, expected=known_names(names), near=near_names(rule.edge, names)
    )


def _before(graph: Graph, node: Node) -> list[Node]:
    """A node and those that its rows come of, one row from one: the last one numbers them."""
    found = [node]
    while found[-1].op.rows == "same" and found[-1].sources:
        found.append(graph.node(found[-1].sources[0]))
    return found


def _chosen(graph: Graph, node: Node, rule: RecordRule) -> RecordedNode:
    numbering = _before(graph, node)[-1]
    size = _group_size(graph, numbering)
    limit = rule.rows
    if rule.first is not None:
        limit = rule.first * (size or _group_size(graph, numbering, through=True) or 1)
    outputs = {field.name: field for field in node.op.outputs}
    read = {b.field.name for n in graph.nodes for b in n.inputs if b.source == node.name}
    return RecordedNode(
        node=node.name,
        rule=rule,
        limit=limit,
        rows_of=numbering.name,
        size=size,
        texts=frozenset(name for name, field in outputs.items() if field.dtype == "text"),
        extra=frozenset(_unread(node, set(outputs) - read)),
        graph=graph.hash,
    )


def _unread(node: Node, names: set[str]) -> set[str]:
    """Fields that a body makes though nobody reads them, once it is asked to: those of rollouts.

    Other bodies make them of what comes in, which may not be there where nobody reads it.
    """
    if node.op.use != "rollout":
        return set()
    made = {"response", "finished", "version", "sample", "group"}
    made |= {bound.name for bound in node.inputs}
    return {name for name in names & made if not is_secret(name)}


def _group_size(graph: Graph, node: Node, *, through: bool = False) -> int | None:
    """The rows of a group, of a rollout; `through` others, that of the rollout before them."""
    sampling = node.role(SamplingOptions)
    if sampling is not None and node.op.rows == "expand":
        return sampling.n or 1
    if through and node.sources:
        before = _before(graph, graph.node(node.sources[0]))[-1]
        return _group_size(graph, before, through=True)
    return None
