"""The rules a complete graph must keep, each a function that yields findings.

Tracing already reports what is wrong at one node (fields, types, names); the rules
here need the whole graph. They know what ops declare and nothing about devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import networkx as nx

from rlflow.errors import Finding
from rlflow.graph.averages import averages_are_alike, averages_are_taken
from rlflow.graph.drafting import drafters_are_others
from rlflow.graph.graph import Binding, Graph, Node
from rlflow.graph.shared import states_are_shared

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
        if dict(origin.params).get("n") == 1:
            yield Finding(
                code="E110",
                what=f"group op {node.name!r} compares samples of a prompt, but there is one each",
                where=node.where,
                got=f"{origin.name} draws n=1 at {origin.where}",
                expected="n >= 2",
                fix="ops.rollout(..., n=8)",
            )


def log_probs_are_comparable(graph: Graph) -> Iterator[Finding]:
    """What an update compares with its own log-probs is of its temperature, the rollout's."""
    for node in graph.nodes:
        own = dict(node.params).get("temperature")
        if node.op.use != "train" or own is None:
            continue
        for bound in node.inputs:
            source = graph.node(made_by(graph, bound).source)
            given = dict(source.params).get("temperature")
            if not bound.name.endswith("log_probs") or given is None or (given or 1.0) == own:
                continue
            yield Finding(
                code="E244",
                what=f"{node.name!r} compares log-probs of different temperatures",
                where=source.where,
                got=f"{bound.name} of {source.name} at temperature {given:g}, its own at {own:g}",
                expected="the temperature that the tokens were sampled at, everywhere",
                fix=f"ops.log_probs(..., temperature={own:g}), or leave temperature out",
            )


def batches_divide(graph: Graph) -> Iterator[Finding]:
    """A batch splits evenly into the mini-batches of every update, groups kept whole."""
    for node in graph.nodes:
        parts = dict(node.params).get("mini_batches", 1)
        groups = num_prompts(graph, node)
        if groups is not None and groups % parts:
            yield Finding(
                code="E115",
                what=f"node {node.name!r} cannot split {groups} prompts into {parts} mini-batches",
                where=node.where,
                got=f"{groups} % {parts} = {groups % parts}",
                expected="mini-batches of equal size, with the samples of a prompt together",
                fix=f"mini_batches={_nearest_divisor(groups, parts)}",
            )


def made_by(graph: Graph, bound: Binding) -> Binding:
    """Where the field of a binding was made: in the loop, where what ends one hands it on."""
    source = graph.node(bound.source)
    while source.ends_loop:
        bound = next(inside for inside in source.inputs if inside.name == bound.field.name)
        source = graph.node(bound.source)
    return bound


def num_prompts(graph: Graph, node: Node) -> int | None:
    """How many prompts a node's rows descend from in one iteration; None if it has no rows."""
    origin = node
    while origin.rows_of is not None and graph.has_node(origin.rows_of):
        parent = graph.node(origin.rows_of)
        if "batch" in dict(parent.params):
            return int(parent.param("batch"))
        if parent is origin:
            sources = [graph.node(name) for name in parent.sources]
            with_rows = [source for source in sources if source.rows_of is not None]
            if not with_rows:
                return None
            parent = with_rows[0]
        origin = parent
    return None


def num_rows(graph: Graph, node: Node) -> int | None:
    """How many rows a node works on in one iteration; None if it has none."""
    prompts = num_prompts(graph, node)
    if prompts is None or node.rows_of is None:
        return None
    samples = dict(graph.node(node.rows_of).params).get("n", 1)
    return prompts * int(samples)


def longest_response(graph: Graph, node: Node) -> int | None:
    """Response tokens at the most of the episodes that a node makes or reads; None for others."""
    makers = [graph.node(b.source) for b in node.inputs if b.field.name == "response_tokens"]
    found = [dict(n.params).get("max_tokens") for n in (node, *makers)]
    return max((int(most) for most in found if most is not None), default=None)


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
)
