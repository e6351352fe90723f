"""What users' functions print: lines for a run's log, each with the action that printed it.

Standard output is for results alone. This file holds the stream that takes its place, and who is
acting in which thread; it does not know where lines are kept.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

from rlflow.errors import printable
from rlflow.runtime.record.durable import open_private

Line = tuple[str, str]
FILE = "printed.txt"
# Bytes of that file, and letters of a line in it: a function may print without an end.
LARGEST = 64 * 2**20
LONGEST = 64 * 2**10

_ACTING: ContextVar[str] = ContextVar("rlflow_acting", default="")
_ACTIVE: list[str] = []


@contextlib.contextmanager
def printed_by(action: str) -> Iterator[None]:
    """What is printed inside is the action's, in the threads too that asyncio starts."""
    before = _ACTING.set(action)
    _ACTIVE.append(action)
    try:
        yield
    finally:
        _ACTIVE.remove(action)
        _ACTING.reset(before)


def actor() -> str:
    """Who acts here; in a thread of a user's own the only action there is, or nobody known."""
    active = list(_ACTIVE)
    return _ACTING.get() or (active[0] if len(active) == 1 else "")


class Printed(io.TextIOBase):
    """A stream that hands on whole lines with their action; lines of threads do not mix."""

    encoding = "utf-8"

    def __init__(self, keep: Callable[[Line], None]) -> None:
        super().__init__()
        self._keep = keep
        self._begun: dict[int, Line] = {}
        self._lock = threading.RLock()

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, text: str) -> int:
        """Take text; what ends in no line waits for the rest of it."""
        own = threading.get_ident()
        with self._lock:
            action, begun = self._begun.pop(own, (actor(), ""))
            *lines, rest = (begun + text).split("\n")
            for line in lines:
                self._keep((action, _cut(line)))
            if len(rest) > LONGEST:
                self._keep((action, _cut(rest)))
            elif rest:
                self._begun[own] = (actor() if lines else action, rest)
        return len(text)

    def keep(self, lines: Iterable[Line]) -> None:
        """Take whole lines that another process has printed."""
        for line in lines:
            self._keep(line)

    def finish(self) -> None:
        """Hand on what never ended in a line."""
        with self._lock:
            for line in self._begun.values():
                self._keep(line)
            self._begun.clear()


def _cut(line: str) -> str:
    """A line as it is kept, with how much of it is not."""
    more = len(line) - LONGEST
    return line if more <= 0 else f"{line[:LONGEST]}... ({more:,} more letters)"


@contextlib.contextmanager
def printing(keep: Callable[[Line], None]) -> Iterator[None]:
    """Hand on what is printed inside; what native code and programs print is standard error's."""
    stream, before = Printed(keep), sys.stdout
    before.flush()
    with _errors_instead():
        sys.stdout = stream
        try:
            yield
        finally:
            sys.stdout = before
            stream.finish()


def printed_apart(log: PrintedLog, wanted: bool) -> contextlib.AbstractContextManager[None]:
    """As `printing`, where it is wanted; a program's own standard output is left to it."""
    return printing(log.keep) if wanted else contextlib.nullcontext()


def replay_lines(lines: Iterable[Line]) -> None:
    """Hand on what another process has printed, where somebody listens."""
    if isinstance(sys.stdout, Printed):
        sys.stdout.keep(lines)


def collected() -> list[Line]:
    """From now on, what this process prints: a list that grows."""
    lines: list[Line] = []
    sys.stdout = Printed(lines.append)
    return lines


@contextlib.contextmanager
def _errors_instead() -> Iterator[None]:
    """Descriptor 1 as descriptor 2."""
    try:
        kept = os.dup(1)
    except OSError:  # there is none
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


class PrintedLog:
    """The file of a run that keeps printed lines; it is made with the first one.

    It is for its user alone, and no larger than `LARGEST`: what is printed beyond that is lost.
    """

    def __init__(self, path: Path, told: Callable[[str], None]) -> None:
        self._path = path
        self._told = told
        self._lock = threading.Lock()
        self._first, self._full = True, False

    def keep(self, line: Line) -> None:
        """Append a line; the first one of a run is told, and the last that there is room for."""
        action, text = line
        with self._lock:
            if self._first:
                self._told(f"what functions print is in {self._path}")
                self._first = False
            if self._full:
                return
            try:
                with open_private(self._path) as file:
                    file.write(f"{action or '?'}: {printable(text)}\n")
                    self._full = file.tell() > LARGEST
                    if self._full:
                        file.write(f"?: more than {LARGEST:,} bytes: what follows is not kept\n")
            except OSError as error:  # a full disk is no error of the function that prints
                self._full = True
                self._told(f"what functions print is not kept any more: {error}")
