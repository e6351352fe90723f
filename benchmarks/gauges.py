"""What a process measures of itself: seconds, its own CPU time, and resident memory.

Standard library only, so that every side of a comparison may import it. CPU time is that of
all threads of this process, those of the Ray core included; processes it started do not
count. Times are seconds, memory is MB of 10^6 bytes. Nothing here knows what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"


@dataclass(slots=True)
class Turn:
    """One turn through a chain of calls.

    `seconds` on the wall clock, `cpu` of this process, `submitting`: on the wall clock, how
    long calls kept the thread that made them before they returned.
    """

    seconds: float = 0.0
    cpu: float = 0.0
    submitting: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it the turn is under way."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.seconds += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu

    @contextmanager
    def submits(self) -> Iterator[None]:
        """Within it a call is being made."""
        began = time.perf_counter()
        yield
        self.submitting += time.perf_counter() - began


def status(name: str, text: str) -> float:
    """A field of /proc/PID/status in MB; KeyError where there is none."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024 / 1e6
    raise KeyError(name)


def resident() -> float:
    """Memory that this process holds, shared memory that it has read or written included."""
    return status("VmRSS", STATUS.read_text(encoding="ascii"))


def peak() -> float:
    """The most that it has held since `forget_peak`."""
    return status("VmHWM", STATUS.read_text(encoding="ascii"))


def forget_peak() -> None:
    """Let the peak begin at what is held at this moment (Linux)."""
    CLEAR.write_text(RESET_PEAK, encoding="ascii")
