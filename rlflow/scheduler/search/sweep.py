"""Placements over cluster sizes: the best of each family at each size, and where another wins.

Families are those of `families.py`: colocated, split or hybrid, and how stale.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.errors import PlanError
from rlflow.scheduler.plan.period_range import Contest
from rlflow.scheduler.search.families import placement_family
from rlflow.scheduler.search.search import Tried
from rlflow.scheduler.search.tune import Tuned, contest_of

# Sizes between two of a sweep are tried in steps of a server.
SERVER = 8
NOTHING_FITS = "E240"
# Families that take at most so many times as long as the shortest are as good.
HARDLY = 1.01


@dataclass(frozen=True, kw_only=True)
class SweepSize:
    """What the search has found for so many devices: the best of each family, the best first.

    `refused` says why nothing fits, where nothing does. `between` marks a size that was tried to
    find where another family wins.
    """

    devices: int
    tuned: Tuned | None = None
    families: Mapping[str, Tried]
    refused: str = ""
    between: bool = False
    contest: Contest | None = None
    """The winner beside the best of the next family, in many worlds; None on CPU devices."""

    @property
    def winner(self) -> str:
        """The family of the best placement; empty where nothing fits."""
        return next(iter(self.families), "")

    def samples_per_second(self, family: str) -> float:
        """Rows trained on, a second."""
        return self.tuned.samples / self.families[family].period if self.tuned else 0.0

    def tokens_per_second(self, family: str) -> float:
        """Tokens of responses trained on, a second."""
        return self.tuned.tokens / self.families[family].period if self.tuned else 0.0

    def hours_per_million(self, family: str) -> float:
        """Device hours of a million tokens; all devices are paid for, used or not."""
        return self.devices / 3600 / self.tokens_per_second(family) * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """Where the winner changes: `family` wins from `devices` on, by so many `times` there.

    At `before` devices, the nearest smaller size that was tried, `over` wins.
    """

    family: str
    over: str
    devices: int
    before: int
    times: float


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The sizes, ascending, and where another family wins."""

    sizes: tuple[SweepSize, ...]
    crossovers: tuple[Crossover, ...]
    kind: str

    @property
    def families(self) -> tuple[str, ...]:
        """All families, by how often they win, then by name."""
        wins = [size.winner for size in self.sizes]
        names = {name for size in self.sizes for name in size.families}
        return tuple(sorted(names, key=lambda name: (-wins.count(name), name)))

    def as_json(self, price: float | None) -> dict[str, Any]:
        """The sweep as plain data; costs where a device hour has a price."""
        return {
            "kind": self.kind,
            "price": price,
            "sizes": [_size_json(size, price) for size in self.sizes],
            "crossovers": [
                {
                    "family": each.family,
                    "over": each.over,
                    "devices": each.devices,
                    "before": each.before,
                    "times": each.times,
                }
                for each in self.crossovers
            ],
        }


def sweep_sizes(
    sizes: Sequence[int], tune: Callable[[int], Tuned], kind: str, told: Callable[[str], None]
) -> Sweep:
    """Tune for each size, and between two sizes with other winners by halves, to a server's size.

    `told` hears of each size. Raises PlanError where nothing fits any size, and any other at once.
    """
    found: dict[int, SweepSize] = {}
    error: PlanError | None = None

    def at(devices: int, *, between: bool = False) -> SweepSize:
        nonlocal error
        if devices not in found:
            told(f"{devices} {kind}")
            try:
                found[devices] = size_of(devices, tune(devices), between=between)
            except PlanError as refused:
                if refused.findings[0].code != NOTHING_FITS:
                    raise
                error = refused
                what = refused.findings[0].what
                found[devices] = SweepSize(devices=devices, families={}, refused=what)
        return found[devices]

    for devices in sizes:
        at(devices)
    if error is not None and not any(size.tuned for size in found.values()):
        raise error
    asked = sorted(devices for devices, size in found.items() if size.tuned)
    crossed = []
    for before, after in itertools.pairwise(asked):
        if found[before].winner != found[after].winner:
            crossed.append(_crossover(before, after, lambda size: at(size, between=True)))
    ordered = tuple(found[devices] for devices in sorted(found))
    return Sweep(sizes=ordered, crossovers=tuple(crossed), kind=kind)


def size_of(devices: int, tuned: Tuned, *, between: bool = False) -> SweepSize:
    """The best of each family among the placements that a search has found, the winner first.

    Of families that take hardly longer than the shortest the winner is the least stale, then the
    one of fewer pools.
    """
    families: dict[str, Tried] = {}
    ranked = sorted([*tuned.rows, *tuned.families], key=Tried.rank)
    near = [tried for tried in ranked if tried.period <= HARDLY * ranked[0].period]
    winner = min(near, key=lambda one: (one.plan.staleness, len(one.plan.pools), one.rank()))
    for tried in (winner, *ranked):
        families.setdefault(placement_family(tried), tried)
    best = list(families.values())
    contest = None
    if len(best) > 1 and tuned.costs is not None:
        contest = contest_of(best[0], best[1], tuned.costs)
    return SweepSize(
        devices=devices, tuned=tuned, families=families, between=between, contest=contest
    )


def _crossover(before: int, after: int, at: Callable[[int], SweepSize]) -> Crossover:
    """The smallest size that the later winner was found to win at, by halves."""
    family = at(after).winner
    step = SERVER if after - before > SERVER else 1
    while after - before > step:
        middle = (before + after) // 2 // step * step
        if middle <= before:
            middle = before + step
        if at(middle).winner == family:
            after = middle
        else:
            before = middle
    first, over = at(after), at(before).winner
    other = first.families.get(over)
    times = other.period / first.families[family].period if other is not None else 1.0
    return Crossover(family=family, over=over, devices=after, before=before, times=times)


def _size_json(size: SweepSize, price: float | None) -> dict[str, Any]:
    families = {}
    for name, tried in size.families.items():
        hours = size.hours_per_million(name)
        families[name] = {
            "period": tried.period,
            "samples_per_second": size.samples_per_second(name),
            "tokens_per_second": size.tokens_per_second(name),
            "device_hours_per_million_tokens": hours,
            "cost_per_million_tokens": None if price is None else hours * price,
            "devices_used": tried.devices,
        }
    return {
        "devices": size.devices,
        "winner": size.winner or None,
        "refused": size.refused or None,
        "between": size.between,
        "contest": None if size.contest is None else size.contest.as_json(),
        "families": families,
    }
