"""What a plan's actions ask of memory, whatever their order; and the trace of one order.

Rooms of actions, sizes of parts and who needs them do not depend on the order. Gaps between uses
do, and so does what has to leave: `traced` makes a cyclic trace of an order. This file decides
nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rlflow.scheduler.memory.intervals import Gap, Ring, Trace
from rlflow.scheduler.memory.on_hosts import bytes_freed
from rlflow.scheduler.memory.profile import Memories
from rlflow.scheduler.plan.plan import Action, Mode, Part, Plan

SUMS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A plan's cyclic trace, and the part and mode of each of its gaps."""

    trace: Trace
    parts: tuple[Part, ...]
    modes: tuple[Mode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A memory: the bytes that each action which uses it leaves to what it does not need."""

    spare: int
    rooms: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evictable:
    """A part that may have to leave: on which memories, who needs it, and who makes it anew.

    `moved` are the bytes that an offload moves out and back.
    """

    part: Part
    size: int
    moved: int
    rings: tuple[int, ...]
    users: tuple[int, ...]
    makers: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The memories of a plan and the parts that compete for them; actions by their numbers."""

    count: int
    rooms: tuple[Room, ...]
    held: tuple[_Evictable, ...]

    def trace(self, order: Sequence[int]) -> tuple[Trace, list[int], list[Mode]]:
        """The trace of an order; the part of each of its gaps by its number, and its mode."""
        place = [0] * self.count
        for position, action in enumerate(order):
            place[action] = position
        rings = []
        for room in self.rooms:
            line = sorted((place[action], size) for action, size in room.rooms.items())
            places, rooms = [at for at, _ in line], [size for _, size in line]
            rings.append(Ring(rooms=tuple(rooms), places=tuple(places), spare=room.spare))
        gaps: list[Gap] = []
        owners: list[int] = []
        modes: list[Mode] = []
        for number, held in enumerate(self.held):
            places = sorted(place[user] for user in held.users)
            for since, until in zip(places, [*places[1:], places[0]], strict=True):
                anew = order[until] in held.makers
                rows = [(r, i) for r in held.rings for i in _between(rings[r].places, since, until)]
                gaps.append(
                    Gap(
                        size=held.size,
                        cost=0 if anew else held.moved,
                        since=since,
                        until=until,
                        rings=held.rings,
                        rows=tuple(rows),
                    )
                )
                owners.append(number)
                modes.append("discard" if anew else "offload")
        trace = Trace(length=self.count, rings=tuple(rings), gaps=tuple(gaps))
        return trace, owners, modes

    def fewest(self) -> int:
        """Bytes that move in a turn at the least, in any order: of the one action that asks most.

        What somebody makes anew might leave for nothing.
        """
        asked: dict[tuple[int, tuple[tuple[int, int], ...]], None] = {}
        for number, room in enumerate(self.rooms):
            held = [h for h in self.held if h.moved and not h.makers and number in h.rings]
            held.sort(key=lambda h: (h.size, h.moved))
            users = [frozenset(h.users) for h in held]
            for action, size in room.rooms.items():
                others = [h for h, by in zip(held, users, strict=True) if action not in by]
                need = sum(h.size for h in others) - size
                if need > 0:
                    asked[need, tuple((h.size, h.moved) for h in others)] = None
        dear = sorted(((_enough(need, parts), need, parts) for need, parts in asked), reverse=True)
        most = 0
        for enough, need, parts in dear:
            if enough <= most:
                break
            most = max(most, _cheapest(need, parts))
        return most

    def traced(self) -> Traced:
        """The trace of the order of the list."""
        trace, owners, modes = self.trace(range(self.count))
        parts = tuple(self.held[owner].part for owner in owners)
        return Traced(trace=trace, parts=parts, modes=tuple(modes))


def _enough(need: int, parts: Sequence[tuple[int, int]]) -> int:
    """Bytes moved by the cheapest parts, a byte that leaves, of which so many bytes leave."""
    cost = 0
    for size, moved in sorted(parts, key=lambda part: (part[1] / part[0], part)):
        if need <= 0:
            break
        need, cost = need - size, cost + moved
    return cost


def _cheapest(need: int, parts: Sequence[tuple[int, int]]) -> int:
    """The fewest bytes moved by parts, each (size, moved), of which so many bytes leave.

    A bound below it where too many sums differ: they are told apart less.
    """
    least = {0: 0}
    for size, moved in parts:
        for freed, cost in list(least.items()):
            more = min(freed + size, need)
            least[more] = min(cost + moved, least.get(more, cost + moved))
        least = _thinned(least) if len(least) > SUMS else least
    return least[need]


def _thinned(least: dict[int, int]) -> dict[int, int]:
    """The sums that others do not free as many bytes as for less; at most about `SUMS` of them.

    Of two neighbours one is left, which frees what the larger does for what the smaller moves.
    """
    found: list[tuple[int, int]] = []
    for freed, cost in sorted(least.items(), reverse=True):
        if not found or cost < found[-1][1]:
            found.append((freed, cost))
    while len(found) > SUMS:
        inner = found[1:-1]
        both = [(more, cost) for (more, _), (_, cost) in zip(inner[::2], inner[1::2], strict=False)]
        found = [found[0], *both, *inner[len(both) * 2 :], found[-1]]
    return dict(found)


def _between(places: Sequence[int], since: int, until: int) -> list[int]:
    """The indices of the places after `since` and before `until`, around the cycle."""
    first, last = bisect_right(places, since), bisect_left(places, until)
    if since < until:
        return list(range(first, last))
    return [*range(first, len(places)), *range(last)]


def demand_of(plan: Plan, memories: Memories) -> Demand:
    """What a plan without moves asks of memory; parts that fit everywhere are left out."""
    groups = tuple(sorted(set(memories.group.values())))
    number = {group: index for index, group in enumerate(groups)}
    rooms = tuple(_room(plan, memories, group) for group in groups)
    short = {
        group
        for group, room in zip(groups, rooms, strict=True)
        if room.spare < max((plan.actions[a].cost.transient or 0 for a in room.rooms), default=0)
    }
    users: dict[str, list[int]] = {}
    for place, action in enumerate(plan.actions):
        for name in action.needs:
            users.setdefault(name, []).append(place)
    held = []
    for part in plan.parts:
        size, places = bytes_freed(part), users.get(part.name, [])
        if not (size and places) or short.isdisjoint(memories.of_part[part.name]):
            continue
        found = _staying(plan, part, memories, short)
        own = tuple(number[g] for g in dict.fromkeys(memories.group[d] for d in found.leaves))
        makers = (p for p in places if _mode(plan, part, plan.actions[p]) == "discard")
        held.append(
            _Evictable(
                part=found,
                size=size,
                moved=2 * size * len(found.leaves),
                rings=own,
                users=tuple(places),
                makers=frozenset(makers),
            )
        )
    return Demand(count=len(plan.actions), rooms=rooms, held=tuple(held))


def _staying(plan: Plan, part: Part, memories: Memories, short: Collection[int]) -> Part:
    """The part that sleeps where memory is short alone; of an engine, whole replicas."""
    stays: list[int] = []
    for devices in plan.instance(part.instance).processes:
        fits = not any(memories.group[d] in short for d in devices)
        stays += devices if fits or set(devices) <= set(part.stays) else []
    return replace(part, stays=tuple(stays))


def _room(plan: Plan, memories: Memories, group: int) -> Room:
    """The memory of a group of devices: what each action leaves to what it does not need."""
    parts = {part.name: part for part in plan.parts if group in memories.of_part[part.name]}
    parts = {name: part for name, part in parts.items() if group not in part.stays}
    resident = sum(bytes_freed(part) for name, part in parts.items() if name in memories.used)
    spare = plan.budget(group) - memories.all_awake[group]
    rooms = {}
    for place, action in enumerate(plan.actions):
        if group in memories.on[action.devices] and action.part is None:
            needed = sum(bytes_freed(parts[name]) for name in action.needs if name in parts)
            rooms[place] = spare + resident - needed - (action.cost.transient or 0)
    return Room(spare=spare, rooms=rooms)


def _mode(plan: Plan, part: Part, user: Action) -> Mode:
    """Discard what is made anew before anyone reads it; offload the rest.

    A reshard makes all weights of an instance anew where it is due in every iteration, but of a
    model that is trained in part only that; a process of an engine takes frozen parts with it.
    """
    instance = plan.instance(part.instance)
    model = plan.graph.model(instance.model)
    beside = model.lora is not None or (bool(model.freeze) and not instance.engine_plan.own_process)
    filled = part.instance in user.targets and user.always and not beside
    return "discard" if part.kind in ("gradients", "pool") or filled else "offload"
