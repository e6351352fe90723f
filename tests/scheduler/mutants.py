"""Plans that are wrong in one place, made of plans that are right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from rlflow.graph.graph import Node
from rlflow.scheduler.plan.plan import Action, Dep, Part, Plan, Spread
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.memory import memory_of

INSERTED = ("transfer", "reshard", "sleep", "wake")
Mutant = tuple[str, Plan]


def with_action(plan: Plan, name: str, **changes: object) -> Plan:
    """The plan with one action changed."""
    actions = tuple(replace(a, **changes) if a.id == name else a for a in plan.actions)
    return replace(plan, actions=actions)


def without_action(plan: Plan, name: str) -> Plan:
    """The plan without an action; who waited for it waits for what it waited for."""
    gone = plan.action(name)

    def bridged(action: Action) -> tuple[Dep, ...]:
        after: dict[tuple[str, int], Dep] = {}
        for dep in action.after:
            over = [replace(d, distance=d.distance + dep.distance) for d in gone.after]
            for new in [dep] if dep.action != name else [d for d in over if d.action != name]:
                after.setdefault((new.action, new.distance), new)
        return tuple(after.values())

    kept = tuple(replace(a, after=bridged(a)) for a in plan.actions if a.id != name)
    return replace(plan, actions=kept)


def mutants(plan: Plan) -> Iterator[Mutant]:
    """Every mutant of every kind."""
    kinds = (removed, without_dep, swapped, moved, numbers, doubled, redirected, slept, spread)
    kinds += (cut, caches, leaving, paused, engines, drafters)
    for kind in kinds:
        yield from kind(plan)


def removed(plan: Plan) -> Iterator[Mutant]:
    """An action less; the order of the others is kept."""
    for action in plan.actions:
        yield f"no {action.id}", without_action(plan, action.id)
    for name in plan.awake_at_start:
        rest = tuple(other for other in plan.awake_at_start if other != name)
        yield f"{name} asleep at the start", replace(plan, awake_at_start=rest)


def without_dep(plan: Plan) -> Iterator[Mutant]:
    """A dependency less, unless the others imply it: then nothing changes but the text."""
    past = Facts(plan=plan).unrolled.past
    for action in plan.actions:
        for dep in action.after:
            after = tuple(other for other in action.after if other != dep)
            mutant = with_action(plan, action.id, after=after)
            if Facts(plan=mutant).unrolled.past != past:
                yield f"{action.id} not after {dep.action} @{dep.distance}", mutant


def swapped(plan: Plan) -> Iterator[Mutant]:
    """Two actions of one device with each other's dependencies."""
    for one, other in combinations(plan.actions, 2):
        if one.lane == other.lane and set(one.devices) & set(other.devices):
            mutant = with_action(plan, one.id, after=other.after)
            yield f"{one.id} <-> {other.id}", with_action(mutant, other.id, after=one.after)


def moved(plan: Plan) -> Iterator[Mutant]:
    """Two neighbours on a device the other way round in the list only."""
    for index, (one, other) in enumerate(zip(plan.actions, plan.actions[1:], strict=False)):
        if one.lane == other.lane and set(one.devices) & set(other.devices):
            actions = (*plan.actions[:index], other, one, *plan.actions[index + 2 :])
            yield f"{other.id} listed before {one.id}", replace(plan, actions=actions)


def learns(plan: Plan, action: Action) -> bool:
    """Whether an action uses weights that are updated."""
    return any(plan.trained_instance(plan.instance(name).model) for name, _ in action.reads)


