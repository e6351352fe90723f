"""How processes share the fate of those that started them: by the kernel, a reaper, last words.

Works on Linux; elsewhere Ray's own means have to do. Knows processes and files, no cluster.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rlflow.runtime.ray.cluster import reaper

PR_SET_PDEATHSIG = 1
LINUX = sys.platform == "linux"
OVER = b"\0"
# Says what comes on its standard input, unless that ends with OVER.
SAYING = (
    "import sys; said = sys.stdin.buffer.read(); "
    f"said.endswith({OVER!r}) or sys.stderr.buffer.write(said)"
)


def die_with_parent() -> None:
    """Have the kernel kill this process as soon as the one that started it is dead.

    The signal also reaches a process that is stopped or holds the interpreter's lock.
    Children are not covered: each has to call it. Does nothing but on Linux.
    """
    if not LINUX:
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def session_processes(session: str, directory: Path | None = None) -> set[int]:
    """Processes on this machine that belong to a session; none where that cannot be known."""
    return reaper.processes(session, directory) if LINUX else set()


@contextlib.contextmanager
def a_word_if_gone(text: str) -> Iterator[None]:
    """Have another process say `text` on standard error should this one end within, by any means.

    Ray ends a process by `_exit` whose own part of the cluster dies while it connects, so that
    nothing here is asked.
    """
    with subprocess.Popen(  # noqa: S603  our own line
        [sys.executable, "-I", "-S", "-c", SAYING],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    ) as other:
        assert other.stdin is not None
        with contextlib.suppress(OSError):
            other.stdin.write(text.encode())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                other.stdin.write(OVER)


class Reaper:
    """A process that ends what is left of a session once this one is gone or asks for it."""

    def __init__(self, session: str, directory: Path) -> None:
        self._session = session
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        if LINUX:
            words = (session, str(directory), str(os.getpid()))
            self._process = subprocess.Popen(  # noqa: S603  our own script
                [sys.executable, "-I", "-S", reaper.__file__, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def finish(self, seconds: float) -> bool:
        """Have it reap, and wait for that; whether every process of the session has ended."""
        if self._process is None:
            shutil.rmtree(self._directory, ignore_errors=True)
            return True
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process.wait(timeout=seconds) == 0:
                return True
        self._process.kill()
        self._process.wait()
        return reaper.reap(self._session, self._directory, spared=os.getpid(), seconds=seconds)
