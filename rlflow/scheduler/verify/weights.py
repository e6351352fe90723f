"""Rules of the verifier: instances, the versions of weights, and the reshards that bring them.

Knows the graph and the plan; shares no code with the passes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from math import gcd

from rlflow.scheduler.plan.plan import Action, Instance
from rlflow.scheduler.verify.happens_before import Facts, runs_only_with


def instances_are_placed(facts: Facts) -> Iterator[str]:
    """Instances are on real pools, in layouts that fit, each used, with the parts they need."""
    plan = facts.plan
    names = Counter([i.name for i in plan.instances] + [p.name for p in plan.parts])
    yield from (f"{times} things are called {name}" for name, times in names.items() if times > 1)
    served = {action.instance for action in plan.actions if action.kind == "run"}
    served |= {name for a in plan.actions if a.kind == "run" for name, _ in a.reads}
    expected = facts.expected_parts
    for i in plan.instances:
        if plan.pools.get(i.pool) != i.devices:
            yield f"{i.name} is on {list(i.devices)}, which is not pool {i.pool}"
        if len(i.devices) % (i.pp * i.fsdp * i.cp * i.tp):
            sizes = f"{i.pp} x {i.fsdp} x {i.cp} x {i.tp}"
            yield f"{i.name}: {sizes} ranks on {len(i.devices)} devices"
        if i.stages and (len(i.stages) != i.pp * i.virtual or min(i.stages) < 1):
            yield f"{i.name}: stages of {i.stages} layers, where there are {i.pp} x {i.virtual}"
        if i.schedule != "1f1b" and (i.pp == 1 or i.virtual > 1 or not i.trained):
            yield f"{i.name}: {i.schedule} of pp={i.pp}, virtual={i.virtual}, trained {i.trained}"
        if i.schedule != "1f1b" and i.fsdp * i.cp > 1 and not i.reduces_last:
            yield f"{i.name}: {i.schedule}, and each micro-batch sums gradients of weights"
        if i.fsdp * i.cp % i.ep:
            yield f"{i.name}: experts apart on {i.ep} of {i.fsdp * i.cp} ranks"
        if i.name not in served:
            yield f"no node runs on instance {i.name}"
    for name in sorted(expected.keys() ^ facts.parts.keys()):
        yield f"part {name} is {'missing' if name in expected else 'of nothing that is loaded'}"
    for p in plan.parts:
        if expected.get(p.name, ()) not in ((), (p.instance, p.kind, p.devices)):
            yield f"part {p.name} is {p.kind} of {p.instance} on {list(p.devices)}"
        if p.kind == "cache" and p.residual != (p.size or 0):
            yield f"part {p.name} leaves {p.residual} bytes asleep, and a cache never sleeps"


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


def averages_are_in_place(facts: Facts) -> Iterator[str]:
    """An average has one writer, and lies like the weights that it is taken of, shard by shard."""
    trained = {i.model: i for i in facts.plan.instances if i.trained}
    for model, of in facts.averaged.items():
        writers = [update.id for update in facts.updates[model]]
        if len(writers) > 1:
            yield f"average {model} is written by {' and by '.join(writers)}"
        if of in facts.averaged or of not in trained:
            yield f"{model} is an average of {of}, which does not learn"
            continue
        if model not in trained:
            continue
        ends = trained[model], trained[of]
        lies, wanted = ((i.pool, i.devices, i.fsdp, i.tp, i.ep, i.cp, i.pp) for i in ends)
        if lies != wanted:
            yield f"{ends[0].name} averages {ends[1].name} and lies otherwise"


def updates_take_turns(facts: Facts) -> Iterator[str]:
    """Updates of a model write in the order declared, an iteration's first after the last one's."""
    for model, updates in facts.updates.items():
        turns = [*pairwise(updates), (updates[-1], updates[0])]
        for number, (before, after) in enumerate(turns, 1):
            gap = 1 if number == len(turns) else 0
            if not facts.comes_before(before.id, after.id, gap):
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
            if not facts.comes_before(last.id, a.id, gap):
                yield f"{a.id} may read {name} before {last.id} has written version {_version(lag)}"
            if not facts.comes_before(a.id, first.id, 1 - gap):
                yield f"{first.id} may overwrite version {_version(lag)} of {name} before {a.id}"
            brought = all(runs_only_with(u, last) for u in facts.updates[model])
            missed = a.every % last.every or (a.phase - gap - last.phase) % last.every
            if last.kind == "reshard" and missed and not brought:
                yield (
                    f"{a.id} (every {a.every}) finds an old version in {name}: {last.id} "
                    f"writes it every {last.every} iterations, at {last.phase}"
                )


def _version(lag: int) -> str:
    return "i" if lag == 0 else f"i{-lag:+d}"


def reshards_are_right(facts: Facts) -> Iterator[str]:
    """A reshard brings the version it reads to instances of the model that somebody reads."""
    for target, into in facts.reshards.items():
        if len(into) > 1:
            yield f"{target} is filled by {' and by '.join(a.id for a in into)}"
        held = facts.instances[target]
        readers = [a for runs in facts.runs.values() for a in runs if target in dict(a.reads)]
        for a in into:
            if facts.instances[str(a.instance)].model != held.model or held.trained:
                yield f"{a.id} writes {a.instance} into {target}"
            if held.model not in facts.updates:
                yield f"{a.id} is useless: nothing updates {held.model}"
            wanted = gcd(*(reader.every for reader in readers))
            updates = facts.updates.get(held.model, [])
            due = {(update.every, update.phase, update.within) for update in updates}
            if wanted != 1 or len(due) != 1:
                due = {(wanted, wanted - 1, (0, None))}
            if (a.every, a.phase, a.within) not in due:
                who = ", ".join(f"{reader.id} every {reader.every}" for reader in readers)
                yield (
                    f"{a.id} is useless in some iterations: it runs every {a.every} at {a.phase}, "
                    f"{target} is read by {who or 'nobody'}"
                )
    for a in facts.plan.actions:
        if a.kind == "reshard":
            yield from _ends_are_right(facts, a)


def _ends_are_right(facts: Facts, a: Action) -> Iterator[str]:
    """Both ends of one reshard: versions, memory, devices, and how the weights travel."""
    source = facts.instances[str(a.instance)]
    targets = [facts.instances[name] for name in a.targets]
    lag = dict(a.reads).get(source.name)
    writes = tuple((name, lag) for name in a.targets)
    if a.reads != ((source.name, -1),) or a.writes != writes or not source.trained:
        yield f"{a.id} reads {list(a.reads)} and writes {list(a.writes)}"
    if set(a.needs) != {source.weights, *(target.weights for target in targets)}:
        yield f"{a.id} needs {list(a.needs)}"
    if set(a.devices) != {*source.devices, *(d for target in targets for d in target.devices)}:
        yield f"{a.id} runs on {list(a.devices)}, not on both ends' devices"
    alone = [
        target.name
        for target in targets
        if len(targets) > 1
        and not any(set(target.devices) & set(o.devices) for o in targets if o is not target)
    ]
    if alone:
        yield f"{a.id} makes {', '.join(alone)} wait for pools it has no device in common with"
    if a.transport != _transport(facts, source, targets):
        yield f"{a.id} goes by {a.transport}, not by {_transport(facts, source, targets)}"


def _transport(facts: Facts, source: Instance, targets: list[Instance]) -> str:
    """How weights have to travel, by what each process of the targets holds of the source."""
    if all(_opens_memory(facts, target) for target in targets):
        beside = all(device in source.devices for target in targets for device in target.devices)
        return "ipc" if beside else "broadcast"
    if facts.one_process or all(_held(source, target) for target in targets):
        return "copy"
    single = facts.plan.cluster.startswith("cpu:") and facts.plan.hosts == 1
    return "shared memory" if single else "collective"


def _opens_memory(facts: Facts, target: Instance) -> bool:
    """Whether an engine, of a whole model alone, opens devices' memory: as told, or not on CPUs."""
    options, model = target.engine_plan.lendable, facts.plan.graph.model(target.model)
    if options is None or model.lora is not None or target.drafter is not None:
        return False
    wants = getattr(options, "quantization", None) == "fp8" or not facts.plan.cluster.startswith(
        "cpu:"
    )
    return options.updates == "device" or (options.updates is None and wants)


