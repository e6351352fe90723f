"""Actions that do not fit a device though all that they do not need sleeps, and who gives way.

Known as soon as all actions that compute are there, whatever their order. Pass `bind` chooses
micro-batches before that, as if nothing of others stayed on a device; where something does, it
chooses again within the `rooms_left`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlflow.errors import Finding
from rlflow.scheduler.context import Context
from rlflow.scheduler.costs.microbatches import needed
from rlflow.scheduler.devices.cluster import amount, distinct_amounts
from rlflow.scheduler.engines.engines import room_of_smaller_pool
from rlflow.scheduler.memory.on_hosts import bytes_freed
from rlflow.scheduler.memory.profile import Memories
from rlflow.scheduler.plan.plan import Action, Part, Plan
from rlflow.scheduler.plan.text import device_name


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLarge(Finding):
    """E401, and the bytes that an action lacks on the device where it lacks most."""

    lacks: int = 0


def too_large(plan: Plan, memories: Memories) -> list[TooLarge]:
    """A finding for every action that does not fit with all that it does not need asleep.

    Of the pieces of a run one for that which lacks most.
    """
    worst: dict[str, _Short] = {}
    for short in _short(plan, memories):
        action = short.action
        name = str(action.node) if action.kind == "run" else action.id
        if name not in worst or short.lacks > worst[name].lacks:
            worst[name] = short
    found = [_does_not_fit(plan, memories, each) for each in worst.values()]
    return sorted(found, key=lambda finding: -finding.lacks)


def rooms_left(plan: Plan, context: Context) -> Mapping[str, int]:
    """Bytes that nodes may need of a device, by their names, for all runs to fit; none if they do.

    A run may not fit though its instance by itself does, where something of others stays: the cache
    of a rollout in pieces, or an engine that goes on with one. Then it has to need less itself.
    Where it was told so before, and whatever is no run, those of whom something stays do.
    """
    rooms: dict[str, int] = {}
    for short in _short(plan, Memories(plan=plan)):
        own = _own_room(plan, short, context)
        if not own:
            own = _rooms_of_others(plan, short, context)
        for name, room in own.items():
            rooms[name] = min(room, rooms.get(name, room))
    return {**context.rooms, **rooms} if rooms else {}


def _own_room(plan: Plan, short: _Short, context: Context) -> dict[str, int]:
    """The room in which a run fits, where that is less than it was told before."""
    action = short.action
    if action.kind != "run" or action.node is None or action.instance is None:
        return {}
    node, instance = plan.graph.node(action.node), plan.instance(action.instance)
    room = needed(node, instance, context.costs) - short.lacks
    return {node.name: room} if room < context.rooms.get(node.name, room + 1) else {}


def _rooms_of_others(plan: Plan, short: _Short, context: Context) -> dict[str, int]:
    """The rooms of rollouts of whose keys and values less stays, by as much as an action lacks."""
    rooms: dict[str, int] = {}
    costs = context.costs
    staying = {
        part.instance
        for part in plan.parts
        if part.kind in ("cache", "pool")
        and not bytes_freed(part)
        and short.device in part.devices
        and part.name not in short.action.needs
    }
    for run in plan.actions:
        if run.kind != "run" or run.instance not in staying:
            continue
        instance, node = plan.instance(run.instance), plan.graph.node(str(run.node))
        if node.op.use != "rollout":
            continue
        own = instance.engine_plan.own_process
        room = (
            room_of_smaller_pool(instance, [node], short.lacks, costs)
            if own
            else needed(node, instance, costs) - short.lacks
        )
        rooms |= {} if room is None else {node.name: room}
    return rooms


@dataclass(frozen=True, slots=True, kw_only=True)
class _Short:
    """An action by itself with what does not sleep, and the bytes too many where they are most."""

    action: Action
    device: int
    lacks: int


def _short(plan: Plan, memories: Memories) -> Iterator[_Short]:
    freed = {part.name: bytes_freed(part) for part in plan.parts}
    groups = {name: frozenset(found) for name, found in memories.of_part.items()}
    for action in plan.actions:
        needs, used = dict.fromkeys(action.needs), action.cost.transient or 0
        lacking = {
            device: memories.all_asleep[device]
            + used
            - plan.budget(device)
            + sum(freed[name] for name in needs if device in groups[name])
            for device in memories.on[action.devices]
        }
        worst = max(lacking, key=lambda device: lacking[device], default=None)
        if worst is not None and lacking[worst] > 0:
            yield _Short(action=action, device=worst, lacks=lacking[worst])


def _kept(part: Part) -> str:
    """What a part that is not needed holds: all of it, which never sleeps, or what it leaves."""
    return f"left by {part.name} asleep" if bytes_freed(part) else f"{part.name}, which stays"


def _holders(plan: Plan, memories: Memories, short: _Short) -> list[tuple[int, str]]:
    """What is on the device while the action runs: (bytes, name)."""
    action = short.action
    here = [part for part in plan.parts if short.device in memories.of_part[part.name]]
    awake = [((part.size or 0), part.name) for part in here if part.name in action.needs]
    asleep = [part for part in here if part.name not in action.needs]
    rest = [((p.size or 0) - bytes_freed(p), _kept(p)) for p in asleep]
    used = sorted(((size, name) for name, size in action.cost.holds), reverse=True)
    other = (action.cost.transient or 0) - sum(size for size, _ in used)
    used.append((other, "otherwise" if used else "used while it runs"))
    holders = [*sorted(awake, reverse=True), *used, *sorted(rest, reverse=True)]
    return [(size, name) for size, name in holders if size]


def _does_not_fit(plan: Plan, memories: Memories, short: _Short) -> TooLarge:
    action, budget = short.action, plan.budget(short.device)
    rows = [f"{amount(size)} {name}" for size, name in _holders(plan, memories, short)]
    takes, has = distinct_amounts(budget + short.lacks, budget)
    return TooLarge(
        code="E401",
        what=f"action {action.id!r} does not fit on {device_name(plan, short.device)}",
        where=plan.graph.node(action.node).where if action.node else None,
        got=f"{takes} at once while {action.id} runs:\n" + "\n".join(rows),
        expected=f"at most {has}, the memory of the device",
        fix=f"more devices in the pool, {_less_at_once(plan, action)}",
        lacks=short.lacks,
    )


def _less_at_once(plan: Plan, action: Action) -> str:
    """What of the pipeline makes an action take less at once."""
    op = plan.graph.node(action.node).op if action.node else None
    if op is not None and op.name == "evaluate":
        return "a smaller limit= in ops.evaluate, or fewer max_new_tokens"
    if op is not None and op.use == "train":
        return "a smaller batch, or more mini_batches in the update"
    return "or a smaller batch"
