"""A file of lines that is appended to and never larger than it may be: the oldest lines go first.

When half of the room is full, the file becomes the earlier half, in the place of the one before.
Knows bytes and lines, not what they say.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from rlflow.runtime.record.durable import append

# Bytes of both halves together.
ROOM = 128_000_000
DROPPED = "dropped"
READ_SIZE = 1 << 20


class Rolling:
    """Appends lines to `path`; `head` makes the first line of a half that follows others.

    It is told how many lines were dropped so far, which it has under `DROPPED`, in JSON. Lines that
    begin as it does are not counted.
    Not to be shared by threads. Raises OSError where the disk refuses.
    """

    def __init__(self, path: Path, head: Callable[[int], bytes], *, room: int = ROOM) -> None:
        self.path = path
        self._head = head
        self._half = room // 2
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._dropped = dropped_before(path)
        if is_torn(path):
            self.append(b"\n")

    def append(self, lines: bytes) -> None:
        """Append whole lines, handed to the system before this returns."""
        if self._size and self._size + len(lines) > self._half:
            self._turn()
        append(self._file, lines)
        self._size += len(lines)

    def close(self) -> None:
        """Close the file; safe to repeat."""
        self._file.close()

    def _turn(self) -> None:
        earlier = earlier_half(self.path)
        self._dropped += _lines(earlier, self._head(0).partition(b":")[0])
        self.path.replace(earlier)
        opened = self.path.open("ab", buffering=0)
        self._file.close()
        self._file = opened
        head = self._head(self._dropped)
        append(self._file, head)
        self._size = len(head)


def is_torn(path: Path) -> bool:
    """Whether a file has bytes and the last one is not a newline."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def earlier_half(path: Path) -> Path:
    """Where the earlier lines of a file are, once it was full."""
    return path.with_name(f"{path.stem}.earlier{path.suffix}")


def halves(path: Path) -> list[Path]:
    """The files that have the lines of one, in their order; those that are there."""
    return [each for each in (earlier_half(path), path) if each.is_file()]


def dropped_before(path: Path) -> int:
    """How many lines were dropped of a file, by the first line of its halves."""
    found = 0
    for each in halves(path):
        with each.open("rb") as file:
            try:
                said = json.loads(file.readline(READ_SIZE))
            except ValueError:
                continue
        count = said.get(DROPPED) if isinstance(said, dict) else None
        found = max(found, count if isinstance(count, int) else 0)
    return found


def _lines(path: Path, but: bytes) -> int:
    """How many lines a file has that do not begin like this."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(not line.startswith(but) for line in file)
