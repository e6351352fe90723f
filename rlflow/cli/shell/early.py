"""What the command `rlflow` needs before it is imported: an end by signals, and three streams.

A signal ends it at once, with 130; without this it would die of the signal. Where it was started
with a stream closed, the next file that is opened, the lock of a run perhaps, would be that stream:
it leads to nowhere instead. What standard error does not take, of a terminal that is gone or a disk
that is full, is lost, and is no error of the command; nor are results that nobody reads, after
`| head`. A program that imports rlflow keeps its own
ways.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Buffer

STOPPED = 130


def _is_command() -> bool:
    """Whether this process is the command line: its script, or `python -m rlflow.cli.main`."""
    started = sys.argv[0] if sys.argv else ""
    return started.endswith("/rlflow") or (started == "-m" and "rlflow.cli.main" in sys.orig_argv)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"stopped at once; nothing had begun\n")
    os._exit(STOPPED)


class _Heard(io.FileIO):
    """A descriptor that takes what nobody hears: what it does not take by `lost` is no error."""

    lost: type[OSError] = OSError

    def write(self, data: Buffer, /) -> int:
        whole = rest = memoryview(data).cast("B")
        while rest:
            try:
                rest = rest[super().write(rest) or 0 :]
            except self.lost:
                break
        return len(whole)


class _Read(_Heard):
    """One of results: that nobody reads them any further is no error, that they are lost is."""

    lost = BrokenPipeError


def _open_streams() -> None:
    """Have descriptors 0, 1 and 2 be open, and the streams that belong to the last two."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this one
    sys.stdout = _stream(_Read(1, "w", closefd=False), like=sys.stdout)
    sys.stderr = _stream(_Heard(2, "w", closefd=False), like=sys.stderr)


def _stream(raw: io.FileIO, like: TextIO | None) -> TextIO:
    """Straight to it, as of `python -u`: a buffer refuses what a signal says in mid-write."""
    return io.TextIOWrapper(
        raw,
        encoding=getattr(like, "encoding", "utf-8"),
        errors=getattr(like, "errors", "backslashreplace"),
        write_through=True,
    )


# What stops a command. SIGHUP is of a terminal that is closed, SIGUSR1 of a scheduler that warns,
# SIGXCPU of seconds of processors that are used up (`ulimit -t`).
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)


def on_stops(handler: Callable[[int, FrameType | None], None]) -> None:
    """Handle what stops a command, but for what this process ignores from its start.

    A shell has what it starts in the background ignore Ctrl-C, and `nohup` SIGHUP: that stays.
    """
    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


if _is_command():
    on_stops(_end)
    _open_streams()
