"""Rules of the verifier: nothing is used asleep, and memory holds, on devices and on hosts.

What lies on a device while an action runs is the sweep of `lanes`. Knows the plan; shares no code
with the passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from rlflow.scheduler.plan.plan import HOST, Action, Part
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.lanes import Line, given_back

# A part that sleeps, the devices that it leaves, and its bytes on each.
Copied = tuple[str, tuple[int, ...], int]
PAGE = 4096


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The lines of all devices, those alike as one, and what hosts hold."""

    facts: Facts

    @cached_property
    def moves(self) -> dict[str, list[Action]]:
        """The sleeps and wakes of each part that has any, in the order of the list."""
        found: dict[str, list[Action]] = {}
        for action in self.facts.plan.actions:
            if action.part is not None:
                found.setdefault(action.part, []).append(action)
        return found

    @cached_property
    def never_awake(self) -> frozenset[str]:
        """The parts without moves that are asleep when a turn begins, and so ever."""
        still = {part.name for part in self.facts.plan.parts}.difference(self.moves)
        return frozenset(still.difference(self.facts.plan.awake_at_start))

    @cached_property
    def kind(self) -> dict[int, int]:
        """For every device the first one that has the same budget, parts and actions."""
        plan, queues = self.facts.plan, self.facts.queues
        parts: dict[int, list[int]] = {d: [] for pool in plan.pools.values() for d in pool}
        for number, (devices, stays) in enumerate({(p.devices, p.stays) for p in plan.parts}):
            for device in devices:
                parts[device].append(-number - 1 if device in stays else number)
        first: dict[tuple[object, ...], int] = {}
        found = {}
        for device in sorted(parts):
            own = [id(queues.get((device, lane))) for lane in ("compute", "copy")]
            key = (plan.budget(device), *own, *parts[device])
            found[device] = first.setdefault(key, device)
        return found

    @cached_property
    def lines(self) -> dict[int, Line]:
        """The line of one device of each kind."""
        return {device: self._line(device) for device in dict.fromkeys(self.kind.values())}

    def _line(self, device: int) -> Line:
        facts = self.facts
        lanes = [
            tuple(facts.actions[name] for name in facts.queues.get((device, lane), ()))
            for lane in ("copy", "compute")
        ]
        moving, still = {move.part for move in lanes[0]}, 0
        for part in facts.plan.parts:
            if device in part.devices:
                leaves = part.name in moving and device not in part.stays
                away = leaves or part.name in self.never_awake
                still += (part.size or 0) - (given_back(part) if away else 0)
        return Line(facts=facts, device=device, moves=lanes[0], runs=lanes[1], still=still)

    @cached_property
    def _of_devices(self) -> dict[tuple[int, ...], tuple[Line, ...]]:
        return {}

    def on(self, devices: tuple[int, ...]) -> tuple[Line, ...]:
        """The lines of some devices, each kind once."""
        found = self._of_devices.get(devices)
        if found is None:
            kinds = dict.fromkeys(self.kind[d] for d in devices if d != HOST)
            found = self._of_devices[devices] = tuple(self.lines[d] for d in sorted(kinds))
        return found

    def peak(self, action: Action) -> int | None:
        """The most bytes on a device of an action: of a move, also of what runs beside it."""
        sizes = [line.loads[action.id] for line in self.on(action.devices)]
        if action.part is not None:
            sizes += [line.beside.get(action.id, 0) for line in self.on(action.devices)]
        return max(sizes, default=None)

    @cached_property
    def most(self) -> dict[int, int]:
        """The most bytes on each kind of device; where nothing runs, with everything awake."""
        return {
            device: max([*line.loads.values(), *line.beside.values()], default=line.still)
            for device, line in self.lines.items()
        }

    @cached_property
    def stated(self) -> dict[int, int]:
        """The peaks that the plan is to state: of every device, and of the host."""
        peaks = dict.fromkeys(self.facts.plan.budgets, 0)
        peaks |= {device: self.most[kind] for device, kind in self.kind.items()}
        return peaks | ({HOST: self.on_host} if HOST in peaks else {})

    @cached_property
    def on_host(self) -> int:
        """The most bytes that one host may hold of parts that sleep and are not discarded.

        More comes there only when a sleep starts, so a look at every sleep is enough. Always there
        is what parts keep on the host, what is never awake, the rows that nodes keep and the copies
        of saves. What is pinned never leaves a device's process: its most counts at all times.
        """
        plan = self.facts.plan
        always = self._parts_on_hosts() + self._beside_parts()
        copied = [part for part in plan.parts if not part.on_host and part.name in self.moves]
        offloads = [a for part in copied for a in self.moves[part.name] if _offloads(a)]
        sizes = [(part.name, leaving(part), given_back(part)) for part in copied]
        most = max(always.values(), default=0)
        if plan.pinned:
            return max(most, self._pinned(always, offloads, sizes), self._at_start(copied))
        for sleep in offloads:
            on_each = Counter[tuple[int, ...]]()
            for name, devices, size in sizes:
                if self._may_be_copied(name, sleep):
                    on_each[devices] += size
            there = always.copy()
            for devices, size in on_each.items():
                self._add(there, devices, size)
            most = max([most, *there.values()])
        return most

    def _pinned(self, always: Counter[int], offloads: list[Action], sizes: list[Copied]) -> int:
        """The most of a host beside which each device keeps the most that it has had there."""
        plan, most = self.facts.plan, Counter[int]()
        for sleep in offloads:
            there = Counter[int]()
            for name, devices, size in sizes:
                if self._may_be_copied(name, sleep):
                    there.update(dict.fromkeys(devices, whole_pages(size)))
            most |= there
        total = always.copy()
        for device, size in most.items():
            total[plan.host_of(device)] += size
        return max(total.values(), default=0)

    def _at_start(self, copied: list[Part]) -> int:
        """The most of a host while instances are loaded, and what begins asleep is there."""
        plan, there = self.facts.plan, self._parts_on_hosts()
        begins = set(plan.awake_at_start)
        for part in copied:
            if part.name not in begins and any(map(_offloads, self.moves[part.name])):
                self._add(there, leaving(part), whole_pages(given_back(part)))
        largest = Counter[int]()
        for load in plan.loads:
            largest |= Counter(
                dict.fromkeys(self.facts.instances[load.instance].devices, load.size)
            )
        for device, size in largest.items():
            there[plan.host_of(device)] += size
        return max(there.values(), default=0)

    def _parts_on_hosts(self) -> Counter[int]:
        """Bytes of parts that each host holds all the time."""
        plan, found = self.facts.plan, Counter[int]()
        for part in plan.parts:
            self._add(found, part.devices, part.on_host)
            for device, size in part.more_on_host:
                self._add(found, (device,), size)
            kept = part.name in self.never_awake and part.kind not in ("gradients", "pool")
            if kept and not part.on_host:
                size = given_back(part)
                self._add(found, leaving(part), whole_pages(size) if plan.pinned else size)
        return found

    def _beside_parts(self) -> Counter[int]:
        """Bytes of rows and saves that each host holds; the controller may be on each of them."""
        plan, found = self.facts.plan, Counter[int]()
        for each in plan.saved:
            self._add(found, self.facts.instances[each.instance].devices, each.size)
        for rows in plan.kept:
            for run in self.facts.runs.get(rows.node, ()):
                places = (HOST,) if run.takes is None else run.takes.devices
                everywhere = range(plan.hosts) if HOST in places else ()
                for host in (*everywhere, *(plan.host_of(d) for d in places if d != HOST)):
                    found[host] += rows.size
        return found

    def _add(self, found: Counter[int], devices: tuple[int, ...], size: int) -> None:
        """Add so many bytes to the host of each device."""
        hosts = self._hosts.get(devices) if size else Counter[int]()
        if hosts is None:
            hosts = self._hosts[devices] = Counter(map(self.facts.plan.host_of, devices))
        for host, count in hosts.items():
            found[host] += size * count

    @cached_property
    def _hosts(self) -> dict[tuple[int, ...], Counter[int]]:
        """How many of some devices each host has."""
        return {}

    def _may_be_copied(self, part: str, action: Action) -> bool:
        """Whether a part may have a copy on the host at some time while an action runs.

        It has from when an offload starts until its wake is over: where an offload may be under
        way, or the next move after all that are over is a wake that copies it back.
        """
        unrolled, number = self.facts.unrolled, self.facts.number
        own, place = self.moves[part], number[action.id]
        instances, count = self._instances[part], len(own)
        first = unrolled.over(place, instances)
        last = count * (2 * unrolled.turns - 1) - unrolled.begins_later(place, instances)
        back = own[first % count]
        if (back.kind, back.mode) == ("wake", "offload"):
            return True
        span = range(first, min(last, first + count))
        return any(_offloads(own[position % count]) for position in span)

    @cached_property
    def _instances(self) -> dict[str, int]:
        """The instances of each part's moves."""
        unrolled, number = self.facts.unrolled, self.facts.number
        return {
            part: unrolled.every_turn(number[move.id] for move in own)
            for part, own in self.moves.items()
        }


