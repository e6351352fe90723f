"""Rows on their way from the ranks that made them to those that read them.

A transfer is computed from row numbers: who sends which of its rows to whom. The controller
works with this; it holds no tensor and imports no torch. This file knows no op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlflow.runtime.execute.rows import RowSlice, cuts
from rlflow.scheduler.plan.plan import Spread

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPiece:
    """Rows of one source part that one receiver takes.

    `sender` is None where the receiver holds them itself; else `index` is their place among
    what the sender sends. `source` are places in the source part, None for all of it in order;
    `target` are their places in the receiver's part, None likewise.
    """

    sender: int | None
    index: int
    source: Rows | None
    target: Rows | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A transfer: for every holder what it sends, for every receiver what it takes."""

    sends: Mapping[int, tuple[Rows | None, ...]]
    takes: Mapping[int, tuple[RowPiece, ...]]


def exchange(
    source: Spread, held: Sequence[Rows], target: Spread, wanted: Sequence[Rows]
) -> Exchange:
    """Who sends what, so that every receiver gets each of its rows once.

    `held[i]` and `wanted[j]` are the row numbers of source part i and target part j.
    Receivers that hold a source part themselves get nothing of it sent.
    """
    sends: dict[int, list[Rows | None]] = {device: [] for device in source.devices}
    takes: dict[int, list[RowPiece]] = {device: [] for device in target.devices}
    for cut in [*cuts(list(held), list(wanted)), *_empty(wanted)]:
        holders = source.parts[cut.source]
        receivers = target.parts[cut.target]
        places = _unless_all(cut.taken, len(held[cut.source]))
        into = _unless_all(cut.placed, len(wanted[cut.target]))
        remote = [device for device in receivers if device not in holders]
        sender = holders[cut.target % len(holders)]
        if remote:
            sends[sender].append(places)
        for device in receivers:
            takes[device].append(
                RowPiece(
                    sender=sender if device in remote else None,
                    index=len(sends[sender]) - 1,
                    source=places,
                    target=into,
                )
            )
    return Exchange(
        sends={device: tuple(rows) for device, rows in sends.items()},
        takes={device: tuple(pieces) for device, pieces in takes.items()},
    )


def _empty(wanted: Sequence[Rows]) -> list[RowSlice]:
    """A part without rows still needs its fields: none of the first source part's rows."""
    none = np.empty(0, dtype=np.int64)
    return [
        RowSlice(source=0, target=part, taken=none, placed=none)
        for part, rows in enumerate(wanted)
        if not len(rows)
    ]


def _unless_all(places: Rows, count: int) -> Rows | None:
    """The places, or None where they are all of them in order."""
    whole = len(places) == count and bool((places == np.arange(count)).all())
    return None if whole else places
