"""Running a program that nobody has read: limits on time, memory, files, processes and network.

It is started in the walls of `walls.py`, fed, read and ended here, past its limits by force. With
`limits` in place of walls, native code can get round what is refused: a guard against accidents.
All share the kernel with everything else: a virtual machine is a stronger wall.
This file knows no tests and no rewards.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Literal

from rlflow.errors import RewardError
from rlflow.rewards.cgroup import Home, find
from rlflow.rewards.walls import (
    CHUNK,
    MIB,
    Bounded,
    Isolation,
    Jail,
    Limits,
    Walls,
    jail,
    no_jail,
)

Cut = Literal["", "wall clock", "output"]
AT_ONCE = threading.BoundedSemaphore(os.cpu_count() or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a program ended: its exit code (128 + n for signal n), what it wrote, and why it was cut.

    `cut` is empty for a program that ended by itself.
    """

    code: int
    stdout: str
    stderr: str
    cut: Cut = ""


def run_python(
    program: str,
    stdin: str = "",
    *,
    limits: Limits | None = None,
    isolation: Isolation = "auto",
    cgroup: Bounded = "auto",
) -> Ran:
    """Run a Python program with `stdin` as its input, alone in an empty folder.

    Environment variables are not passed on. As many programs run at once as there are
    processors. Raises RewardError (E284) where the isolation cannot be had here.
    """
    walls = walls_here(isolation, cgroup)
    with AT_ONCE:
        return _jailed(program, stdin, limits or Limits(), walls)


@functools.cache
def walls_here(isolation: Isolation = "auto", bounded: Bounded = "auto") -> Walls:
    """The walls of this machine, tried once by running a program in them.

    `auto` takes bubblewrap where it works, else namespaces, never less. Raises RewardError (E284)
    with what has failed.
    """
    without: list[str] = []
    home = Home(None) if bounded == "none" else find()
    if home.why:
        without.append(f"no cgroup ({home.why})")
    if bounded == "required" and home.path is None:
        raise no_jail(without[0])
    paths = [home.path] if bounded == "required" else [home.path, None]
    for kind in ("bubblewrap", "namespaces") if isolation == "auto" else (isolation,):
        for path in dict.fromkeys(paths):
            walls = Walls(isolation=kind, home=path, without=tuple(without))
            if not (trouble := _trouble(walls)):
                return walls
            without.append(f"no {kind}{' with a cgroup' if path else ''} ({trouble})")
    raise no_jail("; ".join(without))


def _trouble(walls: Walls) -> str:
    """What a program in a jail says where the walls cannot be built; nothing where they can."""
    if walls.isolation == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not on the PATH"
    if walls.isolation == "limits" and walls.home is None:
        return ""
    try:
        ran = _jailed("print(6 * 7)", "", Limits(), walls)
    except RewardError as error:
        return error.findings[0].got or str(error)
    return "" if ran.stdout == "42\n" else ran.stderr.strip() or f"exit code {ran.code}"


def _jailed(
    program: str, stdin: str, limits: Limits, walls: Walls, kept: tuple[int, ...] = ()
) -> Ran:
    """Run a jail to its end or its limits; none of its processes is left."""
    with jail(program, limits, walls) as made:
        ran = _run(made, stdin, limits, kept)
        if not ran.cut:
            made.check(ran.code, ran.stderr)
    return ran


def run_beside(
    program: str,
    other: str,
    stdin: Callable[[int, int], str],
    *,
    limits: Limits | None = None,
    isolation: Isolation = "auto",
    cgroup: Bounded = "auto",
) -> Ran:
    """Run a program while another runs in a jail of its own, which ends with it.

    `stdin` makes the program's input of two descriptors that it gets: one to read what the other
    program prints, one to write what that reads. Raises RewardError (E284) as `run_python`.
    """
    walls = walls_here(isolation, cgroup)
    most = limits or Limits()
    with AT_ONCE, jail(other, most, walls) as beside:
        (asked, asking), (told, telling) = os.pipe(), os.pipe()
        try:
            child = _started(beside, asked, telling, subprocess.DEVNULL)
            os.close(asked)
            os.close(telling)
            try:
                return _jailed(program, stdin(told, asking), most, walls, (told, asking))
            finally:
                ended = child.poll()
                _end(child)
                if ended is not None:
                    beside.check(ended, "")
        finally:
            os.close(told)
            os.close(asking)


def _started(
    made: Jail, stdin: int, stdout: int, stderr: int, kept: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(  # noqa: S603  what the jail is for
            made.command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(*made.inherited, *kept),
            user=made.user,
            group=made.user,
            extra_groups=None if made.user is None else (),
            start_new_session=True,
            env={},
        )
    finally:
        os.close(made.writing)


def _run(made: Jail, stdin: str, limits: Limits, kept: tuple[int, ...]) -> Ran:
    pipe = subprocess.PIPE
    child = _started(made, pipe, pipe, pipe, kept)
    try:
        return _talk(child, stdin.encode(), limits)
    finally:
        _end(child)


def _talk(child: subprocess.Popen[bytes], stdin: bytes, limits: Limits) -> Ran:
    """Feed a program and read what it writes until it ends or has had enough."""
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    until = time.monotonic() + limits.wall
    room = limits.output * MIB
    written = {child.stdout.fileno(): bytearray(), child.stderr.fileno(): bytearray()}
    cut: Cut = ""
    with selectors.DefaultSelector() as events:
        for pipe in written:
            events.register(pipe, selectors.EVENT_READ)
        os.set_blocking(child.stdin.fileno(), False)
        events.register(child.stdin.fileno(), selectors.EVENT_WRITE)
        while set(events.get_map()) & set(written) and not cut:
            ready = events.select(max(0.0, until - time.monotonic()))
            cut = "" if ready else "wall clock"
            for key, _ in ready:
                if key.fd not in written:
                    stdin = _fed(key.fd, stdin)
                    over = not stdin
                else:
                    part = os.read(key.fd, CHUNK)
                    written[key.fd] += part
                    over = not part
                if over:
                    events.unregister(key.fd)
                    _close(child.stdin) if key.fd not in written else None
            if any(len(data) > room for data in written.values()):
                cut = "output"
    code = 128 + signal.SIGKILL
    if not cut:
        try:
            code = child.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            cut = "wall clock"
    out, err = (bytes(data[:room]).decode(errors="replace") for data in written.values())
    return Ran(code=code if code >= 0 else 128 - code, stdout=out, stderr=err, cut=cut)


def _fed(pipe: int, stdin: bytes) -> bytes:
    """Write as much input as there is room for; the rest, none where nobody reads."""
    try:
        return stdin[os.write(pipe, stdin[:CHUNK]) :]
    except BlockingIOError:
        return stdin
    except BrokenPipeError:
        return b""


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the process group; what left the group dies with its namespace."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            _close(pipe)


def _close(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except OSError:
        return
