"""The verifier: what must hold of a plan after each pass, by a method no pass shares.

Each rule is a function that yields a sentence for everything that breaks it. Orderings
are asked of what `after` implies in every interleaving, never of the place in the list;
memory is replayed in the order of the list, which `devices_take_turns` proves to be the
order on every device.

This file knows the graph and the plan; it shares no code with the passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import gcd

from rlflow.scheduler.facts import Facts
from rlflow.scheduler.plan import HOST, Action, Part, Plan

STAGES = ("rewrite", "bind", "weights", "transfer", "order", "residency", "chain", "timing")
TOLERANCE = 1e-6


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
        if node.op.effect == "pure" and node.name not in read:
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
        "transfer": ("node", "fields"),
        "sleep": ("part", "mode"),
        "wake": ("part", "mode"),
        "reshard": ("instance", "target", "reads", "writes"),
    }
    for name, times in Counter(a.id for a in plan.actions).items():
        if times > 1:
            yield f"{times} actions are called {name}"
    for a in plan.actions:
        if not a.reason.rule or not a.reason.text:
            yield f"{a.id} has no reason"
        skips = a.kind in ("run", "reshard", "transfer")
        if a.every < 1 or (a.every > 1 and not skips) or not 0 <= a.first <= (a.kind == "reshard"):
            yield f"{a.id} runs first in iteration {a.first} and every {a.every}"
        missing = [name for name in wanted[a.kind] if not getattr(a, name)]
        if missing:
            yield f"{a.kind} {a.id} has no {' and no '.join(missing)}"
        if not a.devices or len(set(a.devices)) < len(a.devices) or not known.issuperset(a.devices):
            yield f"{a.id} runs on devices {list(a.devices)}, the pools have {sorted(known)}"
        named = {name for name, _ in (*a.reads, *a.writes)} | ({a.instance, a.target} - {None})
        for name in sorted(str(name) for name in named.difference(facts.instances)):
            yield f"{a.id} names instance {name}, which does not exist"
        for name in sorted({*a.needs, *([a.part] if a.part else [])}.difference(facts.parts)):
            yield f"{a.id} names part {name}, which does not exist"
    for name in sorted(set(plan.awake_at_start).difference(facts.parts)):
        yield f"part {name}, awake at the start, does not exist"


def nodes_run_once(facts: Facts) -> Iterator[str]:
    """Every node of the graph has exactly one run action, and there are no others."""
    graph = facts.plan.graph
    times = Counter(a.node for a in facts.plan.actions if a.kind == "run")
    for node in graph.nodes:
        if times[node.name] != 1:
            yield f"node {node.name} has {times[node.name]} run actions"
    for a in facts.plan.actions:
        if a.node is not None and not graph.has_node(a.node):
            yield f"{a.id} is for node {a.node}, which the graph does not have"


def deps_are_sound(facts: Facts) -> Iterator[str]:
    """Dependencies name actions at a distance of 0 or more, and none waits for itself."""
    sound = True
    for a in facts.plan.actions:
        for dep in a.after:
            if dep.action not in facts.actions or dep.distance < 0:
                sound = False
                yield f"{a.id} waits for {dep.action} at distance {dep.distance}"
    if sound and len(facts.sorted_ids) < len(facts.actions):
        rest = sorted(set(facts.actions).difference(facts.sorted_ids))
        yield f"within one iteration a cycle holds up {', '.join(rest)}"


def instances_are_placed(facts: Facts) -> Iterator[str]:
    """Instances are on real pools, in layouts that fit, each used, with the parts they need."""
    plan = facts.plan
    names = Counter([i.name for i in plan.instances] + [p.name for p in plan.parts])
    yield from (f"{times} things are called {name}" for name, times in names.items() if times > 1)
    served = {action.instance for action in plan.actions if action.kind == "run"}
    expected = facts.expected_parts
    for i in plan.instances:
        if plan.pools.get(i.pool) != i.devices:
            yield f"{i.name} is on {list(i.devices)}, which is not pool {i.pool}"
        if len(i.devices) % (i.fsdp * i.tp):
            yield f"{i.name}: {i.fsdp} x {i.tp} ranks on {len(i.devices)} devices"
        if i.name not in served:
            yield f"no node runs on instance {i.name}"
    for name in sorted(expected.keys() ^ facts.parts.keys()):
        yield f"part {name} is {'missing' if name in expected else 'of nothing that is loaded'}"
    for p in plan.parts:
        if expected.get(p.name, ()) not in ((), (p.instance, p.kind, p.devices)):
            yield f"part {p.name} is {p.kind} of {p.instance} on {list(p.devices)}"


def one_instance_is_trained(facts: Facts) -> Iterator[str]:
    """All updates of a model run on the one instance that is marked as trained."""
    for model in facts.plan.graph.models:
        marked = {i.name for i in facts.plan.instances if i.model == model.name and i.trained}
        written = {str(update.instance) for update in facts.updates.get(model.name, [])}
        if marked != written or len(marked) > 1:
            yield (
                f"{model.name} is updated on {', '.join(sorted(written)) or 'no instance'}, "
                f"trained: {', '.join(sorted(marked)) or 'none'}"
            )


def runs_match_nodes(facts: Facts) -> Iterator[str]:
    """A run has its node's model, period, parts and versions, on its instance's devices."""
    for name, a in facts.runs.items():
        node = facts.plan.graph.node(name)
        host = a.pool == "host" and a.devices == (HOST,)
        if not host and facts.plan.pools.get(a.pool) != a.devices:
            yield f"{a.id} runs on {list(a.devices)}, which is not pool {a.pool}"
        if (a.every, a.first) != (node.every, 0):
            yield f"{a.id} runs every {a.every} from {a.first}, declared every {node.every}"
        instance = facts.instances.get(a.instance or "")
        if (instance.model if instance else None) != node.model:
            yield f"{a.id} runs on instance {a.instance}, its model is {node.model}"
        elif instance is not None and (instance.pool, instance.devices) != (a.pool, a.devices):
            yield f"{a.id} runs on {a.pool}, its instance {instance.name} is on {instance.pool}"
        if (a.needs, a.reads, a.writes) != facts.declared(node, instance):
            yield (
                f"{a.id} needs {list(a.needs)}, reads {list(a.reads)}, writes "
                f"{list(a.writes)}: not what node {node.name} declares"
            )


def data_is_there(facts: Facts) -> Iterator[str]:
    """A node starts after all that it reads was made, and is made at least as often as read."""
    for edge in facts.plan.graph.edges:
        if edge.kind != "data":
            continue
        source, target = facts.runs[edge.source], facts.runs[edge.target]
        if not facts.precedes(source.id, target.id, edge.distance):
            yield f"{target.id} may start before {source.id} has made {', '.join(edge.fields)}"
        if target.every % source.every:
            yield (
                f"{target.id} runs every {target.every} iterations and reads {source.id}, "
                f"which runs every {source.every}"
            )


def updates_take_turns(facts: Facts) -> Iterator[str]:
    """Updates of a model write in the order declared, an iteration's first after the last one's."""
    for model, updates in facts.updates.items():
        turns = [*pairwise(updates), (updates[-1], updates[0])]
        for number, (before, after) in enumerate(turns, 1):
            gap = 1 if number == len(turns) else 0
            if not facts.precedes(before.id, after.id, gap):
                yield f"{after.id} may start before {before.id} has written {model}"


def versions_are_exact(facts: Facts) -> Iterator[str]:
    """Who reads weights is after the write of the version it declares and before the next."""
    for a in facts.plan.actions:
        for name, lag in a.reads:
            model = facts.instances[name].model
            if model not in facts.updates or a in facts.updates[model]:
                continue
            writers = facts.writers(name)
            if not writers:
                yield f"{a.id} reads {name}, which no reshard ever fills with what {model} learns"
                continue
            first, last = writers[0], writers[-1]
            _, written = last.writes[0]
            gap = lag - written
            if not facts.precedes(last.id, a.id, gap):
                yield f"{a.id} may read {name} before {last.id} has written version {_version(lag)}"
            if not facts.precedes(a.id, first.id, 1 - gap):
                yield f"{first.id} may overwrite version {_version(lag)} of {name} before {a.id}"
            if a.every % last.every or gap % last.every or last.first > 1 + written:
                yield (
                    f"{a.id} (every {a.every}) finds an old version in {name}: {last.id} "
                    f"writes it every {last.every} iterations from {last.first}"
                )


def _version(lag: int) -> str:
    return "i" if lag == 0 else f"i{-lag:+d}"


def reshards_are_right(facts: Facts) -> Iterator[str]:
    """A reshard brings the version it reads to an instance of the model that somebody reads."""
    for target, into in facts.reshards.items():
        if len(into) > 1:
            yield f"{target} is filled by {' and by '.join(a.id for a in into)}"
        held = facts.instances[target]
        readers = [a for a in facts.runs.values() if (target in dict(a.reads))]
        for a in into:
            source = facts.instances[str(a.instance)]
            if source.model != held.model or source == held or held.trained:
                yield f"{a.id} writes {source.name} into {target}"
            if held.model not in facts.updates:
                yield f"{a.id} is useless: nothing updates {held.model}"
            if gcd(*(reader.every for reader in readers)) != a.every:
                who = ", ".join(f"{reader.id} every {reader.every}" for reader in readers)
                yield (
                    f"{a.id} is useless in some iterations: it runs every {a.every}, "
                    f"read by {who or 'nobody'}"
                )
            lag = dict(a.reads).get(source.name)
            if a.reads != ((source.name, lag),) or a.writes != ((target, lag),):
                yield f"{a.id} reads {list(a.reads)} and writes {list(a.writes)}"
            if set(a.needs) != {source.weights, held.weights}:
                yield f"{a.id} needs {list(a.needs)}"
            if set(a.devices) != {*source.devices, *held.devices}:
                yield f"{a.id} runs on {list(a.devices)}, not on both ends' devices"


def rows_are_carried(facts: Facts) -> Iterator[str]:
    """Rows read on other devices than they are made on are carried there, once, and no others."""
    wanted: dict[tuple[str, tuple[int, ...]], set[str]] = {}
    carried: dict[tuple[str, tuple[int, ...]], Action] = {}
    for a in facts.plan.actions:
        if a.kind == "transfer":
            key = (str(a.node), a.devices)
            if key in carried:
                yield f"{a.id} carries what {carried[key].id} carries"
            carried[key] = a
    for edge in facts.plan.graph.edges:
        source, target = facts.runs[edge.source], facts.runs[edge.target]
        crosses = edge.kind == "data" and source.devices != target.devices
        if not crosses or facts.one_process:
            continue
        wanted.setdefault((edge.source, target.devices), set()).update(edge.fields)
        found = carried.get((edge.source, target.devices))
        if found is None or not set(edge.fields) <= set(found.fields):
            yield f"nothing carries {', '.join(edge.fields)} of {source.id} to {target.id}"
        elif not facts.precedes(found.id, target.id, 0):
            yield f"{target.id} may start before {found.id} has carried its rows"
        elif not facts.precedes(source.id, found.id, 0) or found.every != source.every:
            yield f"{found.id} may start before {source.id} has made the rows"
    for key, a in carried.items():
        useless = sorted(set(a.fields) - wanted.get(key, set()))
        if useless:
            yield f"{a.id} carries {', '.join(useless)}, which nobody reads there"


def list_is_an_order(facts: Facts) -> Iterator[str]:
    """Each action is listed after those of its iteration that it waits for."""
    seen: set[str] = set()
    for a in facts.plan.actions:
        for dep in a.after:
            if dep.distance == 0 and dep.action not in seen:
                yield f"{a.id} is listed before {dep.action}, which it waits for"
        seen.add(a.id)


def memory_fits(facts: Facts) -> Iterator[str]:
    """Nothing is used asleep, no device is ever over budget, and the peaks are as stated."""
    plan, replay = facts.plan, facts.replay
    yield from replay.broken
    peaks = {device: 0 for devices in plan.pools.values() for device in devices}
    for a, load in zip(plan.actions, replay.loads, strict=True):
        away = {d for need in a.needs for d in facts.parts[need].devices}.difference(a.devices)
        if away:
            yield f"{a.id} needs parts on devices {sorted(away)}, which it does not take"
        for device, size in load.items():
            peaks[device] = max(peaks[device], size)
            if size > plan.budget:
                yield f"{a.id} holds {size} bytes on device {device}, the budget is {plan.budget}"
        peak = max(load.values(), default=None)
        if a.peak != peak:
            yield f"{a.id} states a peak of {a.peak} bytes, it is {peak}"
    if dict(plan.peaks) != peaks:
        yield f"the plan states peaks of {dict(plan.peaks)}, they are {peaks}"


def moves_are_needed(facts: Facts) -> Iterator[str]:
    """Each sleep makes room that is needed, each wake has a user, and both lose no weights."""
    actions, count = facts.plan.actions, len(facts.plan.actions)
    for index, a in enumerate(actions):
        if a.kind not in ("sleep", "wake"):
            continue
        part = facts.parts[str(a.part)]
        if a.devices != part.devices:
            yield f"{a.id} runs on {list(a.devices)}, {part.name} is on {list(part.devices)}"
        following = [(index + ahead) % count for ahead in range(1, count)]
        back = next((n for n in following if actions[n].part == part.name), index)
        until = following[: (back - index - 1) % count]
        used = any(part.name in actions[n].needs for n in until)
        if a.kind == "wake" and not used:
            yield f"{a.id} is useless: nobody needs {part.name} before it sleeps again"
        held = facts.replay.most(until, part.devices)
        if a.kind == "sleep" and held + (part.size or 0) <= facts.plan.budget:
            yield f"{a.id} is useless: {part.name} would have fitted until {actions[back].id}"
        yield from _mode_is_right(facts, a, part, following)


def _mode_is_right(facts: Facts, a: Action, part: Part, following: list[int]) -> Iterator[str]:
    """Discarded is what a reshard fills before anyone reads it, and only that."""
    actions = facts.plan.actions
    user = next((actions[n] for n in following if part.name in actions[n].needs), None)
    filled = user is not None and user.kind == "reshard" and user.target == part.instance
    if (a.mode == "discard") is not filled:
        after = f"{user.id} is next to use it" if user else "nobody uses it"
        yield f"{a.id} is marked {a.mode}, and {after}"
    empty = filled and a.kind == "wake" and part.name not in facts.plan.awake_at_start
    if user is not None and empty and user.first:
        yield f"{a.id} wakes {part.name} empty, and {user.id} first fills it in {user.first}"


def devices_take_turns(facts: Facts) -> Iterator[str]:
    """On each device an action is over before the next one starts, around the iteration too."""
    for device, queue in sorted(facts.queues.items()):
        turns = [*pairwise(queue), (queue[-1], queue[0])]
        for number, (before, after) in enumerate(turns, 1):
            if not facts.precedes(before, after, 1 if number == len(turns) else 0):
                place = "the host" if device == HOST else f"device {device}"
                yield f"{before} and {after} may run on {place} at the same time"


def time_adds_up(facts: Facts) -> Iterator[str]:
    """The period is stated where every cost is known, and is not below what bounds it."""
    timing = facts.plan.timing
    known = all(action.cost.seconds is not None for action in facts.plan.actions)
    if (timing is not None) != known:
        yield "timing is stated for unknown costs" if timing else "no timing is stated"
    elif timing is None:
        return
    elif timing.period < max(timing.resource_bound, timing.recurrence_bound) * (1 - TOLERANCE):
        yield (
            f"the period is {timing.period:g} s, below its bounds {timing.resource_bound:g} s "
            f"and {timing.recurrence_bound:g} s"
        )


SHAPE: tuple[tuple[str, Rule], ...] = (
    ("rewrite", graph_is_whole),
    ("bind", actions_are_formed),
    ("bind", nodes_run_once),
    ("bind", deps_are_sound),
    ("bind", runs_match_nodes),
)
"""Rules without which the others make no sense, each with the first pass it must hold after."""

MEANING: tuple[tuple[str, Rule], ...] = (
    ("bind", instances_are_placed),
    ("bind", one_instance_is_trained),
    ("bind", data_is_there),
    ("weights", updates_take_turns),
    ("weights", versions_are_exact),
    ("weights", reshards_are_right),
    ("transfer", rows_are_carried),
    ("order", list_is_an_order),
    ("residency", memory_fits),
    ("residency", moves_are_needed),
    ("chain", devices_take_turns),
    ("timing", time_adds_up),
)
"""The invariants, each with the first pass after which it must hold."""
