"""Plans of actions that need parts and nothing else, drawn at random, and how they play out."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import SimpleNamespace

import rlflow as rf
from rlflow.graph.graph import Graph
from rlflow.scheduler.passes.order import chain
from rlflow.scheduler.passes.residency import residency
from rlflow.scheduler.plan.plan import HOST, Action, Cost, Dep, Instance, Part, Plan, Reason

BANDWIDTH = 20.0
CONTEXT = SimpleNamespace(
    optimize=0.0,
    rough=False,
    costs=SimpleNamespace(
        copy=lambda moved, devices, kind: Cost(
            seconds=moved / len(devices) / BANDWIDTH, moved=moved
        )
    ),
)


def action(name: str, *devices: int, needs: tuple[str, ...] = (), **more: object) -> Action:
    """A run of one second."""
    fields: dict[str, object] = {"cost": Cost(seconds=1.0), **more}
    reason = Reason(rule="test", text="a test")
    return Action(
        id=name, kind="run", reason=reason, devices=devices, pool="p", needs=needs, **fields
    )


def dep(name: str, distance: int = 0) -> Dep:
    return Dep(action=name, distance=distance, kind="order")


def part(name: str, size: int | None, *devices: int, **more: object) -> Part:
    """The weights of an instance of that name."""
    fields: dict[str, object] = {"kind": "weights", **more}
    return Part(name=name, instance=name, size=size, devices=devices, **fields)


def plan_of(
    budget: int | dict[int, int],
    parts: list[Part],
    actions: list[Action],
    host: int = 10**9,
    hosts: int = 1,
) -> Plan:
    """A plan of parts that are an instance each, of a model each."""
    devices = sorted({d for held in (*parts, *actions) for d in held.devices if d != HOST})
    budgets = budget if isinstance(budget, dict) else dict.fromkeys(devices, budget)
    models = tuple(rf.Model(p.name, "nowhere") for p in parts)
    return Plan(
        graph=Graph(name="paged", nodes=(), models=models),
        placement="p",
        cluster="cpu",
        budgets={HOST: host, **budgets},
        backend="ray",
        staleness=0,
        pools={"p": tuple(devices)},
        hosts=hosts,
        instances=tuple(
            Instance(name=p.name, model=p.name, pool="p", devices=p.devices, uses=(), trained=False)
            for p in parts
        ),
        parts=tuple(parts),
        actions=tuple(actions),
    )


def planned(plan: Plan) -> Plan:
    """After `residency` and `chain`."""
    return chain(residency(plan, CONTEXT), CONTEXT)


def line(budget: int, *, host: int = 10**9) -> Plan:
    """Four actions in a row on one device, of which one needs `a` and one `b`.

    one (a) -> two -> three (b, 10 bytes of its own) -> four
    """
    actions = [
        action("one", 0, needs=("a",)),
        action("two", 0, after=(dep("one"),)),
        action("three", 0, needs=("b",), after=(dep("two"),), cost=Cost(seconds=2.0, transient=10)),
        action("four", 0, after=(dep("three"),)),
    ]
    return plan_of(budget, [part("a", 20, 0), part("b", 20, 0)], actions, host=host)


def random_plan(seed: int, *, parts: int = 5, length: int = 9, devices: int = 3) -> Plan:
    """Parts on overlapping sets of devices, actions that need some, memory for most of it."""
    random = Random(seed)
    count = random.randint(1, devices)
    pools = [tuple(range(count)), (0,), (count - 1,), tuple(range(min(2, count)))]
    held = [
        part(
            f"m{n}",
            random.choice((4, 6, 6, 10, 15)),
            *random.choice(pools),
            kind=random.choice(("weights", "weights", "optimizer", "gradients")),
            residual=random.choice((0, 0, 1)),
        )
        for n in range(random.randint(1, parts))
    ]
    actions: list[Action] = []
    for n in range(random.randint(1, length)):
        chosen = random.sample(held, random.randint(0, min(2, len(held))))
        where = {d for p in chosen for d in p.devices} | set(random.choice(pools) if n else ())
        where = where or {0}
        earlier = random.sample(actions, min(len(actions), random.randint(0, 2)))
        after = [dep(a.id, random.choice((0, 0, 1))) for a in earlier]
        actions.append(
            action(
                f"a{n}",
                *sorted(where),
                needs=tuple(p.name for p in chosen),
                after=tuple(after),
                cost=Cost(
                    seconds=random.choice((0.1, 1.0, 3.0)), transient=random.choice((0, 0, 5, 9))
                ),
            )
        )
    budgets = {d: _budget(random, d, held, actions) for d in range(count)}
    return plan_of(budgets, held, actions, hosts=random.randint(1, 2))


def _budget(random: Random, device: int, parts: list[Part], actions: list[Action]) -> int:
    """Enough for every action alone on a device, and a share of what all needs together."""
    here = [p for p in parts if device in p.devices]
    alone = max(
        sum(p.size if p.name in a.needs else p.residual for p in here) + a.cost.transient
        for a in actions
    )
    return alone + round(random.choice((0, 0, 0.2, 0.5, 1)) * sum(p.size for p in here))


def most_held(plan: Plan, seed: int, turns: int = 5) -> tuple[dict[int, int], list[str]]:
    """The most bytes each device holds in one random interleaving, and what goes wrong.

    It starts whatever `after` allows in a random order, and knows no list.
    """
    random = Random(seed)
    sizes = {p.name: p for p in plan.parts}
    awake, resident = set(plan.awake_at_start), set(plan.awake_at_start)
    over: dict[str, int] = dict.fromkeys((a.id for a in plan.actions), 0)
    running: list[Action] = []
    most: dict[int, int] = {}
    broken: list[str] = []
    while min(over.values()) < turns and not broken:
        ready = [
            a
            for a in plan.actions
            if a not in running
            and over[a.id] < turns
            and all(over[d.action] > over[a.id] - d.distance for d in a.after)
        ]
        if ready and (not running or random.random() < 0.6):
            a = random.choice(ready)
            running.append(a)
            if a.kind == "wake":
                broken += [f"{a.id} wakes what is awake"] if a.part in awake else []
                resident.add(a.part)
            if a.kind == "sleep":
                broken += [] if a.part in awake else [f"{a.id} puts to sleep what sleeps"]
                awake.discard(a.part)
            for device in plan.pools["p"]:
                size = sum(
                    p.size if p.name in resident else p.residual
                    for p in sizes.values()
                    if device in p.devices
                )
                size += sum(r.cost.transient or 0 for r in running if device in r.devices)
                most[device] = max(most.get(device, 0), size)
        elif running:
            a = running.pop(random.randrange(len(running)))
            over[a.id] += 1
            awake |= {a.part} if a.kind == "wake" else set()
            resident -= {a.part} if a.kind == "sleep" else set()
        else:
            broken.append("stuck")
        for a in running:
            broken += [f"{a.id} needs {n}" for n in a.needs if n not in awake]
            broken += [
                f"{a.id} beside {b.id}"
                for b in running
                if b is not a and b.lane == a.lane and set(a.devices) & set(b.devices)
            ]
    return most, broken


def without(plan: Plan, name: str) -> Plan:
    """The plan without an action; who waited for it waits for what it waited for."""
    gone = plan.action(name)
    kept = []
    for a in plan.actions:
        if a.id != name:
            after: dict[tuple[str, int], Dep] = {}
            for d in a.after:
                over = [replace(e, distance=e.distance + d.distance) for e in gone.after]
                for e in over if d.action == name else [d]:
                    if e.action != name:
                        after.setdefault((e.action, e.distance), e)
            kept.append(replace(a, after=tuple(after.values())))
    return replace(plan, actions=tuple(kept))
