"""The verifier: what must hold of a plan after each pass, by a method no pass shares.

Each rule is a function that yields a sentence for everything that breaks it. Orderings
are asked of what `after` implies in every interleaving, never of the place in the list, and so
is memory: a part takes room while an action runs unless it is proven to be asleep.

This file knows the graph and the plan; it shares no code with the passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from rlflow.graph.graph import Graph, Node
from rlflow.graph.rules.nesting import nodes_within
from rlflow.scheduler.plan.plan import HOST, Plan
from rlflow.scheduler.verify.engines import (
    drafters_lie_in_their_engines,
    engines_are_apart,
    engines_sleep_between_rollouts,
    rows_move_as_they_can,
)
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.left_out import pauses_are_resumed, shared_work_is_exact
from rlflow.scheduler.verify.loops import loops_are_read_whole, trips_are_gated
from rlflow.scheduler.verify.memory import memory_fits
from rlflow.scheduler.verify.numbers.bounds import bounds_are_right
from rlflow.scheduler.verify.numbers.kinds import kinds_are_kept
from rlflow.scheduler.verify.numbers.moved import (
    reshards_bring_what_lacks,
    sleeps_copy_their_parts,
)
from rlflow.scheduler.verify.numbers.row_bytes import rows_take_their_bytes
from rlflow.scheduler.verify.numbers.sizes import leftovers_are_right, sizes_agree
from rlflow.scheduler.verify.numbers.work import (
    chances_are_those_of_trips,
    costs_are_formed,
    pieces_cost_alike,
)
from rlflow.scheduler.verify.row_sets import (
    kept_rows_are_stated,
    memories_are_in_order,
    portions_are_whole,
    row_sets_are_counted,
)
from rlflow.scheduler.verify.rows import (
    chunks_are_legal,
    data_is_there,
    rows_are_carried,
    spreads_are_right,
)
from rlflow.scheduler.verify.shared_states import states_are_exact
from rlflow.scheduler.verify.sleep_wake import gradients_stay, moves_are_needed
from rlflow.scheduler.verify.time import (
    communicators_are_alone,
    devices_take_turns,
    list_is_an_order,
    time_adds_up,
)
from rlflow.scheduler.verify.weights import (
    averages_are_in_place,
    instances_are_placed,
    one_instance_is_trained,
    reshards_are_right,
    updates_take_turns,
    versions_are_exact,
)

STAGES = (
    "portions",
    "pause",
    "stamp",
    "rewrite",
    "unroll",
    "bind",
    "stream",
    "weights",
    "transfer",
    "order",
    "residency",
    "chain",
    "timing",
    "notes",
)


def verify(plan: Plan, stage: str) -> list[str]:
    """One sentence for every invariant that a plan breaks after pass `stage`; [] if all hold.

    What breaks a rule of `SHAPE` is reported alone: it would mislead the rules that
    follow. Raises ValueError for a stage that is no pass.
    """
    passes = STAGES[: STAGES.index(stage) + 1]
    facts = Facts(plan=plan)
    for since, rule in SHAPE:
        if since in passes and (broken := list(rule(facts))):
            return broken
    return [text for since, rule in MEANING if since in passes for text in rule(facts)]


Rule = Callable[[Facts], Iterator[str]]


def _acts(graph: Graph, node: Node) -> bool:
    """Whether a node has an effect, or ends a loop with one that is no gate."""
    within = nodes_within(graph, node.name) if node.ends_loop else ()
    return any(n.op.effect != "pure" for n in (node, *(n for n in within if not n.is_gate)))


def graph_is_whole(facts: Facts) -> Iterator[str]:
    """What nodes read is made by nodes of the graph; what is made or loaded is used."""
    graph = facts.plan.graph
    made = {(node.name, field.name) for node in graph.nodes for field in node.op.outputs}
    read = {binding.source for node in graph.nodes for binding in node.inputs}
    used = {node.model for node in graph.nodes}
    used |= {dict(node.params).get("tokenizer") for node in graph.nodes}
    for node in graph.nodes:
        for binding in node.inputs:
            if (binding.source, binding.field.name) not in made:
                yield f"{node.name} reads {binding}, which no node makes"
        if node.model is not None and all(node.model != model.name for model in graph.models):
            yield f"{node.name} uses model {node.model}, which the graph does not have"
        drafter = dict(node.params).get("drafter")
        if drafter is not None and all(drafter != model.name for model in graph.models):
            yield f"{node.name} lets {drafter} draft, which the graph does not have"
        used.add(drafter)
        if node.name not in read and not _acts(graph, node):
            yield f"nobody reads what {node.name} makes"
    for model in graph.models:
        if model.name not in used and model.path not in used:
            yield f"no node uses model {model.name}"


def actions_are_formed(facts: Facts) -> Iterator[str]:
    """Ids are unique, and every action has a reason, a period and what its kind needs."""
    plan = facts.plan
    known = {device for devices in plan.pools.values() for device in devices} | {HOST}
    wanted = {
        "run": ("node",),
        "transfer": ("node", "fields", "takes", "makes"),
        "sleep": ("part", "mode"),
        "wake": ("part", "mode"),
        "reshard": ("instance", "targets", "reads", "writes"),
    }
    for name, times in Counter(a.id for a in plan.actions).items():
        if times > 1:
            yield f"{times} actions are called {name}"
    for a in plan.actions:
        if not a.reason.rule or not a.reason.text:
            yield f"{a.id} has no reason"
        skips = a.kind in ("run", "reshard", "transfer")
        if a.every < 1 or (not a.always and not skips) or not 0 <= a.phase < a.every:
            yield f"{a.id} runs every {a.every} iterations, at {a.phase}"
        if a.ahead < 0:
            yield f"{a.id} runs {-a.ahead} iterations behind"
        if a.begins and (a.kind != "run" or a.chunk is None):
            yield f"{a.id} begins a cut and is no piece of a run"
        missing = [name for name in wanted[a.kind] if not getattr(a, name)]
        if missing:
            yield f"{a.kind} {a.id} has no {' and no '.join(missing)}"
        if not a.devices or len(set(a.devices)) < len(a.devices) or not known.issuperset(a.devices):
            yield f"{a.id} runs on devices {list(a.devices)}, the pools have {sorted(known)}"
        named = {name for name, _ in (*a.reads, *a.writes)} | {*a.targets} | ({a.instance} - {None})
        for name in sorted(str(name) for name in named.difference(facts.instances)):
            yield f"{a.id} names instance {name}, which does not exist"
        for name in sorted({*a.needs, *([a.part] if a.part else [])}.difference(facts.parts)):
            yield f"{a.id} names part {name}, which does not exist"


def parts_are_formed(facts: Facts) -> Iterator[str]:
    """Parts are on devices of the pools; what is awake at the start is a part."""
    plan = facts.plan
    known = {device for devices in plan.pools.values() for device in devices}
    for part in plan.parts:
        if not known.issuperset(part.devices):
            yield f"part {part.name} is on devices {list(part.devices)}, not of the pools"
    for name in sorted(set(plan.awake_at_start).difference(facts.parts)):
        yield f"part {name}, awake at the start, does not exist"


def nodes_run_once(facts: Facts) -> Iterator[str]:
    """Every node of the graph has exactly one run action, or one for each of its chunks."""
    graph = facts.plan.graph
    for node in graph.nodes:
        chunks = [a.chunk for a in facts.runs.get(node.name, ())]
        count = chunks[0].count if chunks and chunks[0] is not None else 1
        found = sorted((c.index, c.count) if c is not None else (0, 1) for c in chunks)
        if found != [(index, count) for index in range(count)]:
            yield f"node {node.name} has {len(chunks)} run actions of {count}"
    for a in facts.plan.actions:
        if a.node is not None and not graph.has_node(a.node):
            yield f"{a.id} is for node {a.node}, which the graph does not have"
        if a.chunk is not None and a.kind not in ("run", "transfer"):
            yield f"{a.id} is a {a.kind} of a chunk"


def deps_are_sound(facts: Facts) -> Iterator[str]:
    """Dependencies name actions, and none waits for itself however far others run ahead."""
    sound = True
    for a in facts.plan.actions:
        for dep in a.after:
            if dep.action not in facts.actions:
                sound = False
                yield f"{a.id} waits for {dep.action}, which does not exist"
    if not sound:
        return
    for a in facts.plan.actions:
        for dep in a.after:
            if facts.turns(a, dep) < 0:
                yield f"{a.id} waits for {dep.action} of a turn that is to come"
    if len(facts.sorted_ids) < len(facts.actions):
        rest = sorted(set(facts.actions).difference(facts.sorted_ids))
        yield f"within one turn a cycle holds up {', '.join(rest)}"


def turns_are_given(facts: Facts) -> Iterator[str]:
    """Distances are in turns, none below 0, and somebody is not ahead of anybody."""
    for a in facts.plan.actions:
        for dep in a.after:
            if dep.distance < 0:
                yield f"{a.id} waits for {dep.action} at distance {dep.distance}"
        if a.part is not None and a.ahead:
            yield f"{a.id} is of no iteration and runs {a.ahead} ahead"
    if min((a.ahead for a in facts.plan.actions), default=0):
        yield "every action runs ahead"


def runs_match_nodes(facts: Facts) -> Iterator[str]:
    """A run has its node's model, period, parts and versions, on its instance's devices."""
    for a in (a for runs in facts.runs.values() for a in runs):
        node = facts.plan.graph.node(str(a.node))
        host = a.pool == "host" and a.devices == (HOST,)
        if not host and facts.plan.pools.get(a.pool) != a.devices:
            yield f"{a.id} runs on {list(a.devices)}, which is not pool {a.pool}"
        if (a.every, a.phase, a.within) != (node.every, 0, node.within):
            yield (
                f"{a.id} runs every {a.every} at {a.phase}, within {a.within}: declared every "
                f"{node.every}, within {node.within}"
            )
        instance = facts.instances.get(a.instance or "")
        if (instance.model if instance else None) != node.model:
            yield f"{a.id} runs on instance {a.instance}, its model is {node.model}"
        elif instance is not None and (instance.pool, instance.devices) != (a.pool, a.devices):
            yield f"{a.id} runs on {a.pool}, its instance {instance.name} is on {instance.pool}"
        needs, reads, writes = facts.declared(node, instance)
        if (a.needs, a.reads, a.writes) != (needs, reads, () if facts.only_adds(a) else writes):
            yield (
                f"{a.id} needs {list(a.needs)}, reads {list(a.reads)}, writes "
                f"{list(a.writes)}: not what node {node.name} declares"
            )


SHAPE: tuple[tuple[str, Rule], ...] = (
    ("rewrite", graph_is_whole),
    ("bind", actions_are_formed),
    ("bind", parts_are_formed),
    ("bind", nodes_run_once),
    ("bind", deps_are_sound),
    ("bind", drafters_lie_in_their_engines),
    ("bind", runs_match_nodes),
)
"""Rules without which the others make no sense, each with the first pass it must hold after."""

MEANING: tuple[tuple[str, Rule], ...] = (
    ("portions", portions_are_whole),
    ("pause", pauses_are_resumed),
    ("rewrite", shared_work_is_exact),
    ("rewrite", row_sets_are_counted),
    ("bind", instances_are_placed),
    ("bind", one_instance_is_trained),
    ("bind", averages_are_in_place),
    ("bind", engines_are_apart),
    ("bind", rows_move_as_they_can),
    ("bind", kinds_are_kept),
    ("bind", sizes_agree),
    ("bind", costs_are_formed),
    ("bind", chances_are_those_of_trips),
    ("unroll", loops_are_read_whole),
    ("bind", chunks_are_legal),
    ("bind", trips_are_gated),
    ("bind", data_is_there),
    ("bind", states_are_exact),
    ("bind", memories_are_in_order),
    ("bind", kept_rows_are_stated),
    ("bind", spreads_are_right),
    ("weights", updates_take_turns),
    ("weights", versions_are_exact),
    ("weights", reshards_are_right),
    ("weights", reshards_bring_what_lacks),
    ("transfer", rows_are_carried),
    ("transfer", rows_take_their_bytes),
    ("transfer", pieces_cost_alike),
    ("order", turns_are_given),
    ("order", list_is_an_order),
    ("chain", memory_fits),
    ("chain", moves_are_needed),
    ("chain", gradients_stay),
    ("chain", sleeps_copy_their_parts),
    ("chain", leftovers_are_right),
    ("chain", engines_sleep_between_rollouts),
    ("chain", devices_take_turns),
    ("chain", communicators_are_alone),
    ("timing", time_adds_up),
    ("timing", bounds_are_right),
)
"""The invariants, each with the first pass after which it must hold."""