def numbers(plan: Plan) -> Iterator[Mutant]:
    """A figure off by one."""
    for a in plan.actions:
        for turn in (-1, 1):
            if a.reads:
                reads = ((a.reads[0][0], a.reads[0][1] + turn),)
                yield f"{a.id} reads {reads}", with_action(plan, a.id, reads=reads)
            if a.writes:
                writes = ((a.writes[0][0], a.writes[0][1] + turn),)
                yield f"{a.id} writes {writes}", with_action(plan, a.id, writes=writes)
        if a.peak:
            yield f"peak of {a.id}", with_action(plan, a.id, peak=a.peak - 1)
        if a.kind != "sleep" and a.kind != "wake":
            yield f"{a.id} every {a.every + 1}", with_action(plan, a.id, every=a.every + 1)
        phase = (a.phase + 1) % (a.every + 1)
        yield f"{a.id} at {phase}", with_action(plan, a.id, phase=phase)
        if a.after and (a.kind != "run" or plan.graph.node(str(a.node)).inputs or learns(plan, a)):
            yield f"{a.id} {a.ahead + 1} ahead", with_action(plan, a.id, ahead=a.ahead + 1)
        longer = tuple(replace(dep, distance=-1) for dep in a.after)
        if longer:
            yield f"{a.id} waits for the future", with_action(plan, a.id, after=longer)
    for device, peak in plan.peaks.items():
        if peak:
            yield f"peak of device {device}", replace(plan, peaks={**plan.peaks, device: peak - 1})
    for device, peak in plan.peaks.items():
        if peak:
            yield (
                f"too few bytes on {device}",
                replace(plan, budgets={**plan.budgets, device: peak - 1}),
            )


def doubled(plan: Plan) -> Iterator[Mutant]:
    """An action twice, under its own name and under another."""
    for action in plan.actions:
        yield f"{action.id} twice", replace(plan, actions=(*plan.actions, action))
        twin = replace(
            action,
            id=f"{action.id}'",
            after=(*action.after, Dep(action=action.id, distance=0, kind="order")),
        )
        yield f"{action.id} and a twin", replace(plan, actions=(*plan.actions, twin))


def redirected(plan: Plan) -> Iterator[Mutant]:
    """An action on another instance, part, node or device."""
    names = [instance.name for instance in plan.instances]
    for a in plan.actions:
        for name in names:
            if a.targets and name not in a.targets:
                targets = (*a.targets[:-1], name)
                writes = tuple((target, a.writes[0][1]) for target in targets)
                changes = {"targets": targets, "writes": writes}
                yield f"{a.id} fills {name}", with_action(plan, a.id, **changes)
            if a.instance is not None and a.part is None and name != a.instance:
                reads = tuple((name, lag) for _, lag in a.reads)
                yield f"{a.id} uses {name}", with_action(plan, a.id, instance=name, reads=reads)
        for need in a.needs:
            rest = tuple(other for other in a.needs if other != need)
            yield f"{a.id} without {need}", with_action(plan, a.id, needs=rest)
        for part in plan.parts:
            if a.part is not None and part.name != a.part:
                yield f"{a.id} of {part.name}", with_action(plan, a.id, part=part.name)
        for field in a.fields:
            rest = tuple(other for other in a.fields if other != field)
            yield f"{a.id} without {field}", with_action(plan, a.id, fields=rest)
        spare = max(max(devices) for devices in plan.pools.values()) + 1
        yield f"{a.id} elsewhere", with_action(plan, a.id, devices=(spare,))
        if len(a.devices) > 1:
            yield f"{a.id} on fewer devices", with_action(plan, a.id, devices=a.devices[1:])
    for i in plan.instances:
        others = tuple(replace(o, trained=not o.trained) if o == i else o for o in plan.instances)
        yield f"{i.name} trained: {not i.trained}", replace(plan, instances=others)


def slept(plan: Plan) -> Iterator[Mutant]:
    """A sleep or wake of the other mode; a part that is awake at the start and should not be."""
    for a in plan.actions:
        if a.mode is not None:
            mode = "offload" if a.mode == "discard" else "discard"
            yield f"{a.id} {mode}", with_action(plan, a.id, mode=mode)
    for part in plan.parts:
        if part.name not in plan.awake_at_start:
            more = (*plan.awake_at_start, part.name)
            yield f"{part.name} awake at the start", replace(plan, awake_at_start=more)


