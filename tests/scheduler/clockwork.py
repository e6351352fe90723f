"""The shortest turn of a tiny plan by trying every start of every action and copy, in whole units.

It knows clocks and bytes alone: no orders, no gaps in lists, no dependencies between moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from rlflow.scheduler.plan.plan import Plan

TURNS = range(-2, 3)


@dataclass(frozen=True)
class Away:
    """A part's copies out and back start at `out` and `back`, and take `copy`; offsets in turns."""

    part: str
    devices: tuple[int, ...]
    out: int
    back: int
    copy: int
    moved: int


class Clock:
    """A plan without moves, whose durations and copies (a unit a byte) are whole units."""

    def __init__(self, plan: Plan, turn: int) -> None:
        self.plan, self.turn = plan, turn
        self.actions = plan.actions
        used = {name for a in plan.actions for name in a.needs}
        self.parts = [part for part in plan.parts if part.name in used]
        self.lasts = [round(a.cost.seconds or 0) for a in plan.actions]

    def fewest(self) -> int | None:
        """The fewest bytes moved in a turn of that length; None where nothing fits it."""
        found = None
        for starts in product(range(self.turn), repeat=len(self.actions) - 1):
            offsets = (0, *starts)
            if self._apart(offsets) and self._in_time(offsets):
                for naps in self._naps(offsets):
                    moved = sum(nap.moved for nap in naps)
                    if (found is None or moved < found) and self._fits(offsets, naps):
                        found = moved
        return found

    def _apart(self, offsets: Sequence[int]) -> bool:
        """Whether no two actions of a device overlap."""
        for one, other in combinations(range(len(offsets)), 2):
            if {*self.actions[one].devices} & {*self.actions[other].devices}:
                apart = (offsets[other] - offsets[one]) % self.turn
                if apart < self.lasts[one] or apart + self.lasts[other] > self.turn:
                    return False
        return max(self.lasts) <= self.turn

    def _in_time(self, offsets: Sequence[int]) -> bool:
        """Whether some turns for each action let every one wait for what it has to."""
        number = {a.id: n for n, a in enumerate(self.actions)}
        waits = [
            (number[d.action], n, d.distance) for n, a in enumerate(self.actions) for d in a.after
        ]
        return any(
            all(
                offsets[t] + turns[t] * self.turn
                >= offsets[s] + turns[s] * self.turn + self.lasts[s] - distance * self.turn
                for s, t, distance in waits
            )
            for turns in product(TURNS, repeat=len(offsets))
        )

    def _naps(self, offsets: Sequence[int]) -> Iterator[tuple[Away, ...]]:
        """Every choice of naps: none or one between any two uses that follow each other."""
        choices: list[list[Away | None]] = []
        for part in self.parts:
            users = [n for n, a in enumerate(self.actions) if part.name in a.needs]
            free = part.kind == "gradients"
            copy = 0 if free else part.size or 0
            moved = 0 if free else 2 * (part.size or 0) * len(part.devices)
            for user in users:
                begin = offsets[user] + self.lasts[user]
                after = [(offsets[u] - offsets[user]) % self.turn or self.turn for u in users]
                end = offsets[user] + min(after)
                own: list[Away | None] = [None]
                for out in range(begin, end + 1):
                    for back in range(out + copy, end - copy + 1):
                        own.append(Away(part.name, part.devices, out, back, copy, moved))
                choices.append(own)
        for chosen in product(*choices):
            yield tuple(nap for nap in chosen if nap is not None)

    def _fits(self, offsets: Sequence[int], naps: Sequence[Away]) -> bool:
        copies = [(start, n.copy, n.devices) for n in naps for start in (n.out, n.back)]
        for (a, long, here), (b, other, there) in combinations(copies, 2):
            apart = (b - a) % self.turn
            if {*here} & {*there} and (long or other):
                behind = apart >= long and apart + other <= self.turn
                if not behind and not (apart == 0 and not (long and other)):
                    return False
        moments = [
            (start, lasts, {*a.needs}, a.devices, a.cost.transient or 0)
            for start, lasts, a in zip(offsets, self.lasts, self.actions, strict=True)
        ]
        moments += [(n.back, n.copy, {n.part}, n.devices, 0) for n in naps]
        for start, lasts, needs, devices, transient in moments:
            gone = {n.part for n in naps if n.part not in needs and self._covers(n, start, lasts)}
            for device in devices:
                held = sum(
                    p.size or 0 for p in self.parts if device in p.devices and p.name not in gone
                )
                if held + transient > self.plan.budgets[device]:
                    return False
        return True

    def _covers(self, nap: Away, start: int, lasts: int) -> bool:
        """Whether a part is away from its copy out to its copy back around a span."""
        asleep = nap.out + nap.copy
        return (start - asleep) % self.turn + lasts <= nap.back - asleep
