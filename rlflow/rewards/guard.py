"""Runs a program under an audit hook that refuses what a jail without namespaces cannot.

Started as `python guard.py PROGRAM` in the program's folder. Refused are sockets, other
processes, native libraries through ctypes, reading outside Python's own folders and the
working directory, and changing anything outside the latter. A hook cannot be taken away by
Python code, but native code does not ask it: a guard against accidents, not a wall.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

WORK = os.path.realpath(os.getcwd())  # noqa: PTH109  pathlib costs its import
READABLE = tuple(map(os.path.realpath, (sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64")))
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
KINDS = ("socket.", "ctypes.", "subprocess.", "os.exec", "os.fork", "os.spawn", "os.posix_spawn")
NAMES = ("os.system", "os.kill", "os.killpg", "os.startfile", "pty.spawn")
CHANGES = (
    *("os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir"),
    *("os.symlink", "os.truncate", "os.utime", "os.setxattr", "os.removexattr", "os.chflags"),
)
OF_TWO = ("os.link", "os.rename", "os.symlink")
LISTS = ("os.listdir", "os.scandir", "os.chdir", "glob.glob")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    """Raise PermissionError for what the program may not do."""
    if event == "ctypes.dlopen" and arguments[0] is None:
        return
    if event.startswith(KINDS) or event in NAMES:
        raise PermissionError(f"{event} is not allowed here")
    if event == "open":
        path, mode, flags = arguments
        writes = bool(flags & WRITING) if isinstance(flags, int) else mode != "r"
        _require(path, writes)
    elif event in CHANGES:
        for path in arguments[: 2 if event in OF_TWO else 1]:
            _require(path, True)
    elif event in LISTS:
        _require(arguments[0], False)


def _require(path: Any, writes: bool) -> None:
    if isinstance(path, int) or path is None:
        return
    real = os.path.realpath(os.fsdecode(path))
    folders = (WORK,) if writes else (WORK, *READABLE)
    if real not in DEVICES and not any(real == f or real.startswith(f + "/") for f in folders):
        raise PermissionError(f"{real} is not for this program")


if __name__ == "__main__":
    program = sys.argv[1]
    sys.argv = [program]
    sys.path[0] = WORK
    sys.addaudithook(refuse)
    runpy.run_path(program, run_name="__main__")
