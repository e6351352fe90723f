"""Ends what a session left behind: a script in a process of its own, beside the cluster.

Its standard input is a pipe that the controller holds. Once that closes, however the
controller ended, every process that belongs to the session is killed and the session's
directory is removed. A process belongs to it if its environment carries the session's mark,
if it has a file of that directory open, or if such a process started it. Needs the standard
library and Linux's /proc alone; knows nothing of Ray.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "RLFLOW_SESSION"
PROC = Path("/proc")
SECONDS = 20.0
POLL = 0.05


def processes(session: str, directory: Path | None = None, spared: int = 0) -> set[int]:
    """Processes of a session that are alive: by mark, by open file, or started by one of them.

    The caller and the spared one are never among them. The open files are asked as well
    because a process that sets its title may overwrite its environment.
    """
    mark = f"{MARK}={session}".encode()
    parents = {}
    found = set()
    for pid in _pids():
        parent = parent_of(pid)
        if parent is None or pid in (os.getpid(), spared):
            continue
        parents[pid] = parent
        if _is_marked(pid, mark) or (directory is not None and _uses(pid, directory)):
            found.add(pid)
    grown = True
    while grown:
        started = {pid for pid, parent in parents.items() if parent in found} - found
        found |= started
        grown = bool(started)
    return found


def reap(session: str, directory: Path, *, spared: int = 0, seconds: float = SECONDS) -> bool:
    """Kill the session's processes, remove its directory; whether all of them ended in time."""
    end = time.monotonic() + seconds
    left = processes(session, directory, spared)
    while left and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL)
        left = processes(session, directory, spared)
    shutil.rmtree(directory, ignore_errors=True)
    return not left


def main(session: str, directory: str, controller: str) -> int:
    """Wait until the controller lets go of the pipe or is gone, then reap; the exit code."""
    parent = int(controller)
    while os.getppid() == parent:
        ready, _, _ = select.select([sys.stdin], [], [], 1.0)
        if ready and not os.read(sys.stdin.fileno(), 1):
            break
    spared = parent if os.getppid() == parent else 0
    return int(not reap(session, Path(directory), spared=spared))


def _pids() -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]


def parent_of(pid: int) -> int | None:
    """The parent of a living process; None for one that is gone or a zombie."""
    try:
        state, parent, *_ = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(parent)


def _is_marked(pid: int, mark: bytes) -> bool:
    try:
        return mark in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _uses(pid: int, directory: Path) -> bool:
    """Whether a process has a file of the directory open."""
    inside = f"{directory}{os.sep}"
    with contextlib.suppress(OSError), os.scandir(PROC / str(pid) / "fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if str(Path(entry.path).readlink()).startswith(inside):
                    return True
    return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
