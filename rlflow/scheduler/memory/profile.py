"""What may be in memory while each action runs, whatever the interleaving.

A part is taken to be there unless its sleep is over before the action starts and its next
wake starts after the action has ended, by what the plan makes each wait for: its
dependencies, and the order of the list on every lane of a device. This file moves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from rlflow.scheduler.memory.on_hosts import (
    HostPeak,
    bytes_freed,
    kept_in_place,
    staying_names,
    while_loading,
)
from rlflow.scheduler.plan.plan import HOST, Action, Part, Plan


@dataclass(frozen=True, kw_only=True)
class Memories:
    """The devices of a plan in groups that hold the same parts and run the same actions.

    A group is known by the first of its devices. Parts that nobody uses are never awake.
    """

    plan: Plan

    @cached_property
    def _sets(self) -> list[tuple[int, ...]]:
        plan = self.plan
        sets = [a.devices for a in plan.actions]
        sets += [devices for part in plan.parts for devices in (part.devices, part.leaves)]
        return list(dict.fromkeys(sets))

    @cached_property
    def group(self) -> dict[int, int]:
        """The group of every device."""
        marks: dict[int, list[int]] = {}
        for number, devices in enumerate(self._sets):
            for device in devices:
                marks.setdefault(device, []).append(number)
        first: dict[tuple[int, ...], int] = {}
        return {
            device: first.setdefault((self.plan.budget(device), *numbers), device)
            for device, numbers in sorted(marks.items())
            if device != HOST
        }

    @cached_property
    def on(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """The groups of every set of devices that an action or a part has."""
        return {
            devices: tuple(dict.fromkeys(self.group[d] for d in devices if d != HOST))
            for devices in self._sets
        }

    @cached_property
    def of_part(self) -> dict[str, tuple[int, ...]]:
        """The groups of every part."""
        return {part.name: self.on[part.devices] for part in self.plan.parts}

    @cached_property
    def used(self) -> frozenset[str]:
        """The parts that some action needs."""
        return frozenset(name for action in self.plan.actions for name in action.needs)

    @cached_property
    def all_asleep(self) -> dict[int, int]:
        """Bytes of each group with every part asleep: what those leave that do."""
        held = dict.fromkeys(self.group.values(), 0)
        for part in self.plan.parts:
            left = (part.size or 0) - bytes_freed(part)
            for group in self.of_part[part.name] if left else ():
                held[group] += left
        return held

    @cached_property
    def all_awake(self) -> dict[int, int]:
        """Bytes of each group with every part awake that is ever used."""
        held = dict.fromkeys(self.group.values(), 0)
        for part in self.plan.parts:
            size = (part.size or 0) - (0 if part.name in self.used else bytes_freed(part))
            for group in self.of_part[part.name]:
                held[group] += size
        return held


def _copied(part: Part) -> tuple[int, ...]:
    """The devices of a part whose bytes are in their hosts' memory, all the time or asleep."""
    return part.devices if part.on_host else part.leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Asleep:
    """A sleep, the wake that ends it, and the actions between the two, always; as bits.

    `outside` are those between the wake and the next turn's sleep.
    """

    sleep: Action
    wake: Action
    inside: int
    outside: int


