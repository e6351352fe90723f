"""Rule of the verifier: actions and instances say of themselves what their kind and nodes say.

Knows the graph and the plan; shares no code with the passes.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.scheduler.plan.plan import Action
from rlflow.scheduler.verify.happens_before import Facts


def kinds_are_kept(facts: Facts) -> Iterator[str]:
    """An instance serves the uses of its nodes; only runs and reshards take or leave weights.

    Who closes a run is an op that does; a move is of the instance whose part it moves.
    """
    graph = facts.plan.graph
    served: dict[str, set[str]] = {i.name: set() for i in facts.plan.instances}
    for a in facts.plan.actions:
        yield from _keeps_to_its_kind(facts, a)
        node = graph.node(str(a.node)) if a.kind == "run" else None
        if a.closing is not (node is not None and node.op.closing):
            yield f"{a.id} is said to close the run: {a.closing}"
        if node is not None and a.instance is not None:
            served[a.instance].add(node.op.use or "forward")
            for name, _ in a.reads:
                if name != a.instance and node.op.use == "rollout":
                    served[name].add("rollout")
    for i in facts.plan.instances:
        if set(i.uses) != served[i.name] or len(set(i.uses)) < len(i.uses):
            yield f"{i.name} is for {', '.join(i.uses)}, its nodes for {sorted(served[i.name])}"
        if i.micro_tokens < 1:
            yield f"{i.name} passes {i.micro_tokens} tokens at a time"
        if i.rows_at_once < 1:
            yield f"{i.name} generates {i.rows_at_once} rows at once"
    if facts.plan.staleness != graph.staleness:
        yield f"the plan is of staleness {facts.plan.staleness}, its graph of {graph.staleness}"


def _keeps_to_its_kind(facts: Facts, a: Action) -> Iterator[str]:
    """What an action of another kind would say of itself, it does not say."""
    if a.kind not in ("run", "reshard") and (a.needs or a.reads or a.writes):
        yield f"{a.id} is a {a.kind}, and uses weights: {[*a.needs, *a.reads, *a.writes]}"
    if a.part is not None and a.instance != facts.parts[a.part].instance:
        yield f"{a.id} is of {a.instance}, {a.part} is not"
    for word, kinds in OWN.items():
        if a.kind not in kinds and getattr(a, word):
            yield f"{a.id} is a {a.kind}, and has {word}"


OWN = {
    "node": ("run", "transfer"),
    "instance": ("run", "reshard", "sleep", "wake"),
    "targets": ("reshard",),
    "part": ("sleep", "wake"),
    "mode": ("sleep", "wake"),
    "transport": ("transfer", "reshard"),
    "fields": ("transfer",),
    "takes": ("run", "transfer"),
    "makes": ("run", "transfer"),
}
