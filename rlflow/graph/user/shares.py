"""Shares of the devices there are: `"*"`, `"3/4"`; how many devices each is, exactly.

Fractions are whole numbers over whole numbers; nothing is rounded. Knows no pools by their use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from math import lcm

REST = "*"
WRITTEN = re.compile(r"(\d+)/(\d+)")


def part_of(text: str) -> Fraction | None:
    """The part that a share is of all devices, None for `*`; ValueError where it is none."""
    if text == REST:
        return None
    found = WRITTEN.fullmatch(text)
    part = Fraction(int(found[1]), int(found[2])) if found and int(found[2]) else None
    if part is None or not 0 < part <= 1:
        raise ValueError(text)
    return part


def part_or_none(text: str) -> Fraction | None:
    """The part that a share is, such as `3/4`; None where it is none."""
    try:
        return part_of(text)
    except ValueError:
        return None


def devices_by_share(
    wanted: Mapping[str, int | str], listed: int, count: int
) -> dict[str, int] | None:
    """How many of `count` devices each pool has; None where one is no whole number of them.

    `listed` devices are named by number: no pool that takes free ones has them. Shares are of all
    `count`; `*` is what the others leave. None also where too few are left for one.
    """
    found, rest = {}, []
    for name, said in wanted.items():
        if isinstance(said, int):
            found[name] = said
            continue
        part = part_of(said)
        devices = Fraction(0) if part is None else part * count
        if devices.denominator > 1:
            return None
        found[name] = int(devices)
        if part is None:
            rest.append(name)
    left = count - listed - sum(found.values())
    for name in rest:
        found[name] = left
    return None if left < 0 or (rest and left < 1) else found


def nearest_counts(
    wanted: Mapping[str, int | str], listed: int, count: int
) -> tuple[int | None, int]:
    """The largest count below that works, None where none does, and the least that does above."""
    parts = [part_of(said) for said in wanted.values() if isinstance(said, str)]
    step = lcm(*(part.denominator for part in parts if part is not None))
    below = next(
        (
            n
            for n in range(count - 1, 0, -1)
            if n % step == 0 and devices_by_share(wanted, listed, n)
        ),
        None,
    )
    above = (count // step + 1) * step
    while devices_by_share(wanted, listed, above) is None:
        above += step
    return below, above


def never_whole(wanted: Mapping[str, int | str], listed: int) -> str:
    """Why no number of devices does: shares beyond all, or that leave nothing; else nothing."""
    said = [part_of(each) for each in wanted.values() if isinstance(each, str)]
    total = sum((part for part in said if part is not None), Fraction(0))
    numbers = listed or any(isinstance(each, int) for each in wanted.values())
    if said.count(None) > 1:
        return "two pools have `*`, what the others leave"
    if total > 1:
        return f"shares add up to {total} of the devices"
    if total == 1 and (None in said or numbers):
        return "shares add up to all devices and leave none for the other pools"
    return ""
