"""Staleness: which rows are older than the weights that learn from them, and by how much.

Pass `stamp` gives every node that learns from such rows the version of each token, and
refuses losses that do not correct for the lag. `largest_lag` proves from a plan's order how
old the weights are that each node reads. What corrects is declared by the losses; this
file asks them, and knows no formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import lcm
from typing import Any, Protocol

from rlflow.errors import Finding, PlanError
from rlflow.graph.graph import Binding, Declined, Graph, Node
from rlflow.graph.op import Input
from rlflow.graph.placement import Placement
from rlflow.scheduler.context import Context
from rlflow.scheduler.plan import Action, Plan
from rlflow.scheduler.trips import keeps_surplus

RULE = "staleness"
TOKENS, VERSION = "response_tokens", "version"
BEHAVIOUR, RECOMPUTED = "rollout_log_probs", "old_log_probs"


class Learns(Protocol):
    """What a loss says about rows that are older than the weights it trains."""

    def describe(self) -> str:
        """The printed form."""

    def corrects(self, old: str, *, own: bool) -> bool:
        """Whether such rows train it right; `own` rows the trained model has sampled."""

    def under_lag(self, old: str) -> str:
        """Whose log-probs a ratio is taken against for such rows."""

    def corrections(self) -> tuple[str, ...]:
        """Losses that correct, as lines to paste, the likest first."""


def allowed(graph: Graph, placement: Placement) -> int:
    """How many updates old a rollout's weights may be: the placement's word, else the graph's."""
    said = "staleness" in placement.model_fields_set
    return placement.staleness if said else graph.staleness


def stale_rollouts(graph: Graph) -> dict[str, int]:
    """The nodes whose rows are sampled from weights behind the newest, and by how many updates.

    Of a rollout that is resumed the first tokens are as old as those of the one it goes on with,
    and so are those of a later turn.
    """
    found: dict[str, int] = {}
    for node in graph.nodes:
        if node.resumes is not None:
            oldest = found.get(node.resumes, 0)
            found |= {node.name: oldest} if oldest else {}
        elif node.ends_loop:
            oldest = max((found.get(source, 0) for source in node.sources), default=0)
            oldest += dict(node.params).get("surplus") == "keep"
            found |= {node.name: oldest} if oldest else {}
        elif node.model is not None and graph.lag(node) and graph.updates(node.model):
            before = node.sources if node.op.rows == "same" else ()
            found[node.name] = max(graph.lag(node), *(found.get(name, 0) for name in before), 0)
    return found


def stamp(plan: Plan, context: Context) -> Plan:
    """Bind the version of every token to the nodes that learn from rows of older weights.

    A ratio whose old policy the compiler chooses is taken against the policy that sampled.
    Raises PlanError for losses that do not correct for the lag, and for tokens whose versions
    nobody knows. Without staleness the plan stays as it is.
    """
    if not plan.graph.staleness and not keeps_surplus(plan.graph):
        return plan
    stale = stale_rollouts(plan.graph)
    if not stale:
        text = f"staleness={plan.graph.staleness} does nothing: no rollout of a model that learns"
        return plan.noting(RULE, text)
    findings: list[Finding] = []
    for node in plan.graph.nodes:
        origins = [plan.graph.node(name) for name in _above(plan.graph, node) if name in stale]
        if node.op.use != "train" or not origins:
            continue
        made = _stamped(plan, node, origins, stale)
        if isinstance(made, Finding):
            findings.append(made)
        else:
            plan = made
    if findings:
        raise PlanError(*findings)
    return plan


def _above(graph: Graph, node: Node) -> list[str]:
    """Every node that a node's inputs come from, however far above, in the order declared."""
    found: set[str] = set()
    waiting = list(node.sources)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph.node(name).sources
    return [other.name for other in graph.nodes if other.name in found]


def _stamped(plan: Plan, node: Node, origins: list[Node], stale: dict[str, int]) -> Plan | Finding:
    """The plan with a node that learns from `origins` stamped, or why that cannot be."""
    params: dict[str, Any] = dict(node.params)
    loss: Learns = params["loss"]
    before = str(params.get("old", ""))
    old = loss.under_lag(before)
    lag = max(stale[origin.name] for origin in origins)
    own = any(origin.model == node.model for origin in origins)
    if not loss.corrects(old, own=own):
        return _uncorrected(node, origins, lag, loss, before)
    tokens = next((bound for bound in node.inputs if bound.field.name == TOKENS), None)
    source = None if tokens is None else plan.graph.node(tokens.source)
    if source is None or source.op.output(VERSION) is None:
        return _unknown_versions(node, origins, source)
    if source.name not in stale:
        return plan
    changed = node
    if old != before:
        changed = _against_rollout(changed, source, params | {"old": old}, lag)
        text = f"{node.name} takes its ratio against {source.name}'s own log-probs: "
        plan = plan.noting(RULE, text + _how_old("its rows", lag))
    changed = _reading(changed, source, VERSION)
    changed = replace(changed, params=(*changed.params, (RULE, lag)))
    nodes = tuple(changed if other.name == node.name else other for other in plan.graph.nodes)
    return replace(plan, graph=replace(plan.graph, nodes=nodes))


def _against_rollout(node: Node, source: Node, params: dict[str, Any], lag: int) -> Node:
    """The node with its ratio against the log-probs that `source` sampled with."""
    why = f"{_how_old('its rows', lag)}, so the ratio is against the rollout's own log-probs"
    offered = [bound for bound in node.inputs if bound.name == RECOMPUTED]
    declined = [
        *(Declined(source=b.source, field=RECOMPUTED, why=why) for b in offered),
        *(replace(d, why=why) if d.field == RECOMPUTED else d for d in node.declined),
    ]
    kept = replace(
        node,
        op=replace(node.op, inputs=tuple(i for i in node.op.inputs if i.name != RECOMPUTED)),
        inputs=tuple(bound for bound in node.inputs if bound.name != RECOMPUTED),
        params=tuple(params.items()),
        declined=tuple(declined),
    )
    return _reading(kept, source, BEHAVIOUR)