def whole_pages(size: int) -> int:
    """Bytes of the pages in which so many bytes lie."""
    return (size + PAGE - 1) // PAGE * PAGE


def memory_of(facts: Facts) -> Memory:
    """The memory of a plan, swept once for all rules."""
    found: Memory = facts.derived.setdefault("memory", Memory(facts=facts))
    return found


def _offloads(move: Action) -> bool:
    return (move.kind, move.mode) == ("sleep", "offload")


def leaving(part: Part) -> tuple[int, ...]:
    """The devices that a part's sleep is of: without those on which it stays."""
    return tuple(device for device in part.devices if device not in part.stays)


def memory_fits(facts: Facts) -> Iterator[str]:
    """Nothing is used asleep, no device or host is ever over budget, and peaks are as stated."""
    plan, memory = facts.plan, memory_of(facts)
    yield from _moves_alternate(memory)
    for a in plan.actions:
        away = {d for need in a.needs for d in facts.parts[need].devices}.difference(a.devices)
        if away:
            yield f"{a.id} needs parts on devices {sorted(away)}, which it does not take"
        for need in a.needs:
            if not _is_awake(memory, need, a):
                yield f"{a.id} needs {need}, which is asleep or may be"
        for line in memory.on(a.devices):
            size, budget = line.loads[a.id], plan.budget(line.device)
            if size > budget:
                yield f"{a.id} holds {size} bytes on device {line.device}, the budget is {budget}"
        if a.peak != memory.peak(a):
            yield f"{a.id} states a peak of {a.peak} bytes, it is {memory.peak(a)}"
    yield from _peaks_are_right(memory)


