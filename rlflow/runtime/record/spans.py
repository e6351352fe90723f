"""What really happened and when: one span per action instance, read back and added up.

Holds the span, its log (JSON lines, one file per process), and the totals that `report` prints
beside the plan's predictions. This file does not know what an action does. Times are seconds on a
monotonic clock since the log was opened; a line at its top says when that was, so that files of
several processes share one axis.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import ClassVar, Self, TypeAlias

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rlflow.errors import Finding, RunDirError, RunError
from rlflow.runtime.record.durable import disk_errors, fault, register_faults
from rlflow.runtime.record.lines.rolling import DROPPED, ROOM, Rolling, dropped_before

register_faults("spans:write")
# How a line begins that is no span, and by how many seconds one origin is later than another.
ORIGIN, LEAST = b'{"origin"', 1e-3

Clock: TypeAlias = Callable[[], float]
Interval: TypeAlias = tuple[float, float]


# Types are strict: a damaged figure is no figure.
_LINE_FORM = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One action instance: (action, iteration, chunk) on its devices, in one process.

    `start` and `end` in seconds since the run's start; `predicted` is the plan's figure in
    seconds, None where it had none; `bytes` what it moved, None where nothing moves; `ok`
    is False if it raised.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _LINE_FORM

    action: str
    node: str
    kind: str
    iteration: int
    chunk: int
    pool: str
    devices: tuple[int, ...]
    start: float
    end: float
    predicted: float | None
    bytes: int | None
    process: str
    ok: bool

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


SPAN_FIELDS = tuple(field.name for field in fields(Span))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """When the spans of the lines below it count from, seconds since 1970.

    `dropped` lines before it were too many to be kept.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _LINE_FORM

    origin: float
    process: str
    dropped: int = 0


_LINE: TypeAdapter[Span | _Origin] = TypeAdapter(Span | _Origin)


