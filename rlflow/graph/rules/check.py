"""The rules a complete graph must keep, each a function that yields findings.

Tracing already reports what is wrong at one node (fields, types, names); the rules
here need the whole graph. They know what ops declare and nothing about devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import networkx as nx

from rlflow.errors import Finding
from rlflow.graph.fields import Binding
from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import Drawn, Learning, LoopEnd, Oversampled, SamplingOptions, Scoring
from rlflow.graph.rules.averages import averages_are_alike, averages_are_taken
from rlflow.graph.rules.counts import Counts
from rlflow.graph.rules.drafting import drafters_are_others
from rlflow.graph.rules.shared import states_are_shared
from rlflow.graph.rules.steps import mini_batches
from rlflow.graph.schedule import ALWAYS, due_text

Rule = Callable[[Graph], Iterator[Finding]]


def check_graph(graph: Graph, *, complete: bool = True) -> list[Finding]:
    """Every finding of every rule; `complete=False` skips those that missing edges mislead."""
    rules = RULES if complete else (acyclic,)
    return [finding for rule in rules for finding in rule(graph)]


def acyclic(graph: Graph) -> Iterator[Finding]:
    """No node waits for itself within one iteration."""
    try:
        cycle = nx.find_cycle(nx.DiGraph(graph.dag))
    except nx.NetworkXNoCycle:
        return
    path = [edge[0] for edge in cycle]
    start = path.index(min(path))
    path = path[start:] + path[:start]
    first = graph.node(path[0])
    yield Finding(
        code="E107",
        what=f"the graph has a cycle: {' -> '.join([*path, path[0]])}",
        where=first.where,
        got="\n".join(f"{name} at {graph.node(name).where}" for name in path),
        expected="every cycle crosses an iteration (distance 1 or more)",
    )


def not_empty(graph: Graph) -> Iterator[Finding]:
    """A pipeline declares at least one node."""
    if not graph.nodes:
        yield Finding(
            code="E111",
            what=f"pipeline {graph.name!r} declares no op",
            where=graph.source,
            fix="prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=32)",
        )


def results_are_used(graph: Graph) -> Iterator[Finding]:
    """Somebody reads what a node makes, or the node has an effect, or its reader declined it."""
    read = {source for node in graph.nodes for source in node.sources}
    declined = {declined.source for node in graph.nodes for declined in node.declined}
    for node in graph.nodes:
        if node.op.effect == "effectful" or node.name in read or node.name in declined:
            continue
        made = ", ".join(field.name for field in node.op.outputs)
        yield Finding(
            code="E112",
            what=f"nobody uses the result of node {node.name!r}",
            where=node.where,
            got=f"it makes {made}",
            expected="another op reads it, or the line is removed",
        )


def models_are_trained_or_not(graph: Graph) -> Iterator[Finding]:
    """A model has an optimizer exactly where something updates it."""
    for model in graph.models:
        updates = graph.updates(model.name)
        if model.averaged or any(node.averages for node in updates):
            continue
        if model.optimizer is not None and not updates:
            yield Finding(
                code="E113",
                what=f"model {model.name!r} has an optimizer and nothing updates it",
                where=model.where,
                fix=f"ops.update({model.name}, ...), or remove optimizer=",
            )
        if model.optimizer is None and updates:
            yield Finding(
                code="E114",
                what=f"{updates[0].name!r} updates model {model.name!r}, which has no optimizer",
                where=updates[0].where,
                got=f"{model.name} is declared at {model.where}",
                fix=f'rf.Model("{model.name}", ..., optimizer=rf.AdamW(lr=1e-4))',
            )


def groups_are_large_enough(graph: Graph) -> Iterator[Finding]:
    """A group-relative estimator sees at least two samples of each prompt."""
    for node in graph.nodes:
        compares = any(wanted.name == "group" and wanted.required for wanted in node.op.inputs)
        if not compares or node.rows_of is None or not graph.has_node(node.rows_of):
            continue
        origin = graph.node(node.rows_of)
        counts = origin.counts
        sampled = origin.role(SamplingOptions) or SamplingOptions()
        if (sampled.n if counts is None else counts.largest) == 1:
            yield Finding(
                code="E110",
                what=f"group op {node.name!r} compares samples of a prompt, but there is one each",
                where=node.where,
                got=f"{origin.name} makes groups of one row at {origin.where}",
                expected="n >= 2",
                fix="ops.rollout(..., n=8)",
            )


def log_probs_are_comparable(graph: Graph) -> Iterator[Finding]:
    """What an update compares with its own log-probs is of its temperature, the rollout's."""
    for node in graph.nodes:
        learning = node.role(Learning)
        own = None if learning is None else learning.temperature
        if own is None:
            continue
        read = [bound for bound in node.inputs if bound.name.endswith("log_probs")]
        for name, bound in ((each.name, made) for each in read for made in makers(graph, each)):
            source = graph.node(bound.source)
            made = source.role(Scoring) or source.role(SamplingOptions)
            given = None if made is None else made.temperature
            if given is None or (given or 1.0) == own:
                continue
            yield Finding(
                code="E244",
                what=f"{node.name!r} compares log-probs of different temperatures",
                where=source.where,
                got=f"{name} of {source.name} at temperature {given:g}, its own at {own:g}",
                expected="the temperature that the tokens were sampled at, everywhere",
                fix=f"ops.log_probs(..., temperature={own:g}), or leave temperature out",
            )