def spread(plan: Plan) -> Iterator[Mutant]:
    """Rows in other parts, by another rule, or none; weights by another transport."""
    for a in plan.actions:
        for word in ("takes", "makes"):
            rows = getattr(a, word)
            for text, other in _others(a, rows):
                yield f"{a.id} {word} {text}", with_action(plan, a.id, **{word: other})
        for transport in (
            "copy",
            "shared memory",
            "collective",
            "ipc",
            "broadcast",
            "object store",
        ):
            if a.transport not in (None, transport):
                yield f"{a.id} by {transport}", with_action(plan, a.id, transport=transport)
        if len(a.targets) > 1:
            fewer = {"targets": a.targets[:1], "writes": a.writes[:1]}
            yield f"{a.id} fills less", with_action(plan, a.id, **fewer)


def cut(plan: Plan) -> Iterator[Mutant]:
    """Pieces of another cut, begun elsewhere, or one in the place of the other."""
    for a in plan.actions:
        yield f"{a.id} begins: {not a.begins}", with_action(plan, a.id, begins=not a.begins)
        if a.chunk is None:
            continue
        by = "prompts" if a.chunk.by == "finish" else "finish"
        yield f"{a.id} by {by}", with_action(plan, a.id, chunk=replace(a.chunk, by=by))
        for b in plan.actions:
            pieces = b.chunk is not None and (a.kind, a.node) == (b.kind, b.node)
            if pieces and a.kind == "run" and a.chunk.index < b.chunk.index:
                changed = with_action(plan, a.id, chunk=b.chunk)
                yield f"{a.id} is {b.id}", with_action(changed, b.id, chunk=a.chunk)
    roots = {a.node for a in plan.actions if a.begins}
    for node in sorted(str(root) for root in roots):
        changes = {"begins": False}
        actions = tuple(replace(a, **changes) if a.node == node else a for a in plan.actions)
        yield f"no piece of {node} begins", replace(plan, actions=actions)


def caches(plan: Plan) -> Iterator[Mutant]:
    """What a rollout keeps between its pieces is not there, elsewhere, or may be lost."""
    for part in plan.parts:
        if part.kind != "cache":
            continue
        rest = tuple(other for other in plan.parts if other != part)
        awake = tuple(name for name in plan.awake_at_start if name != part.name)
        gone = replace(plan, parts=rest, awake_at_start=awake)
        yield f"no {part.name}", gone
        actions = (
            replace(a, needs=tuple(need for need in a.needs if need != part.name))
            for a in plan.actions
        )
        yield f"{part.name} forgotten", replace(gone, actions=tuple(actions))
        spare = max(max(devices) for devices in plan.pools.values()) + 1
        others = [plan.instances[number].name for number in (0, -1)]
        changes: list[dict[str, object]] = [{"residual": 0}, {"devices": (spare,)}]
        changes += [{"kind": "weights"}, {"size": 2 * (part.size or 1)}]
        changes += [{"instance": name} for name in others if name != part.instance]
        for change in changes:
            parts = (replace(p, **change) if p == part else p for p in plan.parts)
            yield f"{part.name} with {change}", replace(plan, parts=tuple(parts))


def leaving(plan: Plan) -> Iterator[Mutant]:
    """A part that stays on other devices than its sleep leaves it on, or sleeps for nothing."""
    moved = {a.part for a in plan.actions if a.part is not None}
    for part in plan.parts:
        for stays in dict.fromkeys(((), part.devices, part.devices[:1])):
            if stays != part.stays and (part.name in moved or stays):
                parts = (replace(p, stays=stays) if p == part else p for p in plan.parts)
                yield f"{part.name} stays on {stays}", replace(plan, parts=tuple(parts))
        if part.stays:
            yield f"{part.name} sleeps where it fits", asleep_everywhere(plan, part)


def asleep_everywhere(plan: Plan, part: Part) -> Plan:
    """The plan with a part's sleeps and wakes on all of its devices, and the peaks restated."""
    actions = (replace(a, devices=part.devices) if a.part == part.name else a for a in plan.actions)
    parts = (replace(p, stays=()) if p == part else p for p in plan.parts)
    wrong = replace(plan, actions=tuple(actions), parts=tuple(parts))
    memory = memory_of(Facts(plan=wrong))
    restated = tuple(replace(a, peak=memory.peak(a)) for a in wrong.actions)
    return replace(wrong, actions=restated, peaks=memory.stated)


