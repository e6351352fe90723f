"""Running a program that nobody has read: limits on time, memory, files, processes and network.

`namespaces` is the jail of `jail.py`: Linux user, process, mount, network and IPC namespaces,
which need no privilege but may be forbidden to a container. `limits` keeps the limits on time,
memory and file sizes and runs `guard.py` first, which refuses sockets, other processes and
files outside the working directory; it is a guard against accidents, since native code can get
round it. Both share the kernel with everything else: a virtual machine is a stronger wall.
This file knows no tests and no rewards.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from rlflow.errors import Finding, RewardError

Isolation = Literal["namespaces", "limits"]
Cut = Literal["", "wall clock", "output"]
JAIL = Path(__file__).with_name("jail.py")
GUARD = Path(__file__).with_name("guard.py")
FAILED = 120
MIB = 2**20
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
CHUNK = 65536
AT_ONCE = threading.BoundedSemaphore(os.cpu_count() or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a program may use: seconds of processor and of wall clock, MiB of memory and of files.

    `memory` is the address space of each process, `disk` all files together, `output` what is
    read of standard output and error. Past the output the program is ended.
    """

    cpu: float = 5.0
    wall: float = 20.0
    memory: int = 1024
    disk: int = 16
    output: int = 1
    processes: int = 16


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
    isolation: Isolation = "namespaces",
) -> Ran:
    """Run a Python program with `stdin` as its input, alone in an empty folder.

    Environment variables are not passed on. As many programs run at once as there are
    processors. Raises RewardError (E284) where the isolation cannot be had here.
    """
    if isolation == "namespaces":
        require_namespaces()
    with AT_ONCE:
        return _jailed(program, stdin, limits or Limits(), isolation)


@functools.cache
def require_namespaces() -> None:
    """Raise RewardError (E284) unless a jail can be made here, tried once by making one."""
    ran = _jailed("print(6 * 7)", "", Limits(), "namespaces")
    if ran.stdout != "42\n":
        raise _no_jail(ran.stderr or f"exit code {ran.code}")


def _no_jail(why: str) -> RewardError:
    return RewardError(
        Finding(
            code="E284",
            what="programs of a model cannot be isolated here",
            got=why,
            expected="Linux with user namespaces that need no privilege",
            fix='rf.rewards.code(isolation="limits") where the programs are trusted',
        )
    )


@functools.cache
def visible() -> list[str]:
    """The folders and files a jailed Python sees: the system's libraries and its own."""
    stdlib, packages = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
    own = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, stdlib, packages)}
    wanted = [path for path in sorted({*SYSTEM, *own}) if Path(path).exists()]
    return [
        path
        for path in wanted
        if not any(path != other and Path(path).is_relative_to(other) for other in wanted)
    ]


def interpreter() -> str:
    """The path of this Python in a jail: below the real path of its folder, links left out."""
    path, prefix = Path(sys.executable), Path(sys.prefix)
    if not path.is_relative_to(prefix):
        return str(path)
    return str(Path(os.path.realpath(prefix)) / path.relative_to(prefix))


def _config(directory: str, program: str, limits: Limits, namespaces: bool) -> dict[str, Any]:
    """What `jail.py` is told."""
    most = {
        "CPU": max(1, round(limits.cpu)),
        "AS": limits.memory * MIB,
        "FSIZE": limits.disk * MIB,
        "CORE": 0,
        "NOFILE": 64,
    }
    return {
        "namespaces": namespaces,
        "directory": directory,
        "disk": limits.disk * MIB,
        "visible": visible(),
        "program": program,
        "environment": {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
        "limits": most | ({"NPROC": limits.processes} if namespaces else {}),
    }


def _jailed(program: str, stdin: str, limits: Limits, isolation: Isolation) -> Ran:
    """Run a jail to its end or its limits; none of its processes is left."""
    if sys.platform != "linux":
        raise _no_jail(f"the platform is {sys.platform}")
    namespaces = isolation == "namespaces"
    python = [interpreter(), "-I", "-B", *([] if namespaces else [str(GUARD)]), "main.py"]
    with tempfile.TemporaryDirectory(prefix="rlflow-jail-") as directory:
        path = Path(directory) / "jail.json"
        path.write_text(json.dumps(_config(directory, program, limits, namespaces)))
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        jail = [sys.executable, "-I", "-S", str(JAIL), str(path), str(writing)]
        try:
            ran = _run([*jail, *python], stdin, limits, writing)
            trouble = _report(reading) if ran.code == FAILED else ""
        finally:
            os.close(reading)
    if trouble:
        raise _no_jail(trouble)
    return ran


def _report(pipe: int) -> str:
    try:
        return os.read(pipe, CHUNK).decode(errors="replace")
    except BlockingIOError:
        return ""


def _run(command: list[str], stdin: str, limits: Limits, report: int) -> Ran:
    try:
        child = subprocess.Popen(  # noqa: S603  what the jail is for
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(report,),
            start_new_session=True,
            env={},
        )
    finally:
        os.close(report)
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