def batches_divide(graph: Graph) -> Iterator[Finding]:
    """A batch splits evenly into the mini-batches of every update, groups kept whole."""
    for node in graph.nodes:
        parts = mini_batches(node)
        counts = row_counts(graph, node)
        groups = num_prompts(graph, node)
        if counts is not None and not counts.fixed and parts > 1:
            yield _uncertain(graph, node, counts, parts)
        elif groups is not None and groups % parts:
            yield Finding(
                code="E115",
                what=f"node {node.name!r} cannot split {groups} prompts into {parts} mini-batches",
                where=node.where,
                got=f"{groups} % {parts} = {groups % parts}",
                expected="mini-batches of equal size, with the samples of a prompt together",
                fix=f"mini_batches={_nearest_divisor(groups, parts)}",
            )


def rows_are_made_where_read(graph: Graph) -> Iterator[Finding]:
    """Who reads rows runs only in iterations in which they are made."""
    for node in graph.nodes:
        for source in map(graph.node, node.sources):
            if source.always or _due_only_with(node, source):
                continue
            of = due_text(source.every, source.within).removeprefix(", ")
            own = due_text(node.every, node.within).removeprefix(", ") or "in every iteration"
            yield Finding(
                code="E164",
                what=f"{node.name!r} reads what {source.name!r} does not make in every iteration",
                where=node.where,
                got=f"{source.name} runs {of}; {node.name} {own}",
                expected="a reader in no other iterations than its source",
                fix=f"every={source.every}" if source.within == ALWAYS else "the same when=",
            )


def _due_only_with(one: Node, other: Node) -> bool:
    """Whether a node is due only in iterations in which another one is."""
    (start, stop), (first, end) = one.within, other.within
    inside = first <= start and (end is None or (stop is not None and stop <= end))
    return inside and one.every % other.every == 0


def _uncertain(graph: Graph, node: Node, counts: Counts, parts: int) -> Finding:
    maker = graph.node(str(node.rows_of))
    return Finding(
        code="E155",
        what=f"node {node.name!r} cannot split rows into {parts} mini-batches whose number differs",
        where=node.where,
        got=f"{maker.name} makes {counts.describe()}, at {maker.where}",
        expected="as many groups in every iteration, or mini_batches=1",
        fix=f"ops.keep(..., groups={max(counts.least, 1)})",
    )


def makers(graph: Graph, bound: Binding) -> tuple[Binding, ...]:
    """Where the field of a binding was made: above whoever hands it on, of each row set."""
    source = graph.node(bound.source)
    if not source.op.hands_on:
        return (bound,)
    inside = [each for each in source.inputs if each.name == bound.field.name]
    found = tuple(maker for each in inside for maker in makers(graph, each))
    return tuple(dict.fromkeys(found)) or (bound,)


def row_counts(graph: Graph, node: Node) -> Counts | None:
    """How many rows and groups a node works on in one iteration; None if it has none.

    Rows that no rollout has made are a group each, the samples of one prompt are one together.
    """
    found = _origin_counts(graph, node)
    if found is None or node.rows_of is None:
        return None
    maker = graph.node(node.rows_of)
    if maker.counts is not None:
        return maker.counts
    sampling = maker.role(SamplingOptions)
    return replace(found, rows=found.groups * int((sampling and sampling.n) or 1))


def _origin_counts(graph: Graph, node: Node) -> Counts | None:
    """The rows that a node's rows descend from, those of each one group: the prompts."""
    origin = node
    while origin.rows_of is not None and graph.has_node(origin.rows_of):
        parent = graph.node(origin.rows_of)
        if parent.counts is not None:
            expanded = graph.node(str(node.rows_of)) is not parent
            return _each_alone(parent.counts) if expanded else parent.counts
        if (some := parent.role(Oversampled)) is not None:
            made = int(some.first_groups)
            return Counts(groups=made, rows=made, least=made)
        if (batch := batch_of(parent)) is not None:
            return Counts(groups=batch, rows=batch, least=batch)
        if parent is origin:
            sources = [graph.node(name) for name in parent.sources]
            with_rows = [source for source in sources if source.rows_of is not None]
            if not with_rows:
                return None
            parent = with_rows[0]
        origin = parent
    return None


def _each_alone(counts: Counts) -> Counts:
    """Rows of which a rollout makes a group each."""
    return replace(counts, groups=counts.rows, least=counts.rows if counts.fixed else counts.least)


def num_prompts(graph: Graph, node: Node) -> int | None:
    """How many prompts a node's rows descend from in one iteration, at most; None without rows."""
    found = _origin_counts(graph, node)
    return None if found is None else found.groups


def most_rows(graph: Graph, node: Node) -> int | None:
    """How many rows a node works on in one iteration, at most; None if it has none."""
    found = row_counts(graph, node)
    return None if found is None else found.rows


def longest_response(graph: Graph, node: Node) -> int | None:
    """Response tokens at the most of the episodes that a node makes or reads; None for others."""
    makers = [graph.node(b.source) for b in node.inputs if b.field.name == "response_tokens"]
    found = (each.role(SamplingOptions) for each in (node, *makers))
    return max((int(s.max_tokens) for s in found if s and s.max_tokens is not None), default=None)


def batch_of(node: Node) -> int | None:
    """How many prompts a node draws, or groups its loop gathers, an iteration; None for others."""
    drawn = node.role(Drawn) or node.role(LoopEnd)
    return None if drawn is None or drawn.batch is None else int(drawn.batch)


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))


RULES: tuple[Rule, ...] = (
    not_empty,
    acyclic,
    results_are_used,
    models_are_trained_or_not,
    averages_are_taken,
    averages_are_alike,
    drafters_are_others,
    states_are_shared,
    groups_are_large_enough,
    log_probs_are_comparable,
    batches_divide,
    rows_are_made_where_read,
)
