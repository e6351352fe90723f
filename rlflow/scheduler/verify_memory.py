"""Rules of the verifier: memory in every interleaving, sleeps and wakes, turns on devices, time.

A part counts as held while an action runs unless it is proven asleep: its sleep is over
before the action starts, and its next wake starts after the action has ended. Knows the plan;
shares no code with the passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise

from rlflow.scheduler.facts import Facts
from rlflow.scheduler.plan import HOST, Action, Part

TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell:
    """What lies between two moves of a part that follow each other, `turns` apart.

    `inside` are the actions that run between the two in every interleaving, as bits.
    """

    opens: Action
    closes: Action
    inside: int


@dataclass(frozen=True, kw_only=True)
class Held:
    """What each part does over a turn, and the bytes that may be held while each action runs."""

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
    def followers(self) -> list[dict[str, int]]:
        """For k = 0, 1: the actions of turn t + k that start when each one of turn t is over."""
        facts = self.facts
        waiting: dict[str, list[tuple[str, int]]] = {name: [] for name in facts.actions}
        for action in facts.plan.actions:
            for dep in action.after:
                waiting[dep.action].append((action.id, facts.turns(action, dep)))
        found: list[dict[str, int]] = []
        for k in (0, 1):
            here: dict[str, int] = {}
            found.append(here)
            for name in reversed(facts.sorted_ids):
                mask = 0
                for other, turns in waiting[name]:
                    mask |= found[k - turns][other] if turns <= k else 0
                    mask |= facts.bit[other] if turns == k else 0
                here[name] = mask
        return found

    @cached_property
    def spells(self) -> dict[str, list[Spell]]:
        """From each move of a part to the next one around the cycle."""
        before = self.facts.before
        found: dict[str, list[Spell]] = {}
        for part, own in self.moves.items():
            for number, opens in enumerate(own):
                closes = own[(number + 1) % len(own)]
                turns, inside = int(number + 1 == len(own)), 0
                for gap in range(turns + 1):
                    inside |= self.followers[gap][opens.id] & before[turns - gap][closes.id]
                found.setdefault(part, []).append(Spell(opens=opens, closes=closes, inside=inside))
        return found

    def asleep(self, part: str) -> int:
        """The actions during which a part is asleep, always; as bits."""
        return self._inside(part, "sleep")

    def awake(self, part: str) -> int:
        """The actions during which a part is awake, always; as bits."""
        return self._inside(part, "wake")

    def _inside(self, part: str, kind: str) -> int:
        mask = 0
        for spell in self.spells.get(part, ()):
            mask |= spell.inside if spell.opens.kind == kind else 0
        return mask

    def beside(self, move: Action) -> list[Action]:
        """The actions of the devices' other lane that may run at the same time as a move."""
        earlier = [sets[move.id] for sets in self.facts.before[:2]]
        later = [sets[move.id] for sets in self.followers]
        ordered = (earlier[0] & later[1]) | (earlier[1] & later[0])
        names = {
            name: None
            for device in self.kinds[move.devices]
            for name in self.facts.queues.get((device, "compute"), ())
            if not ordered & self.facts.bit[name]
        }
        return [self.facts.actions[name] for name in names]

    @cached_property
    def alike(self) -> dict[int, int]:
        """For every device the first one that has the same parts, actions and budget."""
        plan = self.facts.plan
        marks: dict[int, list[int]] = {d: [] for pool in plan.pools.values() for d in pool}
        for number, devices in enumerate(self._sets):
            for device in devices:
                if device != HOST:
                    marks[device].append(number)
        first: dict[tuple[int, ...], int] = {}
        return {d: first.setdefault((plan.budget(d), *own), d) for d, own in sorted(marks.items())}

    @cached_property
    def kinds(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """For each set of devices that actions and parts have, one device of every kind."""
        return {
            devices: tuple(sorted({self.alike[d] for d in devices if d != HOST}))
            for devices in self._sets
        }

    @cached_property
    def _sets(self) -> list[tuple[int, ...]]:
        """The sets of devices that actions and parts have."""
        plan = self.facts.plan
        sets = [a.devices for a in plan.actions]
        sets += [devices for p in plan.parts for devices in (p.devices, sleeping_on(p))]
        return list(dict.fromkeys(sets))

    @cached_property
    def never_awake(self) -> frozenset[str]:
        """The parts without moves that are asleep when a turn begins, and so ever."""
        still = {part.name for part in self.facts.plan.parts}.difference(self.moves)
        return frozenset(still.difference(self.facts.plan.awake_at_start))

    @cached_property
    def all_awake(self) -> dict[int, int]:
        """Bytes on each kind of device with everything awake that ever is."""
        found: dict[int, int] = dict.fromkeys(self.alike.values(), 0)
        for part in self.facts.plan.parts:
            for device in self.kinds[part.devices]:
                asleep = given_back(part) if part.name in self.never_awake else 0
                found[device] += (part.size or 0) - asleep
        return found

    @cached_property
    def loads(self) -> dict[str, dict[int, int]]:
        """Bytes that may be held on each kind of device of an action while it runs."""
        facts, kinds = self.facts, self.kinds
        found = {
            a.id: {d: self.all_awake[d] + (a.cost.transient or 0) for d in kinds[a.devices]}
            for a in facts.plan.actions
        }
        for name in self.moves:
            part, asleep = facts.parts[name], self.asleep(name)
            near, freed = frozenset(kinds[sleeping_on(part)]), given_back(part)
            for load, bit in zip(found.values(), facts.bit.values(), strict=True):
                for device in near.intersection(load) if asleep & bit else ():
                    load[device] -= freed
        return found

    @cached_property
    def peaks(self) -> dict[str, int | None]:
        """The most bytes on a device of each action: of a move, also while others run beside."""
        found = {name: max(load.values(), default=None) for name, load in self.loads.items()}
        for move in (move for own in self.moves.values() for move in own):
            here = self.loads[move.id]
            for action in self.beside(move):
                for device, size in self.loads[action.id].items():
                    if device in here:
                        found[move.id] = max(found[move.id] or 0, size)
        return found

    @cached_property
    def most(self) -> dict[int, int]:
        """The most bytes on each kind of device; where nothing runs, with everything awake."""
        found: dict[int, int] = {}
        for load in self.loads.values():
            for device, size in load.items():
                found[device] = max(found.get(device, 0), size)
        return {**self.all_awake, **found}

    @cached_property
    def stated(self) -> dict[int, int]:
        """The peaks that the plan is to state: of every device, and of the host."""
        peaks = dict.fromkeys(self.facts.plan.budgets, 0)
        peaks |= {device: self.most[kind] for device, kind in self.alike.items()}
        return peaks | ({HOST: self.on_host} if HOST in peaks else {})

    @cached_property
    def on_host(self) -> int:
        """The most bytes that one host may hold of parts that sleep and are not discarded.

        Held from when a sleep may start until its wake is over; and of parts never awake. A part
        that has something there all the time is not copied once more.
        """
        plan, bit = self.facts.plan, self.facts.bit
        hosts = {d: plan.host_of(d) for d in {d for own in self._sets for d in own if d != HOST}}
        near = {own: Counter(hosts[d] for d in own if d != HOST) for own in self._sets}
        sleeps = [s.opens.id for own in self.spells.values() for s in own if _offloads(s.opens)]
        copied = [p for p in plan.parts if not p.on_host]
        kept = [(sleeping_on(p), given_back(p), self._always_back(p)) for p in copied]
        base: Counter[tuple[int, ...]] = Counter()
        for p in plan.parts:
            base[p.devices] += p.on_host
            for device, size in p.more_on_host:
                base[device,] += size
                near[device,] = Counter([hosts[device]])
        most = 0
        for instant in sleeps or [""]:
            there = base.copy()
            during = bit[instant] if instant else -1
            for devices, size, back in kept:
                if during & ~back:
                    there[devices] += size
            for host in set(hosts.values()):
                most = max(most, sum(near[own][host] * size for own, size in there.items()))
        return most

    def _always_back(self, part: Part) -> int:
        """The actions during which a part never has a copy in host memory, as bits."""
        back = -1
        if part.name in self.never_awake and part.kind not in ("gradients", "pool"):
            back = 0
        own = self.spells.get(part.name, [])
        for number, spell in enumerate(own):
            if _offloads(spell.opens):
                turns, here = int(number + 1 != len(own)), 0
                for gap in range(turns + 1):
                    ends = self.facts.before[turns - gap][spell.opens.id]
                    here |= self.followers[gap][spell.closes.id] & ends
                back &= here
        return back


def held_of(facts: Facts) -> Held:
    """What parts do over a turn of a plan, worked out once for all rules."""
    found: Held = facts.derived.setdefault("held", Held(facts=facts))
    return found


def _offloads(move: Action) -> bool:
    return (move.kind, move.mode) == ("sleep", "offload")


def given_back(part: Part) -> int:
    """Bytes of a device that a part's sleep frees."""
    return max((part.size or 0) - part.residual, 0)


def sleeping_on(part: Part) -> tuple[int, ...]:
    """The devices that a part's sleep is of: without those on which it stays."""
    return tuple(device for device in part.devices if device not in part.stays)


def list_is_an_order(facts: Facts) -> Iterator[str]:
    """Each action is listed after those of its turn that it waits for."""
    seen: set[str] = set()
    for a in facts.plan.actions:
        for dep in a.after:
            if dep.distance == 0 and dep.action not in seen:
                yield f"{a.id} is listed before {dep.action}, which it waits for"
        seen.add(a.id)


def memory_fits(facts: Facts) -> Iterator[str]:
    """Nothing is used asleep, no device or host is ever over budget, and peaks are as stated."""
    plan, held = facts.plan, held_of(facts)
    yield from _moves_alternate(held)
    for a in plan.actions:
        away = {d for need in a.needs for d in facts.parts[need].devices}.difference(a.devices)
        if away:
            yield f"{a.id} needs parts on devices {sorted(away)}, which it does not take"
        for need in a.needs:
            if need in held.never_awake or (
                need in held.moves and not held.awake(need) & facts.bit[a.id]
            ):
                yield f"{a.id} needs {need}, which is asleep or may be"
        for device, size in held.loads[a.id].items():
            if size > plan.budget(device):
                budget = plan.budget(device)
                yield f"{a.id} holds {size} bytes on device {device}, the budget is {budget}"
        if a.peak != held.peaks[a.id]:
            yield f"{a.id} states a peak of {a.peak} bytes, it is {held.peaks[a.id]}"
    yield from _peaks_are_right(held)


def _peaks_are_right(held: Held) -> Iterator[str]:
    """What devices and hosts hold at the most is as stated, also where nothing runs."""
    plan, most = held.facts.plan, held.most
    running = {device for load in held.loads.values() for device in load}
    for device in sorted(most.keys() - running):
        if most[device] > plan.budget(device):
            held_there = f"{most[device]} bytes, the budget is {plan.budget(device)}"
            yield f"device {device}, on which nothing runs, holds {held_there}"
    if HOST in plan.budgets and held.on_host > plan.budget(HOST):
        yield f"a host holds {held.on_host} bytes, the budget is {plan.budget(HOST)}"
    if dict(plan.peaks) != held.stated:
        yield f"the plan states peaks of {dict(plan.peaks)}, they are {held.stated}"


def _moves_alternate(held: Held) -> Iterator[str]:
    """A part sleeps when it is awake and wakes when it sleeps, one after the other, always."""
    facts = held.facts
    for name, own in held.moves.items():
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


def devices_take_turns(facts: Facts) -> Iterator[str]:
    """On each lane of a device an action is over before the next starts, around the turn too."""
    alike: dict[int, None] = {}
    for (device, lane), queue in sorted(facts.queues.items()):
        if id(queue) in alike:
            continue
        alike[id(queue)] = None
        turns = [*pairwise(queue), (queue[-1], queue[0])]
        for number, (before, after) in enumerate(turns, 1):
            if not facts.precedes(before, after, 1 if number == len(turns) else 0):
                place = "the host" if device == HOST else f"device {device}"
                place += "'s copies" if lane == "copy" else ""
                yield f"{before} and {after} may run on {place} at the same time"


def communicators_are_alone(facts: Facts) -> Iterator[str]:
    """Of two actions whose ranks meet in collectives on one device, one is over first, always.

    Ranks that enter two collectives in different orders wait for each other for ever.
    """
    meeting = [a for a in facts.plan.actions if facts.meets(a)]
    places = {a.devices: frozenset(a.devices) for a in meeting}
    for one, other in combinations(meeting, 2):
        if facts.precedes(one.id, other.id, 0) and facts.precedes(other.id, one.id, 1):
            continue
        shared = sorted(places[one.devices] & places[other.devices])
        if shared:
            yield f"{one.id} and {other.id} may be in flight together on devices {shared}"
    for a in meeting:
        if not facts.precedes(a.id, a.id, 1):
            yield f"{a.id} of two iterations may be in flight together"