class SpanLog:
    """Appends spans to one file of this process; any thread may call it.

    `process` is the name under which other processes' spans are told apart; `clock` is
    monotonic, `wall` is seconds since 1970. A resumed run appends to the same file under a new
    origin, later than the spans before it whatever the clock says. Of the file, and of the earlier
    one beside it, the last `room` bytes are kept. Where the disk refuses, opening raises
    `RunDirError` and a line raises `RunError`.
    """

    def __init__(
        self,
        path: Path,
        *,
        process: str,
        clock: Clock = time.perf_counter,
        wall: Clock = time.time,
        room: int = ROOM,
    ) -> None:
        self.path = path
        self.process = process
        self._clock = clock
        self._lock = threading.Lock()
        with disk_errors(RunDirError, f"open {path}", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._origin = _later(path, wall())
            self._file = Rolling(path, self._said, room=room)
        self._start = clock()
        try:
            self._append(self._said())
        except RunError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def now(self) -> float:
        """Seconds since this log was opened, monotonic."""
        return self._clock() - self._start

    def record(self, span: Span) -> None:
        """Append one span; it is handed to the system before this returns."""
        row = {name: getattr(span, name) for name in SPAN_FIELDS}
        self._append(f"{json.dumps(row)}\n".encode())

    def close(self) -> None:
        """Close the file; safe to repeat."""
        self._file.close()

    def _said(self, dropped: int = 0) -> bytes:
        """The line that says when the clock began, and how many lines are no longer before it."""
        said: dict[str, object] = {"origin": self._origin, "process": self.process}
        return f"{json.dumps(said | ({DROPPED: dropped} if dropped else {}))}\n".encode()

    def _append(self, line: bytes) -> None:
        with self._lock, disk_errors(RunError, f"write {self.path}", self.path.parent):
            self._file.append(line)
            fault("spans:write")


def _later(path: Path, wall: float) -> float:
    """The origin of a session: the time, or where the clock was set back the end of the file."""
    last: _Origin | None = None
    before = line = b""
    if path.is_file():
        with path.open("rb") as file:
            for each in file:
                before, line = line, each
                row = _parse(line) if line.startswith(ORIGIN) else None
                last = row if isinstance(row, _Origin) else last
    if last is None:
        return wall
    row = _parse(line) or _parse(before)  # The last line may be torn.
    return max(wall, last.origin + LEAST + (row.end if isinstance(row, Span) else 0.0))


def dropped_spans(directory: Path) -> int:
    """How many spans of a run are no longer kept. Raises RunDirError as `read_spans` does."""
    with disk_errors(RunDirError, f"read {directory}", directory):
        files = [path for path in directory.glob("*.jsonl") if not path.stem.endswith(".earlier")]
        return sum(dropped_before(path) for path in files)


def read_spans(directory: Path) -> list[Span]:
    """The spans of all processes on one time axis that starts at 0, by start.

    What a resumed run did again supersedes what the dead one had done; what one run did several
    times for an iteration, as while its pipeline fills, is all there. A line torn by a
    kill is left out; any other damaged line raises `RunDirError`, as an unreadable file does.
    """
    sessions: list[tuple[float, Span]] = []
    with disk_errors(RunDirError, f"read {directory}", directory):
        for path in sorted(directory.glob("*.jsonl")):
            sessions.extend(_read_file(path))
    if not sessions:
        return []
    first = min(origin for origin, _ in sessions)
    latest: dict[tuple[str, str, int, int], float] = {}
    for origin, span in sessions:
        key = _instance(span)
        latest[key] = max(latest.get(key, origin), origin)
    moved = [
        _shift(span, origin - first)
        for origin, span in sessions
        if origin == latest[_instance(span)]
    ]
    return sorted(moved, key=lambda span: (span.start, span.end, span.process, span.action))


def began_at(directory: Path) -> float:
    """The time 0 of `read_spans`, in seconds since 1970; 0 where there is no span.

    Raises RunDirError as `read_spans` does.
    """
    with disk_errors(RunDirError, f"read {directory}", directory):
        files = sorted(directory.glob("*.jsonl"))
        return min((origin for path in files for origin, _ in _read_file(path)), default=0.0)


def _instance(span: Span) -> tuple[str, str, int, int]:
    return span.process, span.action, span.iteration, span.chunk


def _shift(span: Span, seconds: float) -> Span:
    return replace(span, start=span.start + seconds, end=span.end + seconds)


def _read_file(path: Path) -> Iterator[tuple[float, Span]]:
    """Each span of a file with the wall-clock origin of its times."""
    lines = path.read_bytes().splitlines()
    rows = [_parse(line) for line in lines]
    origin = 0.0
    for number, row in enumerate(rows):
        if row is None and all(
            isinstance(after, _Origin) for after in rows[number + 1 : number + 2]
        ):
            continue
        if row is None or (number == 0 and isinstance(row, Span)):
            raise RunDirError(
                Finding(
                    code="E731",
                    what=f"line {number + 1} of {path} is damaged",
                    got=repr(lines[number][:60].decode(errors="replace")),
                    fix=f"sed -i {number + 1}d {path}",
                )
            )
        if isinstance(row, Span):
            yield origin, row
        else:
            origin = row.origin


def _parse(line: bytes) -> Span | _Origin | None:
    """What a line is; None where it is neither."""
    try:
        return _LINE.validate_json(line)
    except ValidationError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Spans of one action, or of one kind, added up.

    Seconds; `median` per span, `predicted` the median prediction, `share` of the run's time
    (shares add up to more than 1 where actions overlap).
    """

    name: str
    count: int
    total: float
    median: float
    predicted: float | None
    share: float
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Where the time of a run went; `wall` counts what lies within iterations, in seconds.

    `actions` and `kinds` have the largest total first; `idle` is the share of `wall` in
    which a device ran nothing.
    """

    wall: float
    iterations: int
    actions: tuple[Total, ...]
    kinds: tuple[Total, ...]
    idle: Mapping[int, float]


def summarise(spans: Iterable[Span]) -> Summary:
    """Add up spans per action, per kind and per device; all zero without spans."""
    every = list(spans)
    iterations: dict[int, list[Span]] = defaultdict(list)
    devices: dict[int, list[Interval]] = defaultdict(list)
    for span in every:
        iterations[span.iteration].append(span)
        for device in span.devices:
            devices[device].append((span.start, span.end))
    windows = [
        (min(span.start for span in turn), max(span.end for span in turn))
        for turn in iterations.values()
    ]
    wall = covered(windows)
    return Summary(
        wall=wall,
        iterations=len(iterations),
        actions=_totals(every, wall, lambda span: span.action),
        kinds=_totals(every, wall, lambda span: span.kind),
        idle={device: 1 - _share(covered(busy), wall) for device, busy in sorted(devices.items())},
    )


def covered(intervals: Iterable[Interval]) -> float:
    """The length of the union of intervals."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _share(seconds: float, wall: float) -> float:
    return seconds / wall if wall > 0 else 0.0


def _totals(
    spans: Sequence[Span], wall: float, name_of: Callable[[Span], str]
) -> tuple[Total, ...]:
    named: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        named[name_of(span)].append(span)
    totals = [_total(name, group, wall) for name, group in named.items()]
    return tuple(sorted(totals, key=lambda row: (-row.total, row.name)))


def _total(name: str, spans: Sequence[Span], wall: float) -> Total:
    seconds = sum(span.seconds for span in spans)
    predicted = [span.predicted for span in spans if span.predicted is not None]
    return Total(
        name=name,
        count=len(spans),
        total=seconds,
        median=median(span.seconds for span in spans),
        predicted=median(predicted) if predicted else None,
        share=_share(seconds, wall),
        failed=sum(not span.ok for span in spans),
    )