class Instants:
    """What runs between the moves of a plan, and beside them; sets of actions as bits."""

    def __init__(self, plan: Plan, memories: Memories) -> None:
        self.plan = plan
        self.memories = memories
        self._moves = [action for action in plan.actions if action.part is not None]
        self._bit = {action.id: 1 << number for number, action in enumerate(plan.actions)}
        self._shorts: dict[tuple[int, int], int] = {}

    @cached_property
    def _waits(self) -> dict[str, list[tuple[str, int]]]:
        """What each action comes after, at most a turn earlier."""
        found = {
            action.id: [(dep.action, dep.distance) for dep in action.after if dep.distance <= 1]
            for action in self.plan.actions
        }
        for first, second, distance in _lanes(self.plan, self.memories):
            found[second].append((first, distance))
        return found

    @cached_property
    def before(self) -> tuple[dict[str, int], dict[str, int]]:
        """The actions of this turn, and of the turn before, that are over when each starts."""
        return self._reached([action.id for action in self.plan.actions], self._waits)

    @cached_property
    def after(self) -> tuple[dict[str, int], dict[str, int]]:
        """The actions of this turn, and of the next, that start when each is over."""
        followers: dict[str, list[tuple[str, int]]] = {name: [] for name in self._waits}
        for name, waits in self._waits.items():
            for other, distance in waits:
                followers[other].append((name, distance))
        return self._reached([action.id for action in reversed(self.plan.actions)], followers)

    def _reached(
        self, order: list[str], arcs: dict[str, list[tuple[str, int]]]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """What arcs lead to from each action, within no turn and within one."""
        sets: tuple[dict[str, int], dict[str, int]] = ({}, {})
        for turns in (0, 1):
            for name in order:
                mask = 0
                for other, distance in arcs[name]:
                    if distance <= turns:
                        mask |= sets[turns - distance][other]
                    if distance == turns:
                        mask |= self._bit[other]
                sets[turns][name] = mask
        return sets

    def _between(self, first: str, second: str, turns: int) -> int:
        """The actions that start when one is over, and are over when another starts."""
        mask = 0
        for gap in range(turns + 1):
            mask |= self.after[gap][first] & self.before[turns - gap][second]
        return mask

    @cached_property
    def naps(self) -> dict[str, list[Asleep]]:
        """Every sleep of each part that has any, with its wake."""
        moves: dict[str, list[Action]] = {}
        for move in self._moves:
            moves.setdefault(str(move.part), []).append(move)
        found: dict[str, list[Asleep]] = {}
        for part, own in moves.items():
            for number, move in enumerate(own):
                if move.kind == "sleep":
                    wake, turns = own[(number + 1) % len(own)], int(number + 1 == len(own))
                    inside = self._between(move.id, wake.id, turns)
                    outside = self._between(wake.id, move.id, 1 - turns)
                    nap = Asleep(sleep=move, wake=wake, inside=inside, outside=outside)
                    found.setdefault(part, []).append(nap)
        return found

    @cached_property
    def loads(self) -> dict[str, dict[int, int]]:
        """Bytes on each group while each action runs: what may be there, and what it uses."""
        found = {
            action.id: {
                group: self.memories.all_awake[group] + (action.cost.transient or 0)
                for group in self.memories.on[action.devices]
            }
            for action in self.plan.actions
        }
        parts = {part.name: part for part in self.plan.parts}
        for name, naps in self.naps.items():
            asleep = 0
            for nap in naps:
                asleep |= nap.inside
            part = parts[name]
            groups, freed = self.memories.on[part.leaves], bytes_freed(part)
            for action in self._named(asleep):
                load = found[action.id]
                for group in groups:
                    if group in load:
                        load[group] -= freed
        return found

    def make_room(self, part: Part, naps: Sequence[Asleep], groups: Sequence[int]) -> bool:
        """Whether on some group an action needs the room that a part leaves in some sleeps."""
        asleep = 0
        for nap in naps:
            asleep |= nap.inside
        return any(asleep & self._short(group, bytes_freed(part)) for group in groups)

    def _short(self, group: int, size: int) -> int:
        """The actions that leave less than so many bytes of a group."""
        known = self._shorts.get((group, size))
        if known is None:
            most = self.plan.budget(group) - size
            known = 0
            for name, load in self.loads.items():
                known |= self._bit[name] if group in load and load[group] > most else 0
            self._shorts[group, size] = known
        return known

    def _named(self, mask: int) -> Iterator[Action]:
        """The actions of a set."""
        while mask:
            low = mask & -mask
            yield self.plan.actions[low.bit_length() - 1]
            mask ^= low

    @cached_property
    def _computing(self) -> dict[int, int]:
        """The actions of each group that are no moves."""
        found = dict.fromkeys(self.memories.group.values(), 0)
        for action in self.plan.actions:
            for group in self.memories.on[action.devices] if action.part is None else ():
                found[group] |= self._bit[action.id]
        return found

    @cached_property
    def peaks(self) -> dict[str, int | None]:
        """The most bytes on one device of each action while it runs, whatever runs beside it."""
        found = {name: max(load.values(), default=None) for name, load in self.loads.items()}
        for move in self._moves:
            before = [sets[move.id] for sets in self.before]
            after = [sets[move.id] for sets in self.after]
            ordered = (before[0] & after[1]) | (before[1] & after[0])
            for group in self.memories.on[move.devices]:
                for action in self._named(self._computing[group] & ~ordered):
                    found[move.id] = max(found[move.id] or 0, self.loads[action.id][group])
        return found

    def device_peaks(self) -> dict[int, int]:
        """The most bytes on every device."""
        most: dict[int, int] = {}
        for load in self.loads.values():
            for group, size in load.items():
                most[group] = max(most.get(group, 0), size)
        most = {**self.memories.all_awake, **most}
        return {device: most[group] for device, group in self.memories.group.items()}

    @cached_property
    def host_peak(self) -> HostPeak:
        """The most bytes in one host's memory, the move at which, and what they are of.

        What is offloaded is in host memory from when its sleep may start until its wake is over,
        what has a copy there all the time, the rows that nodes keep, and what saves copy. What is
        pinned stays for the next sleep of its process.
        """
        if self.plan.pinned:
            return max(self._kept_in_place(), self._while_loading(), key=lambda peak: peak[0])
        best: HostPeak = (0, "", ())
        never = self._never_awake()
        out = [move for move in self._moves if (move.kind, move.mode) == ("sleep", "offload")]
        always = [part for part in self.plan.parts if part.on_host]
        keeping = self._staying
        still = len(never) + len(always) + len(keeping)
        for move in [action.id for action in out] or [""][:still]:
            parts = always + [part for part in never if not part.on_host]
            parts += [p for p in (self._offloaded(move) if move else []) if not p.on_host]
            sizes: Counter[tuple[int, ...]] = Counter()
            for part in parts:
                sizes[_copied(part)] += part.on_host or bytes_freed(part)
            near = {_copied(part): self._hosts[part.name] for part in parts}
            hosts = {host for hosts in near.values() for host in hosts}
            for host in sorted(hosts.union(keeping)):
                total = sum(size * near[own].get(host, 0) for own, size in sizes.items())
                total += sum(self._more(part, host) for part in always)
                total += sum(size for size, _ in keeping.get(host, ()))
                if total > best[0]:
                    near_of = ((p, self._hosts[p.name].get(host, 0)) for p in parts)
                    held = [
                        ((p.on_host or bytes_freed(p)) * n + self._more(p, host), p.name)
                        for p, n in near_of
                    ]
                    held += keeping.get(host, ())
                    best = (total, move, tuple(sorted((h for h in held if h[0]), reverse=True)))
        return best

    def _kept_in_place(self) -> HostPeak:
        """The same where processes keep what they have lent."""
        still = [part for part in self._never_awake() if not part.on_host]
        always = [part for part in self.plan.parts if part.on_host]
        moves = [m.id for m in self._moves if (m.kind, m.mode) == ("sleep", "offload")]
        away = {
            move: [*still, *(p for p in self._offloaded(move) if not p.on_host)] for move in moves
        }
        staying = staying_names(self.plan, self._staying, always)
        return kept_in_place(self.plan, away or {"": still}, staying)

    def _while_loading(self) -> HostPeak:
        """The most on a host while instances are loaded; what sleeps at first is there by then."""
        awake = self.plan.awake_at_start
        first = [part for part, _ in self._away if part.name not in awake]
        asleep = [part for part in (*self._never_awake(), *first) if not part.on_host]
        return while_loading(self.plan, asleep, (p for p in self.plan.parts if p.on_host))

    @cached_property
    def _staying(self) -> dict[int, list[tuple[int, str]]]:
        """What every host holds of no part from turn to turn: (bytes, name)."""
        found: dict[int, list[tuple[int, str]]] = {}
        for kept in self.plan.kept:
            for host in self.plan.hosts_keeping(kept):
                found.setdefault(host, []).append((kept.size, f"rows that {kept.node} keeps"))
        for each in self.plan.saved:
            devices = self.plan.instance(each.instance).devices
            for host, count in Counter(map(self.plan.host_of, devices)).items():
                size = each.size * count
                found.setdefault(host, []).append((size, f"copies of {each.instance} to be saved"))
        return found

    def _more(self, part: Part, host: int) -> int:
        """What a part has in a host's memory for some devices beyond what it has for each."""
        return sum(size for d, size in part.more_on_host if self.plan.host_of(d) == host)

    def _offloaded(self, move: str) -> list[Part]:
        """The parts that may be in host memory during a move."""
        bit = self._bit[move]
        return [part for part, away in self._away if away & bit]

    @cached_property
    def _away(self) -> list[tuple[Part, int]]:
        """The parts that are offloaded, and the actions during which they may be."""
        found = []
        for part in self.plan.parts:
            naps = [nap for nap in self.naps.get(part.name, ()) if nap.sleep.mode == "offload"]
            away = 0
            for nap in naps:
                away |= ~nap.outside
            if naps:
                found.append((part, away))
        return found

    def _never_awake(self) -> list[Part]:
        kept = [part for part in self.plan.parts if part.kind not in ("gradients", "pool")]
        return [part for part in kept if part.name not in self.memories.used and bytes_freed(part)]

    @cached_property
    def _hosts(self) -> dict[str, dict[int, int]]:
        """How many of each part's devices every host has that copies to it."""
        found: dict[tuple[int, ...], dict[int, int]] = {}
        devices = {device for part in self.plan.parts for device in part.devices}
        host = {device: self.plan.host_of(device) for device in sorted(devices)}
        for part in self.plan.parts:
            if _copied(part) not in found:
                found[_copied(part)] = dict(Counter(host[device] for device in _copied(part)))
        return {part.name: found[_copied(part)] for part in self.plan.parts}


def _lanes(plan: Plan, memories: Memories) -> list[tuple[str, str, int]]:
    """Neighbours on every lane of a device, and by how many turns the first comes before."""
    queues: dict[tuple[int, str], list[str]] = {}
    for action in plan.actions:
        for group in memories.on[action.devices]:
            queues.setdefault((group, action.lane), []).append(action.id)
    found = []
    for queue in queues.values():
        found += [(one, other, 0) for one, other in pairwise(queue)]
        found.append((queue[-1], queue[0], 1))
    return list(dict.fromkeys(found))