def _held(source: Instance, target: Instance) -> bool:
    """Whether every process of the target holds its pieces in the source: side by side."""
    cells, layers = source.ranks * target.ranks, layers_of(source, target)
    return all(
        device in source.devices
        and stage_held(target, device, layers) <= stage_held(source, device, layers)
        and all(
            not mine or (theirs.start <= mine.start and mine.stop <= theirs.stop)
            for mine, theirs in zip(
                cells_held(target, device, cells), cells_held(source, device, cells), strict=True
            )
        )
        for device in target.owners
    )


def layers_of(source: Instance, target: Instance) -> int:
    """Into how many layers two instances of a model are taken to be cut, known or not."""
    known = {sum(each.stages) for each in (source, target) if each.stages}
    return max(known, default=math.lcm(*(each.pp * each.virtual for each in (source, target))))


def stage_held(instance: Instance, device: int, layers: int) -> frozenset[int]:
    """The layers of so many that a device holds; before them lies an embedding, after them a head.

    Those have the numbers -1 and `layers`.
    """
    stages = instance.pp * instance.virtual
    counts = instance.stages or (layers // stages,) * stages
    place = instance.devices.index(device) // (instance.shards * instance.tp) % instance.pp
    found = {-1} if place == 0 else set[int]()
    found |= {layers} if place == instance.pp - 1 else set()
    for stage in range(place, stages, instance.pp):
        found.update(range(sum(counts[:stage]), sum(counts[: stage + 1])))
    return frozenset(found)


def cells_held(instance: Instance, device: int, cells: int) -> tuple[range, ...]:
    """The cells that a device holds along the sides that are cut, of `cells` in each side.

    Of a parameter that `tp` cuts along its first side, of one it cuts along its second, of one it
    does not cut, and of experts; `fsdp` x `cp` cut each along its first side, experts after
    neighbours along `ep` have. Of an engine the first rank holds all, and shares it out itself.
    """
    if instance.engine_plan.in_process:
        rank = instance.devices.index(device) % instance.ranks
        return tuple(range(0 if rank else cells) for _ in range(4))
    rank = instance.devices.index(device) % (instance.shards * instance.tp)
    shard, layer = divmod(rank, instance.tp)
    by_tp, by_fsdp = cells // instance.tp, cells // instance.shards
    by_both = by_tp // instance.shards
    first = layer * by_tp + shard * by_both
    lines = range(shard * by_fsdp, (shard + 1) * by_fsdp)
    rest, beside = divmod(shard, instance.ep)
    mine = layer * by_tp + beside * (by_tp // instance.ep) + rest * by_both
    inputs = range(layer * by_tp, (layer + 1) * by_tp)
    return range(first, first + by_both), lines, inputs, range(mine, mine + by_both)
