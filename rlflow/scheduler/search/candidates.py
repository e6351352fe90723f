"""Which candidates `tune` looks at: what is usual, what is promising, and what is near another.

Everything here goes by bounds and figures of roles; no plan is compiled.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlflow.scheduler.devices.cluster import Cluster
from rlflow.scheduler.search.bounds import Figures, PeriodBounds
from rlflow.scheduler.search.ranges import Range, alike, divisions, near_cuts, unions
from rlflow.scheduler.search.space import Candidate, Choice, PlacedUse, classes_of

KEPT_DIVISIONS = 1500
LAYOUTS_TRIED = 4
WORTH = 0.98


@dataclass(slots=True, kw_only=True)
class Moves:
    """Generates candidates; counts those it looked at, and by reason those that cannot fit."""

    figures: Figures
    bounds: PeriodBounds
    cluster: Cluster
    staleness: int
    streams: Sequence[int]
    looked_at: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def roles(self) -> tuple[PlacedUse, ...]:
        """The roles of the graph."""
        return self.figures.roles

    def usual(self) -> Iterator[tuple[Range, ...]]:
        """Ranges of every role: colocated; rollouts, or all that is frozen as well, apart; hybrid.

        Apart at each quarter and where kinds of devices meet; of a hybrid the rollouts have all
        devices.
        """
        count = self.cluster.count
        whole = (0, count)
        if alike(whole, self.cluster):
            yield (whole,) * len(self.roles)
        met = itertools.accumulate(number for _, number in self.cluster.kinds)
        cuts = [*(count * quarter // 4 for quarter in (2, 1, 3)), *met]
        for cut in dict.fromkeys(cut for cut in cuts if 0 < cut < count):
            left, right = (0, cut), (cut, count)
            apart = tuple(right if role.rollout else left for role in self.roles)
            frozen = tuple(left if role.trained else right for role in self.roles)
            hybrid = tuple(whole if role.rollout else left for role in self.roles)
            for ranges in dict.fromkeys((apart, frozen, hybrid)):
                if all(alike(where, self.cluster) for where in ranges):
                    yield ranges

    def promising(self) -> list[tuple[float, Candidate]]:
        """Candidates with their estimates, of the divisions with the least work on a device."""
        return [
            (self.bounds.estimate(candidate), candidate)
            for ranges in self._divided()
            for candidate in self.of_ranges(ranges)
        ]

    def _divided(self) -> list[tuple[Range, ...]]:
        """Ranges of every role, those with the least work on the busiest device first."""
        found: list[tuple[float, tuple[Range, ...]]] = []
        for division in divisions(self.cluster):
            ranges = unions(division, self.cluster)
            classes = classes_of(self.roles, len(ranges))
            inner = set(division[1:-1])
            for chosen in itertools.product(ranges, repeat=len(classes)):
                if not self._plain(chosen) or not inner <= {edge for r in chosen for edge in r}:
                    continue
                self.looked_at += 1
                by_role = {
                    role: where
                    for group, where in zip(classes, chosen, strict=True)
                    for role in group
                }
                busy = self._busy(by_role)
                if busy is not None:
                    found.append((busy, tuple(by_role[role] for role in range(len(by_role)))))
        return [ranges for _, ranges in heapq.nsmallest(KEPT_DIVISIONS, found)]

    def _plain(self, chosen: Sequence[Range]) -> bool:
        """Whether ranges begin with device 0: the first role's, where all devices are alike."""
        if self.cluster.groups:
            return min(start for start, _ in chosen) == 0
        return chosen[0][0] == 0

    def _busy(self, chosen: Mapping[int, Range]) -> float | None:
        """Seconds of the busiest device, all roles in their fastest layouts; None if one has none.

        A combination that does not fit is counted with its reason.
        """
        busy: dict[Range, float] = {}
        for role, where in chosen.items():
            fitting = self.figures.fitting(role, where)
            if not fitting:
                self.refused[self.figures.why(role, where)] += 1
                return None
            busy[where] = busy.get(where, 0.0) + self.figures.of(role, fitting[0]).busy
        return max(
            sum(seconds for (a, b), seconds in busy.items() if a <= start < b) for start, _ in busy
        )

    def of_ranges(self, ranges: tuple[Range, ...]) -> Iterator[Candidate]:
        """Candidates of ranges: fastest layouts, those that fit together, and shared weights.

        Each with every staleness and number of chunks that the bound says could help.
        """
        fitting = [self.figures.fitting(role, where) for role, where in enumerate(ranges)]
        if not all(fitting):
            return
        fast = Candidate(tuple(choices[0] for choices in fitting))
        lean = self._lean(fast)
        layouts = dict.fromkeys((fast, lean, self._sharing(fast), self._sharing(lean)))
        for candidate in layouts:
            yield candidate
            shortest = self.bounds.period(candidate)
            for staleness in range(1, self.staleness + 1):
                late = replace(candidate, staleness=staleness)
                if self.bounds.period(late) < shortest:
                    shortest = self.bounds.period(late)
                    yield late
            for stream in self.streams[1:]:
                cut = replace(candidate, stream=stream)
                if self.bounds.period(cut) < shortest * WORTH:
                    shortest = self.bounds.period(cut)
                    yield cut

    def _lean(self, candidate: Candidate) -> Candidate:
        """The candidate with smaller layouts, those that cost least first, until all fits."""
        while self.bounds.crowding(candidate) > 0:
            steps = []
            for role, choice in enumerate(candidate.choices):
                fitting = self.figures.fitting(role, choice.range)
                at = fitting.index(choice) + 1
                if at < len(fitting):
                    now, then = self.figures.of(role, choice), self.figures.of(role, fitting[at])
                    saved = max(now.held - then.held, now.need - then.need, 1)
                    steps.append(((then.busy - now.busy) / saved, role, fitting[at]))
            if not steps:
                break
            _, role, choice = min(steps)
            candidate = _with(candidate, role, choice)
        return candidate

    def _sharing(self, candidate: Candidate) -> Candidate:
        """The candidate with rollouts on the trained weights of their devices where that fits."""
        for role, made in enumerate(self.roles):
            if made.source is None or None not in made.engines:
                continue
            here, there = candidate.choices[role], candidate.choices[made.source]
            if here.range != there.range:
                continue
            if not there.layout.whole_rows:
                whole = (c for c in self.figures.fitting(made.source, there.range))
                there = next((c for c in whole if c.layout.whole_rows), there)
            fsdp, tp, ep, _, _ = there.layout.sizes
            layout = replace(here.layout, fsdp=fsdp, tp=tp, ep=ep, engine="")
            shared = Choice(here.start, here.stop, layout)
            if there.layout.whole_rows and self.figures.of(role, shared).why is None:
                candidate = _with(_with(candidate, made.source, there), role, shared)
        return candidate

    def neighbours(self, candidate: Candidate) -> Iterator[Candidate]:
        """Candidates with one choice changed: a layout, a range, a cut, staleness or chunks."""
        ranges = sorted({(0, self.cluster.count), *(c.range for c in candidate.choices)})
        for role, choice in enumerate(candidate.choices):
            for where in ranges:
                for other in self.figures.fitting(role, where)[:LAYOUTS_TRIED]:
                    if other != choice:
                        yield _with(candidate, role, other)
            own = replace(choice, layout=replace(choice.layout, own=True))
            if self.bounds.shares(candidate, role):
                yield _with(candidate, role, own)
        yield self._sharing(candidate)
        yield from self.moved_cuts(candidate)
        for staleness in range(self.staleness + 1):
            yield replace(candidate, staleness=staleness)
        for stream in self.streams:
            yield replace(candidate, stream=stream)

    def moved_cuts(self, candidate: Candidate) -> Iterator[Candidate]:
        """Candidates with one boundary between pools moved to a cut near it, or half way there."""
        inner = {edge for choice in candidate.choices for edge in choice.range}
        for edge in sorted(inner - {0, self.cluster.count}):
            for other in near_cuts(edge, self.cluster):
                moved = []
                for role, choice in enumerate(candidate.choices):
                    start, stop = (other if side == edge else side for side in choice.range)
                    moved.append(self._resized(role, choice, (start, stop)))
                kept = tuple(choice for choice in moved if choice is not None)
                if len(kept) == len(moved) and self._plain([choice.range for choice in kept]):
                    yield replace(candidate, choices=kept)

    def work_apart(self, candidate: Candidate) -> float | None:
        """Seconds of all devices together, were they evenly busy; None where that is no help.

        It is where devices of a rollout, apart from those that train its model, are busier.
        """
        busy: dict[Range, float] = {}
        for role, choice in enumerate(candidate.choices):
            seconds = self.figures.of(role, choice).busy
            busy[choice.range] = busy.get(choice.range, 0.0) + seconds
        pairs = [
            (choice.range, candidate.choices[made.source].range)
            for made, choice in zip(self.roles, candidate.choices, strict=True)
            if made.rollout and made.source is not None
        ]
        apart = [(one, other) for one, other in pairs if one[0] >= other[1] or other[0] >= one[1]]
        if not apart or not any(busy[one] > busy[other] for one, other in apart):
            return None
        spent = sum(seconds * (stop - start) for (start, stop), seconds in busy.items())
        return spent / self.cluster.count

    def _resized(self, role: int, choice: Choice, where: Range) -> Choice | None:
        """A role's choice on another range: the fastest layout of the same kind that fits."""
        if where == choice.range:
            return choice
        if where[0] >= where[1]:
            return None
        fitting = self.figures.fitting(role, where)
        kind = choice.layout.tp, choice.layout.engine
        alike = [c for c in fitting if (c.layout.tp, c.layout.engine) == kind]
        return next(iter((*alike, *fitting)), None)


def _with(candidate: Candidate, role: int, choice: Choice) -> Candidate:
    choices = (*candidate.choices[:role], choice, *candidate.choices[role + 1 :])
    return replace(candidate, choices=choices)
