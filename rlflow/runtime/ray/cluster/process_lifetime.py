"""How processes share the fate of those that started them: signals of the kernel, and a reaper.

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
from pathlib import Path

from rlflow.runtime.ray.cluster import reaper

PR_SET_PDEATHSIG = 1
LINUX = sys.platform == "linux"


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
