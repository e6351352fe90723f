"""Staleness: which rows are older than the weights that learn from them, and by how much.

Pass `stamp` gives every node that learns from such rows the version of each token, and refuses
losses that do not correct for the lag. `largest_lag` proves from a plan's order how old the
weights are that each node reads. Losses declare whether they correct; this file knows no formula.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from rlflow.errors import Finding, PlanError
from rlflow.graph.fields import Binding, Declined
from rlflow.graph.graph import Graph, Node
from rlflow.graph.op import Input
from rlflow.graph.placement import Placement
from rlflow.graph.roles import Learning, LoopEnd, Portion, Recalling, Recorded
from rlflow.graph.rules.check import makers
from rlflow.scheduler.context import Context
from rlflow.scheduler.plan.plan import Plan

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
    and so are those of a later turn. Recorded rows are taken to be as old as those of a rollout.
    """
    found: dict[str, int] = {}
    for node in graph.nodes:
        if node.resumes is not None:
            oldest = found.get(node.resumes, 0)
            found |= {node.name: oldest} if oldest else {}
        elif (read := node.role(Recorded)) is not None:
            learns = read.ahead and graph.updates(read.sampled_by)
            found |= {node.name: graph.staleness} if learns and graph.staleness else {}
        elif node.op.hands_on:
            oldest = max((found.get(source, 0) for source in node.sources), default=0)
            end = node.role(LoopEnd)
            oldest += end is not None and end.keeps_surplus
            oldest += _recalled(graph, node)
            found |= {node.name: oldest} if oldest else {}
        elif node.op.use == "rollout" and node.model is not None and graph.updates(node.model):
            before = node.sources if node.op.rows == "same" else ()
            oldest = max((found.get(name, 0) for name in before), default=0)
            lasting = node.role(Recalling)
            oldest = max(oldest, graph.lag(node) + (0 if lasting is None else lasting.keep))
            found |= {node.name: oldest} if oldest else {}
    return found


def _recalled(graph: Graph, node: Node) -> int:
    """How many iterations old the samples may be that a node has kept of a model that learns."""
    if not node.op.recalls:
        return 0
    learn = any(graph.updates(model) for model in _samplers(graph, node))
    return node.as_a(Recalling).keep if learn else 0


def _samplers(graph: Graph, node: Node) -> set[str]:
    """The models that sampled the tokens which a node hands on, or made itself."""
    if node.model is not None:
        return {node.model}
    if (recorded := node.role(Recorded)) is not None:
        return {recorded.sampled_by}
    read = [bound for bound in node.inputs if bound.name == TOKENS]
    made = [graph.node(maker.source) for bound in read for maker in makers(graph, bound)]
    return {maker.model for maker in made if maker.model is not None}


def stamp(plan: Plan, context: Context) -> Plan:
    """Bind the version of every token to the nodes that learn from rows of older weights.

    A ratio whose old policy the compiler chooses is taken against the policy that sampled.
    Raises PlanError for losses that do not correct for the lag, and for tokens whose versions
    nobody knows. Without staleness the plan stays as it is.
    """
    stale = stale_rollouts(plan.graph)
    if not stale and not plan.graph.staleness:
        return plan
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
    learning = node.as_a(Learning)
    loss: Learns = learning.loss
    before = learning.old
    old = loss.under_lag(before)
    lag = max(stale[origin.name] for origin in origins)
    own = any(node.model in _samplers(plan.graph, origin) for origin in origins)
    if not loss.corrects(old, own=own):
        return _uncorrected(node, origins, lag, loss, before)
    tokens = next((bound for bound in node.inputs if bound.field.name == TOKENS), None)
    source = None if tokens is None else plan.graph.node(tokens.source)
    missing = [VERSION, *([BEHAVIOUR] if old != before else [])]
    if source is None or any(source.op.output(name) is None for name in missing):
        return _unknown_versions(node, origins, source)
    if source.name not in stale:
        return plan
    changed = node
    if old != before:
        changed = _against_rollout(changed.being(replace(learning, old=old)), source, lag)
        text = f"{node.name} takes its ratio against {source.name}'s own log-probs: "
        plan = plan.noting(RULE, text + _how_old("its rows", lag))
    changed = _reading(changed, source, VERSION)
    changed = changed.being(replace(changed.as_a(Learning), staleness=lag))
    nodes = tuple(changed if other.name == node.name else other for other in plan.graph.nodes)
    return replace(plan, graph=replace(plan.graph, nodes=nodes))


def _against_rollout(node: Node, source: Node, lag: int) -> Node:
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
    kept = [origin.name for origin in origins if origin.op.recalls]
    fresh = f"; or no rows of {' and '.join(kept)}" if kept else "; or staleness=0"
    return Finding(
        code="E402",
        what=f"{node.name} has no correction for rows of weights that are up to "
        f"{lag} update{'s' if lag > 1 else ''} old",
        where=node.where,
        got=f"{loss.describe()}, on rows of {rows}: "
        + ("kept for later" if kept else f"staleness={lag}"),
        expected=f"{' or '.join(lines)}{fresh}",
        fix=f"loss={lines[0]}" if old or kept else "staleness=0",
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
    stale = stale_rollouts(plan.graph)
    for node in plan.graph.nodes:
        if node.name not in stale or node.role(Recorded) or node.role(Portion):
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
