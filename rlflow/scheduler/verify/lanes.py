"""The lanes of a device, and what lies on it while each action runs: a sweep along both.

On each lane of a device one instance runs at a time, in the order of the list: rule
`devices_take_turns` proves it. So what lies on a device is a matter of its *position*: how many of
its moves, sleeps and wakes, are over. A part takes its room when its wake starts and gives it back
when its sleep is over, so during a move lies what lies at the position before or after it, and
nothing more.

While an action runs, the position is in its *span*: not below the number of moves that
happens-before proves over when the action starts, not above the number of those that it does not
prove to start later. A part counts as held if it is there at any position of the span, and all of
these are added up, with what the action takes itself; beside a move runs one action of the other
lane at the most, and what that holds is the move's too.

The bound is sound: the true position is in the span at every moment, and more comes to a device
only at the start of an action. It is no laxer than to ask of each part by itself whether a sleep is
over before the action starts and the next wake starts after it is over, always: that is to be away
on the whole of the span. It is more than what is ever held where one part leaves before another
comes within one span.

This file states no rule, and shares no code with the passes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rlflow.scheduler.plan.plan import Action, Part
from rlflow.scheduler.verify.happens_before import Facts


def given_back(part: Part) -> int:
    """Bytes of a device that a part's sleep frees."""
    return max((part.size or 0) - part.residual, 0)


@dataclass(frozen=True, kw_only=True)
class Line:
    """The moves of one device in their order around the turn, and the actions beside them.

    Positions count from a turn that begins as the run does, `turns` - 1 before that of the
    actions.
    """

    facts: Facts
    device: int
    moves: tuple[Action, ...]
    runs: tuple[Action, ...]
    still: int
    """Bytes of what neither sleeps nor wakes here."""

    @cached_property
    def spans(self) -> dict[str, tuple[int, int]]:
        """The first and last position at which each action may run."""
        unrolled, number = self.facts.unrolled, self.facts.number
        count, turns = len(self.moves), self.facts.unrolled.turns
        found = {move.id: (place, place + 1) for place, move in enumerate(self.moves)}
        if not count:
            return found | {run.id: (0, 0) for run in self.runs}
        moving = unrolled.every_turn(number[move.id] for move in self.moves)
        every = count * (2 * turns - 1)
        for run in self.runs:
            place = number[run.id]
            last = every - unrolled.begins_later(place, moving)
            found[run.id] = unrolled.over(place, moving), last
        return found

    @cached_property
    def places(self) -> dict[str, list[int]]:
        """Where in the turn each part moves."""
        found: dict[str, list[int]] = {}
        for place, move in enumerate(self.moves):
            found.setdefault(str(move.part), []).append(place)
        return found

    def sleeps_from(self, part: str, action: str) -> Action | None:
        """The sleep that ends the time awake of a part in which an action runs, always.

        That is the part's first move from the action's span on, if it is not in the span.
        """
        if part not in self.places or action not in self.spans:
            return None
        first, last = self.spans[action]
        turn, place = divmod(first, len(self.moves))
        places = self.places[part]
        at = bisect_left(places, place)
        if at == len(places):
            turn, at = turn + 1, 0
        before, after = self.moves[places[at - 1]], self.moves[places[at]]
        later = turn * len(self.moves) + places[at] >= last
        return after if later and (before.kind, after.kind) == ("wake", "sleep") else None

    @cached_property
    def loads(self) -> dict[str, int]:
        """The most bytes that are here while each action runs, by itself."""
        return self._of_moves() | self._of_runs()

    def _freed(self, move: Action) -> int:
        """Bytes that a move gives back or takes here."""
        part = self.facts.parts[str(move.part)]
        return 0 if self.device in part.stays else given_back(part)

    @cached_property
    def _at_start(self) -> int:
        """Bytes that are here when a turn begins."""
        awake = self.places.keys() & set(self.facts.plan.awake_at_start)
        return self.still + sum(self._freed(self.moves[self.places[part][0]]) for part in awake)

    def _of_moves(self) -> dict[str, int]:
        """A part that moves is there, beside what those before it have left."""
        held, found = self._at_start, {}
        for move in self.moves:
            held += self._freed(move) if move.kind == "wake" else 0
            found[move.id] = held + (move.cost.transient or 0)
            held -= self._freed(move) if move.kind == "sleep" else 0
        return found

    def _of_runs(self) -> dict[str, int]:
        """The sweep: spans follow each other as actions do, and parts come and go at their ends."""
        found: dict[str, int] = {}
        start = self.facts.plan.awake_at_start
        seen = {part: int(part in start) for part in self.places}
        held, count = self._at_start, len(self.moves)
        passed = self.spans[self.runs[0].id][0] // count * count if count and self.runs else 0
        reached = passed
        for run in self.runs:
            first, last = self.spans[run.id]
            for position in range(reached, last):
                move = self.moves[position % count]
                if move.kind == "wake":
                    seen[str(move.part)] += 1
                    held += self._freed(move) if seen[str(move.part)] == 1 else 0
            for position in range(passed, first):
                move = self.moves[position % count]
                if move.kind == "sleep":
                    seen[str(move.part)] -= 1
                    held -= self._freed(move) if seen[str(move.part)] == 0 else 0
            reached, passed = max(reached, last), max(passed, first)
            found[run.id] = held + (run.cost.transient or 0)
        return found

    @cached_property
    def beside(self) -> dict[str, int]:
        """The most bytes that are here while each move runs and an action beside it."""
        found: dict[str, int] = {}
        for run in self.runs:
            first, last = self.spans[run.id]
            for position in range(first, min(last, first + len(self.moves))):
                move = self.moves[position % len(self.moves)]
                both = self.loads[run.id] + (move.cost.transient or 0)
                found[move.id] = max(found.get(move.id, 0), both)
        return found

    def is_short(self, sleep: int, wake: int, size: int) -> bool:
        """Whether between two positions an action runs for which so many bytes more are too many.

        Always between them: it starts after the one move is over, and is over before the other.
        """
        moves, runs, spans = self._short_of(size)
        count = len(self.moves)
        if _any(moves, sleep + 1, wake) or _any(moves, sleep + 1 - count, wake - count):
            return True
        turns = range(spans[0][0] // count - 1, spans[-1][1] // count + 1) if runs else ()
        for turn in turns:
            first, last = sleep + 1 + turn * count, wake + turn * count
            began = bisect_left(spans, first, key=lambda span: span[0])
            ended = bisect_right(spans, last, key=lambda span: span[1])
            if _any(runs, began, ended):
                return True
        return False

    def _short_of(self, size: int) -> tuple[list[int], list[int], list[tuple[int, int]]]:
        """The moves and the runs beside which so many bytes do not fit, by their places."""
        known = self._known.get(size)
        if known is None:
            most = self.facts.plan.budget(self.device) - size
            places = [
                [place for place, a in enumerate(lane) if self.loads[a.id] > most]
                for lane in (self.moves, self.runs)
            ]
            known = places[0], places[1], [self.spans[run.id] for run in self.runs]
            self._known[size] = known
        return known

    @cached_property
    def _known(self) -> dict[int, tuple[list[int], list[int], list[tuple[int, int]]]]:
        """What `_short_of` has answered."""
        return {}


def _any(places: Sequence[int], first: int, last: int) -> bool:
    """Whether one of some places in their order is from `first` on and before `last`."""
    at = bisect_left(places, first)
    return at < len(places) and places[at] < last