def _reading(node: Node, source: Node, name: str) -> Node:
    """The node with a field of `source` among what it has to read."""
    made = source.op.output(name)
    if made is None:
        raise AssertionError(f"{source.name} makes no {name}")
    wants = Input(name=name, dtype=made.dtype, levels=(made.level,))
    op = replace(node.op, inputs=(*(i for i in node.op.inputs if i.name != name), wants))
    if any(bound.name == name for bound in node.inputs):
        return replace(node, op=op)
    bound = Binding(name=name, source=source.name, field=made)
    return replace(node, op=op, inputs=(*node.inputs, bound))


def _how_old(what: str, lag: int) -> str:
    return f"{what} are up to {lag} update{'s' if lag > 1 else ''} old"


def _uncorrected(node: Node, origins: list[Node], lag: int, loss: Learns, old: str) -> Finding:
    lines = loss.corrections()
    rows = " and ".join(origin.name for origin in origins)
    return Finding(
        code="E402",
        what=f"{node.name} has no correction for rows of weights that are up to "
        f"{lag} update{'s' if lag > 1 else ''} old",
        where=node.where,
        got=f"{loss.describe()}, on rows of {rows}: staleness={lag}",
        expected=f"{' or '.join(lines)}; or staleness=0",
        fix=f"loss={lines[0]}" if old else "staleness=0",
    )


def _unknown_versions(node: Node, origins: list[Node], source: Node | None) -> Finding:
    rows = " and ".join(origin.name for origin in origins)
    made = "nothing" if source is None else source.name
    return Finding(
        code="E228",
        what=f"nobody knows which weights sampled the tokens that {node.name} learns from",
        where=node.where,
        got=f"{TOKENS} of {made}, from rows of {rows} that may be older than the weights",
        expected=f"the {TOKENS} that {origins[0].name} made, or staleness=0",
    )


def note_turns(plan: Plan, context: Context) -> Plan:
    """Note where running ahead gains nothing: a rollout and the update on the same devices."""
    for node in plan.graph.nodes:
        if node.name not in stale_rollouts(plan.graph):
            continue
        runs = [a for a in plan.actions if a.kind == "run" and a.node == node.name]
        trained = plan.trained_instance(str(node.model))
        if trained is None or not runs or set(trained.devices).isdisjoint(runs[0].devices):
            continue
        shared = runs[0].instance == trained.name
        how = f"shares {trained.name}" if shared else f"takes turns with {trained.name}"
        text = f"{node.name} {how}: nothing overlaps; a pool of its own lets it run ahead"
        plan = plan.noting(RULE, text)
    return plan


def largest_lag(plan: Plan) -> dict[str, int]:
    """For every node that reads a model that learns: the most updates its weights can be behind.

    Proven from what actions come `after`, in every interleaving; 0 is on-policy. Nodes stand in
    the order of the plan. Raises AssertionError where no bound follows.
    """
    found: dict[str, int] = {}
    for action in plan.actions:
        if action.kind != "run" or action.writes or not action.reads:
            continue
        instance = plan.instance(str(action.instance))
        trained = plan.trained_instance(instance.model)
        if trained is None:
            continue
        lags = [
            _behind(action, writer, gap)
            for writer in _writers(plan, instance.name, trained.name)
            if (gap := _gap(plan, action, writer)) is not None
        ]
        if not lags:
            raise AssertionError(f"nothing bounds how old the weights are that {action.id} reads")
        node = str(action.node)
        found[node] = max(found.get(node, 0), min(lags))
    return found


def _writers(plan: Plan, instance: str, trained: str) -> Iterator[Action]:
    """The last update of a trained instance, or the reshards that fill another one."""
    if instance == trained:
        model = plan.instance(trained).model
        last = plan.graph.updates(model)[-1].name
        runs = [a for a in plan.actions if a.kind == "run" and a.node == last]
        return (a for a in runs if a.chunk is None or a.chunk.index + 1 == a.chunk.count)
    return (a for a in plan.actions if a.kind == "reshard" and instance in a.targets)


def _behind(reader: Action, writer: Action, gap: int) -> int:
    """How many updates behind version i is what the reader of iteration i finds at most.

    Over are the writer's instances of iteration i - `gap` and before; that of j brings j + 1.
    """
    period = lcm(reader.every, writer.every)
    most = 0
    for iteration in range(period, 2 * period):
        if reader.due(iteration):
            written = iteration - gap
            while not writer.due(written):
                written -= 1
            most = max(most, iteration - 1 - written)
    return most


def _gap(plan: Plan, reader: Action, writer: Action) -> int | None:
    """The smallest d such that the writer of iteration i - d is over before the reader of i.

    None where they are not ordered. A dependency of turn distance t spans
    t + ahead(waiting) - ahead(waited for) iterations.
    """
    shortest = {reader.id: 0}
    for _ in plan.actions:
        changed = False
        for action in reversed(plan.actions):
            for dep in action.after if action.id in shortest else ():
                span = dep.distance + action.ahead - plan.action(dep.action).ahead
                total = shortest[action.id] + span
                if total < shortest.get(dep.action, total + 1):
                    shortest[dep.action], changed = total, True
        if not changed:
            break
    return shortest.get(writer.id)
