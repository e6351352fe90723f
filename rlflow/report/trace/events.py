"""Events of the Chrome trace format, and the file that they are written to.

Times go in as seconds and out as microseconds. This file does not know what a run is.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from rlflow.runtime.record.durable import temporary_name

Event: TypeAlias = dict[str, Any]
MICRO = 1e6
# A flow leaves its slice so long before the end, so that a reader finds the slice still open.
BEFORE_END = 1e-6


@dataclass(frozen=True, slots=True)
class Track:
    """A row of the trace: `pid` is the group that it is in, `tid` which one."""

    pid: int
    tid: int


def slice_event(
    track: Track, name: str, category: str, start: float, end: float, said: Event
) -> Event:
    """Something that lasts."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": track.pid,
        "tid": track.tid,
        "ts": micro(start),
        "dur": max(round(micro(end) - micro(start), 3), 0.0),
        "args": said,
    }


def flow_events(
    number: int, category: str, source: tuple[Track, float, float], target: tuple[Track, float]
) -> list[Event]:
    """An arrow from a slice (its track, start and end) to the start of another.

    None where the other began before the first did, as by clocks of two machines.
    """
    (track, start, end), (other, begins) = source, target
    leaves = max(start, min(end - BEFORE_END, begins))
    if begins < leaves:
        return []
    common = {"name": category, "cat": category, "id": number}
    return [
        {"ph": "s", **common, "pid": track.pid, "tid": track.tid, "ts": micro(leaves)},
        {"ph": "f", "bp": "e", **common, "pid": other.pid, "tid": other.tid, "ts": micro(begins)},
    ]


def counter_event(pid: int, name: str, at: float, value: float) -> Event:
    """A number from a time on."""
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": micro(at), "args": {name: value}}


def group_events(pid: int, name: str, place: int) -> list[Event]:
    """The name of a group of tracks, and where it stands."""
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}},
        {
            "ph": "M",
            "name": "process_sort_index",
            "pid": pid,
            "tid": 0,
            "args": {"sort_index": place},
        },
    ]


def track_events(track: Track, name: str) -> list[Event]:
    """The name of a track; tracks stand in the order of their numbers."""
    where = {"ph": "M", "pid": track.pid, "tid": track.tid}
    return [
        {**where, "name": "thread_name", "args": {"name": name}},
        {**where, "name": "thread_sort_index", "args": {"sort_index": track.tid}},
    ]


def rows_of(windows: Sequence[tuple[float, float]]) -> list[int]:
    """A row for each of some windows (start, end), by start, so that none overlap in a row."""
    rows, ends = [], list[float]()
    for start, end in windows:
        row = next((row for row, until in enumerate(ends) if until <= start), len(ends))
        ends[row:] = [end, *ends[row + 1 :]]
        rows.append(row)
    return rows


def micro(seconds: float) -> float:
    """Seconds as microseconds, to the nanosecond."""
    return round(seconds * MICRO, 3)


def write_trace(path: Path, events: Iterable[Event], said: Event) -> int:
    """Write a trace, compressed where the name ends in .gz, whole or not at all; its events.

    `said` is about the whole trace. Raises OSError.
    """
    temporary = temporary_name(path)
    count = 0
    try:
        with _opened(temporary, compressed=path.suffix == ".gz") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for event in events:
                file.write(f"{',' if count else ''}{json.dumps(event)}\n")
                count += 1
            file.write(f'], "otherData": {json.dumps(said)}}}\n')
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


@contextmanager
def _opened(path: Path, *, compressed: bool) -> Iterator[TextIO]:
    if not compressed:
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    # Without a time in its header, so that equal traces are equal files.
    with (
        path.open("wb") as raw,
        gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="utf-8") as text,
    ):
        yield text
