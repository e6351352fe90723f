"""Removing what an engine has left: files of shared memory, and where its worker is gone all else.

Engines are ended by SIGKILL, at which none of their own cleaning up runs. A file of shared memory
is an engine's where it came after the engine's start and a process of its group has held it.

It needs the standard library alone, and starts no Python.
"""

from __future__ import annotations

import contextlib
import os

PREFIX = "rlflow-"
# Variables that name a directory: of temporary files, and of the model that an engine reads.
MADE = ("TMPDIR", "RLFLOW_MODEL_DIRECTORY")
SHARED = "/dev/shm"  # noqa: S108
# Lists of names in an engine's directory of temporary files: what was there before it, what is its.
BEFORE_FILE, HELD_FILE = "shared-memory-before", "shared-memory-held"


def sweep() -> None:
    """Have the files and directories of this engine removed, by a process that outlives this group.

    Only such directories as a worker has made: their names say so.
    """
    found = [os.environ.get(name, "") for name in MADE]
    made = [directory for directory in found if directory.rpartition("/")[2].startswith(PREFIX)]
    if made:
        note_held(found[0], os.getpgrp())
        files = [f"{SHARED}/{name}" for name in _names_in(found[0], HELD_FILE) or ()]
        words = ["rm", "-rf", "--", *made, *sorted(files)]
        os.posix_spawnp("rm", words, {"PATH": os.environ.get("PATH", "")}, setsid=True)


def note_before(directory: str) -> None:
    """Keep what shared memory there is before an engine starts, in the engine's directory."""
    _keep(directory, BEFORE_FILE, shared_names())


def note_held(directory: str, group: int) -> None:
    """Keep what new shared memory the processes of an engine's group hold, before they end."""
    before, known = _names_in(directory, BEFORE_FILE), _names_in(directory, HELD_FILE)
    if before is None:  # the directory is another's, or removed
        return
    new = shared_names() - before - (known or set())
    held = _held_by(group, new) if new else set()
    if held:
        _keep(directory, HELD_FILE, held | (known or set()))


def remove_held(directory: str) -> None:
    """Remove the shared memory that an engine's group has held, once the group is gone."""
    for name in _names_in(directory, HELD_FILE) or ():
        with contextlib.suppress(OSError):
            os.unlink(f"{SHARED}/{name}")  # noqa: PTH108


def shared_names() -> set[str]:
    """The names of files of shared memory; none where there is no such directory."""
    with contextlib.suppress(OSError):
        return set(os.listdir(SHARED))  # noqa: PTH208
    return set()


def _held_by(group: int, names: set[str]) -> set[str]:
    """Those of some names of shared memory whose file a process of a group has open or mapped."""
    files, held = {}, set()
    for name in names:
        with contextlib.suppress(OSError):
            files[os.stat(f"{SHARED}/{name}").st_ino] = name  # noqa: PTH116
    for pid in os.listdir("/proc"):  # noqa: PTH208
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(pid)) == group:
                held |= _files_of(pid)
    return {name for number, name in files.items() if number in held}


def _files_of(pid: str) -> set[int]:
    """The files in shared memory that a process has mapped or open, by their numbers.

    Not by their names: a semaphore is mapped under another one than it is given.
    """
    found = set()
    with open(f"/proc/{pid}/maps", errors="replace") as lines:  # noqa: PTH123
        found |= {int(line.split(maxsplit=5)[4]) for line in lines if f" {SHARED}/" in line}
    for descriptor in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
        link = f"/proc/{pid}/fd/{descriptor}"
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith(f"{SHARED}/"):  # noqa: PTH115
                found.add(os.stat(link).st_ino)  # noqa: PTH116
    return found


def _names_in(directory: str, file: str) -> set[str] | None:
    """The names that a list has; None where there is no list."""
    with contextlib.suppress(OSError), open(f"{directory}/{file}", "rb") as names:  # noqa: PTH123
        return {os.fsdecode(name) for name in names.read().split(b"\0") if name}
    return None


def _keep(directory: str, file: str, names: set[str]) -> None:
    """Write a list of names as a whole."""
    # Several may at once: the guardian and its engine.
    draft = f"{directory}/{file}.{os.getpid()}"
    with contextlib.suppress(OSError):
        with open(draft, "wb") as made:  # noqa: PTH123
            made.write(b"\0".join(os.fsencode(name) for name in sorted(names)))
        os.replace(draft, f"{directory}/{file}")  # noqa: PTH105
