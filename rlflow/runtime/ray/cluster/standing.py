"""Ranks that wait in a collective for one that does not come: told by their counts of collectives.

All ranks of a group call the same collectives. One that has called fewer than another keeps it
waiting: until it comes, or for good where it has nothing left to do or waits for that one in turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from rlflow.runtime.ray.ranks import GroupCalls, RankStanding, rank_name

RankStandings = Mapping[int, RankStanding]


def behind(standings: RankStandings, idle: Collection[int]) -> list[str]:
    """Of each group in which a rank that is `idle` is behind one that is not, who is where."""
    return [
        _said(group)
        for group in _groups(standings)
        if any(
            late in idle and first not in idle and group[late].count < group[first].count
            for late in group
            for first in group
        )
    ]


def crossed(standings: RankStandings) -> list[str]:
    """Of groups in which two ranks are each behind the other, who is where."""
    groups = _groups(standings)
    ahead = {
        (first, late): group
        for group in groups
        for first in group
        for late in group
        if group[late].count < group[first].count
    }
    found = [group for (first, late), group in ahead.items() if (late, first) in ahead]
    return list(dict.fromkeys(map(_said, found)))


def uneven_calls(standings: RankStandings) -> list[str]:
    """Of each group whose ranks have called different numbers of collectives, who is where."""
    return [
        _said(group)
        for group in _groups(standings)
        if len({counted.count for counted in group.values()}) > 1
    ]


def _groups(standings: RankStandings) -> list[dict[int, GroupCalls]]:
    """The counts of each group by device, those of few ranks first."""
    found: dict[tuple[str, tuple[int, ...]], dict[int, GroupCalls]] = defaultdict(dict)
    for device, standing in sorted(standings.items()):
        for key, counted in standing.counted.items():
            found[key, counted.devices][device] = counted
    return [found[key] for key in sorted(found, key=lambda key: (len(key[1]), key))]


def _said(group: Mapping[int, GroupCalls]) -> str:
    """Who is at which collective of a group, the last first."""
    at: dict[int, list[int]] = defaultdict(list)
    for device, counted in group.items():
        at[counted.count].append(device)
    name = next(iter(group.values())).group
    parts = [
        f"{' and '.join(map(rank_name, devices))} at collective {count}"
        for count, devices in sorted(at.items())
    ]
    return f"{', '.join(parts)} of group {name}"