def paused(plan: Plan) -> Iterator[Mutant]:
    """A rollout that goes on elsewhere than it stopped, otherwise, or with other rows."""
    for node in plan.graph.nodes:
        if node.resumes is None:
            continue
        params = dict(node.params)
        for name, value in (("first", params["first"] + 1), ("temperature", 0.5), ("resumes", "x")):
            changed = replace(node, params=tuple({**params, name: value}.items()))
            yield f"{node.name} with {name}={value}", with_node(plan, changed)
        fields = {made.name for made in node.op.outputs}
        for other in plan.graph.nodes:
            inputs = tuple(
                replace(bound, source=node.resumes) if bound.source == node.name else bound
                for bound in other.inputs
            )
            if inputs != other.inputs:
                assert fields & {bound.field.name for bound in inputs}
                early = replace(other, inputs=inputs)
                yield f"{other.name} reads what is paused", with_node(plan, early)


def engines(plan: Plan) -> Iterator[Mutant]:
    """An engine that cannot give memory back, a pool that is copied or needed elsewhere."""
    asleep = {a.instance for a in plan.actions if a.part is not None}
    for i in plan.instances:
        if i.options is None:
            continue
        savers = (None, False) if i.name in asleep else (None,)
        changes = [{"options": i.options.model_copy(update={"memory_saver": s})} for s in savers]
        changes += [{"options": None}, {"uses": ("forward", "rollout")}, {"recompute": True}]
        for change in changes:
            others = tuple(replace(o, **change) if o == i else o for o in plan.instances)
            yield f"{i.name} with {change}", replace(plan, instances=others)
        for a in plan.actions:
            if i.pool_part not in a.needs and a.part is None:
                needs = (*a.needs, i.pool_part)
                yield f"{a.id} needs {i.pool_part}", with_action(plan, a.id, needs=needs)
            if a.part == i.pool_part:
                cost = replace(a.cost, moved=1)
                yield f"{a.id} copies", with_action(plan, a.id, cost=cost)


def drafters(plan: Plan) -> Iterator[Mutant]:
    """A drafter in no engine or another one, one that is more than that, or drafts otherwise."""
    for i in plan.instances:
        changes: list[dict[str, object]] = []
        if i.inside is not None:
            changes += [{"inside": None}, {"inside": i.name}, {"trained": True}, {"fsdp": 2}]
            changes += [{"uses": ("forward", "rollout")}, {"drafter": i.model, "draft_tokens": 1}]
        if i.drafter is not None:
            changes += [{"drafter": None}, {"drafter": i.model}, {"draft_tokens": 0}]
            changes += [{"draft_tokens": i.draft_tokens + 1}]
        for change in changes:
            others = tuple(replace(o, **change) if o == i else o for o in plan.instances)
            yield f"{i.name} with {change}", replace(plan, instances=others)
        if i.inside is not None:
            parts = [replace(p, size=1) if p.name == i.weights else p for p in plan.parts]
            yield f"{i.weights} of a byte", replace(plan, parts=tuple(parts))


def with_node(plan: Plan, changed: Node) -> Plan:
    """The plan with one node of its graph changed."""
    nodes = (changed if node.name == changed.name else node for node in plan.graph.nodes)
    return replace(plan, graph=replace(plan.graph, nodes=tuple(nodes)))


def _others(action: Action, rows: Spread | None) -> Iterator[tuple[str, Spread | None]]:
    """Every way in which the rows of an action could lie and do not."""
    if rows is None:
        if action.kind == "run":
            yield "rows", Spread(parts=(action.devices,))
        return
    yield "none", None
    devices = action.devices
    ways = [
        Spread(parts=(devices,)),
        Spread(parts=(devices[:1],)),
        Spread(parts=tuple((device,) for device in devices), rule="balanced"),
        replace(rows, rule="balanced"),
        replace(rows, rule="generated"),
        replace(rows, parts=rows.parts[::-1]),
        replace(rows, parts=rows.parts[:-1]),
    ]
    for way in ways:
        if way != rows:
            yield str(way), way
