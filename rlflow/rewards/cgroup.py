"""Control groups of version 2: bounds on memory and tasks that the kernel itself keeps.

A group is made below the nearest group of this process that it may divide, holds nothing that
was there before, and goes with all its processes. Its maker holds a lock on it, which the system
drops with the maker: the next one removes what a killed one has left. This file knows no jails.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import time
from dataclasses import dataclass
from pathlib import Path

NEEDED = ("memory", "pids")
PREFIX = "rlflow-jail-"
PATIENCE = 1.0
LOOK = 0.005


@dataclass(frozen=True, slots=True)
class Home:
    """Where groups can be made; without a path, why nowhere."""

    path: Path | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A group that a process enters by writing 0 to `joining`; `events` counts what was killed."""

    path: Path
    lock: int
    joining: int
    events: int

    def close(self) -> None:
        """Kill what is in it and remove it."""
        _remove(self.path)
        for descriptor in (self.lock, self.joining, self.events):
            os.close(descriptor)


def find(process: Path = Path("/proc/self")) -> Home:
    """The nearest group, from a process's own upwards, that may be divided and be entered."""
    try:
        own, mounted = _own(process), _mounted(process)
    except OSError as error:
        return Home(None, str(error))
    if own is None or mounted is None:
        return Home(None, "no cgroup v2 is mounted here")
    root, point = mounted
    try:
        path = point / own.relative_to(root)
    except ValueError:
        return Home(None, f"the process's cgroup {own} lies outside of {point}")
    why = ""
    for each in (path, *path.parents):
        if not each.is_relative_to(point):
            break
        try:
            _divide(each)
        except OSError as error:
            why = why or f"{each}: {error.strerror or error}"
            continue
        return Home(each)
    return Home(None, why)


def _own(process: Path) -> Path | None:
    """The group of version 2 of a process, as the kernel writes it."""
    lines = (process / "cgroup").read_text().splitlines()
    return next((Path(line[3:]) for line in lines if line.startswith("0::")), None)


def _mounted(process: Path) -> tuple[Path, Path] | None:
    """The group that is mounted, and where."""
    for line in (process / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            root, point = before.split()[3:5]
            return Path(_plain(root)), Path(_plain(point))
    return None


def _plain(text: str) -> str:
    """A path of mountinfo, in which blanks are written as octal numbers."""
    return text.encode().decode("unicode_escape")


def _divide(path: Path) -> None:
    """Let groups below a group have bounds; OSError where this process may not."""
    offered = (path / "cgroup.controllers").read_text().split()
    if missing := [name for name in NEEDED if name not in offered]:
        raise OSError(f"no controller {' and '.join(missing)} of version 2")
    for file in (path, path / "cgroup.procs"):
        if not os.access(file, os.W_OK):
            raise PermissionError(f"not writable for user {os.geteuid()}")
    control = path / "cgroup.subtree_control"
    if set(NEEDED) - set(control.read_text().split()):
        control.write_text(" ".join(f"+{name}" for name in NEEDED))


def make(home: Path, *, memory: int, tasks: int) -> ControlGroup:
    """A new group with bounds, in bytes and in tasks. OSError where the kernel refuses."""
    remove_stale_groups(home)
    path, lock = _made(home)
    bounds = {"memory.max": memory, "memory.swap.max": 0, "memory.oom.group": 1, "pids.max": tasks}
    opened = [lock]
    try:
        for name, value in bounds.items():
            # Without swap there is no file for it.
            if name != "memory.swap.max" or (path / name).exists():
                (path / name).write_text(str(value))
        opened.append(os.open(path / "cgroup.procs", os.O_WRONLY))
        opened.append(os.open(path / "memory.events", os.O_RDONLY))
        return ControlGroup(path, *opened)
    except BaseException:
        _remove(path)
        for descriptor in opened:
            os.close(descriptor)
        raise


def _made(home: Path) -> tuple[Path, int]:
    """A new group and the lock on it; another name where somebody swept it before the lock."""
    while True:
        path = home / f"{PREFIX}{secrets.token_hex(8)}"
        path.mkdir()
        if (lock := _locked(path)) is not None:
            return path, lock


def _locked(path: Path) -> int | None:
    """A lock on a group that is there; None where it has another or is gone."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(lock).st_ino:
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None


def remove_stale_groups(home: Path) -> None:
    """Remove the groups whose makers are gone; another user's stay."""
    for path in home.glob(f"{PREFIX}*"):
        with contextlib.suppress(PermissionError):
            if (lock := _locked(path)) is not None:
                _remove(path)
                os.close(lock)


def _remove(path: Path) -> None:
    """Kill what is in a group, and remove it once that has ended; else the next sweep does."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        _kill(path)
        try:
            path.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(LOOK)
        else:
            return


def _kill(path: Path) -> None:
    """Kill all processes of a group at once, one by one before Linux 5.14."""
    with contextlib.suppress(OSError):
        if (path / "cgroup.kill").exists():
            (path / "cgroup.kill").write_text("1")
            return
        for number in (path / "cgroup.procs").read_text().split():
            os.kill(int(number), signal.SIGKILL)
