"""Placements over cluster sizes: the best of each family at each size, and where another wins.

Families are those of `families.py`: colocated, split or hybrid, and how stale. What was found for
fewer devices may be placed on more of them, of which some are then idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
# A placement of fewer devices is shorter where it takes less by more than what is rounded.
LESS = 1 - 1e-6


@dataclass(frozen=True, kw_only=True)
class SweepSize:
    """What the search has found for so many devices: the best of each family, the best first.

    `refused` says why nothing fits, where nothing does. `between` marks a size that was tried to
    find where another family wins. `leading` is the family that wins or was first to win at a
    smaller size and that nothing since was told apart from.
    """

    devices: int
    tuned: Tuned | None = None
    families: Mapping[str, Tried]
    refused: str = ""
    between: bool = False
    contest: Contest | None = None
    """The winner beside the best of the next family, in many worlds; None on CPU devices."""
    leading: str = ""

    @property
    def winner(self) -> str:
        """The family of the best placement; empty where nothing fits."""
        return next(iter(self.families), "")

    def idle(self, family: str) -> int:
        """Devices that the best placement of a family leaves without work."""
        return self.devices - self.families[family].devices

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

    It is told apart from `over` by more than what is uncertain, where that is known; at `before`
    devices, the nearest smaller size that was tried, it is not.
    """

    family: str
    over: str
    devices: int
    before: int
    times: float
    told: bool


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
                    "told": each.told,
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
    known = Contests()

    def at(devices: int, *, between: bool = False) -> None:
        nonlocal error
        told(f"{devices} {kind}")
        try:
            tuned = tune(devices)
            families = families_of(tuned)
            found[devices] = SweepSize(
                devices=devices, tuned=tuned, families=families, between=between
            )
        except PlanError as refused:
            if refused.findings[0].code != NOTHING_FITS:
                raise
            error = refused
            what = refused.findings[0].what
            found[devices] = SweepSize(devices=devices, families={}, refused=what)

    for devices in sorted(set(sizes)):
        at(devices)
    if error is not None and not any(size.tuned for size in found.values()):
        raise error
    sweep = compared(found.values(), kind, known)
    while (middle := _to_try(sweep)) is not None:
        at(middle, between=True)
        sweep = compared(found.values(), kind, known)
    return sweep


def families_of(tuned: Tuned) -> dict[str, Tried]:
    """The best of each family among the placements that a search has found, the best first."""
    families: dict[str, Tried] = {}
    for tried in sorted([*tuned.rows, *tuned.families], key=Tried.rank):
        families.setdefault(placement_family(tried), tried)
    return families


class Contests(dict[tuple[int, int], Contest | None]):
    """Pairs of placements world by world, each compared once."""

    def of(self, first: Tried, second: Tried, tuned: Tuned) -> Contest | None:
        """One beside the other; None where that is not known."""
        pair = id(first), id(second)
        if pair not in self:
            costs = tuned.costs
            self[pair] = None if costs is None else contest_of(first, second, costs)
        return self[pair]


def compared(sizes: Iterable[SweepSize], kind: str, known: Contests) -> Sweep:
    """The sizes ascending, none worse than a smaller one, and where another family wins."""
    ordered: list[SweepSize] = []
    crossed: list[Crossover] = []
    before: SweepSize | None = None
    for size in sorted(sizes, key=lambda one: one.devices):
        tuned = size.tuned
        if tuned is None:
            ordered.append(size)
            continue
        families = _won(_with_smaller(size, before), before)
        found, contest = replace(size, families=families), None
        if len(families) > 1:
            first, second = list(families.values())[:2]
            contest = known.of(first, second, tuned)
        found = replace(found, contest=contest, leading=found.winner)
        if before is not None and found.winner != before.leading:
            crossover = _crossover(before, found, known)
            if crossover is None:
                found = replace(found, leading=before.leading)
            else:
                crossed.append(crossover)
        ordered.append(found)
        before = found
    return Sweep(sizes=tuple(ordered), crossovers=tuple(crossed), kind=kind)


def _with_smaller(size: SweepSize, before: SweepSize | None) -> dict[str, Tried]:
    """The best of each family; of a smaller size, with devices left idle, where that is shorter."""
    families = dict(size.families)
    for name, tried in before.families.items() if before is not None else ():
        own = families.get(name)
        if own is None or tried.period < LESS * own.period:
            families[name] = tried
    return families


def _won(families: Mapping[str, Tried], before: SweepSize | None) -> dict[str, Tried]:
    """The families, the winner first.

    Of those that take hardly longer than the shortest, and no longer than the winner of a smaller
    size, it is the least stale, then the one of fewer pools.
    """
    ranked = sorted(families.items(), key=lambda pair: pair[1].rank())
    most = HARDLY * ranked[0][1].period
    if before is not None:
        most = min(most, before.families[before.winner].period / LESS)
    near = [pair for pair in ranked if pair[1].period <= most]
    near.sort(key=lambda pair: (pair[1].plan.staleness, len(pair[1].plan.pools), pair[1].rank()))
    return dict([near[0], *ranked])


def _crossover(before: SweepSize, size: SweepSize, known: Contests) -> Crossover | None:
    """That the winner is another than the one that led so far; None where they are as good."""
    winner, other = size.families[size.winner], size.families.get(before.leading)
    contest = None
    if other is not None and size.tuned is not None:
        contest = known.of(winner, other, size.tuned)
        if contest is not None and not contest.told:
            return None
    return Crossover(
        family=size.winner,
        over=before.leading,
        devices=size.devices,
        before=before.devices,
        times=1.0 if other is None else other.period / winner.period,
        told=contest is not None,
    )


def _to_try(sweep: Sweep) -> int | None:
    """A size half way to where another family wins, in whole servers; None where all are known.

    Between two sizes that were asked for and are no server apart it is any.
    """
    tried = [size.devices for size in sweep.sizes]
    asked = [size.devices for size in sweep.sizes if not size.between]
    for after in (crossover.devices for crossover in sweep.crossovers):
        before = max(devices for devices in tried if devices < after)
        apart = min(n for n in asked if n >= after) - max(n for n in asked if n <= before)
        step = SERVER if apart > SERVER else 1
        if after - before > step:
            return max((before + after) // 2 // step * step, before + step)
    return None


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