def _is_awake(memory: Memory, need: str, a: Action) -> bool:
    """Whether a part is awake from when an action starts until it is over, always."""
    if need not in memory.moves:
        return need not in memory.never_awake
    lines = memory.on(leaving(memory.facts.parts[need]))
    return all(line.sleeps_from(need, a.id) is not None for line in lines)


def _peaks_are_right(memory: Memory) -> Iterator[str]:
    """What devices and hosts hold at the most is as stated, also where nothing runs."""
    plan, most = memory.facts.plan, memory.most
    for device, line in sorted(memory.lines.items()):
        if most[device] > plan.budget(device) and not line.loads:
            held_there = f"{most[device]} bytes, the budget is {plan.budget(device)}"
            yield f"device {device}, on which nothing runs, holds {held_there}"
    if HOST in plan.budgets and memory.on_host > plan.budget(HOST):
        yield f"a host holds {memory.on_host} bytes, the budget is {plan.budget(HOST)}"
    if dict(plan.peaks) != memory.stated:
        yield f"the plan states peaks of {dict(plan.peaks)}, they are {memory.stated}"


def _moves_alternate(memory: Memory) -> Iterator[str]:
    """A part sleeps when it is awake and wakes when it sleeps, one after the other, always."""
    facts = memory.facts
    for name, own in memory.moves.items():
        began = name in facts.plan.awake_at_start
        if began is not (own[0].kind == "sleep"):
            state = "awake" if began else "asleep"
            yield f"{own[0].id}: {name} is {state} already"
        for number, move in enumerate(own):
            other = own[(number + 1) % len(own)]
            if move.kind == other.kind:
                state = "awake" if move.kind == "wake" else "asleep"
                yield f"{other.id}: {name} is {state} already"
            elif not facts.precedes(move.id, other.id, int(number + 1 == len(own))):
                yield f"{other.id} may start before {move.id} is over"
