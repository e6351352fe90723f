"""What stands around a program that nobody has read, and the command that starts it in there.

`bubblewrap` is the wall of the program `bwrap`, kept by others; `namespaces` the one of `jail.py`.
`limits` is none: it runs `guard.py` before the program. A control group of version 2 comes in
addition wherever one can be had. This file tries nothing out and runs nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlflow.errors import Finding, RewardError
from rlflow.rewards import cgroup
from rlflow.strict import require

# What the weakest of them is, and what it does not hold.
UNHELD = (
    "an audit hook and limits, no wall: native code gets round them to files that this user may "
    "read or write, to processes of this user and to the network"
)
Isolation = Literal["auto", "bubblewrap", "namespaces", "limits"]
Bounded = Literal["auto", "required", "none"]
JAIL = Path(__file__).with_name("jail.py")
GUARD = Path(__file__).with_name("guard.py")
PREFIX = "rlflow-jail-"
FAILED = 120
MIB = 2**20
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
CHUNK = 65536
SLACK = 1.0  # the jail ends a program by itself only where nobody outside does
INSIDE, NOBODY = 1000, 65534


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a program may use: seconds of processor and wall clock, MiB of memory and of files.

    `memory` is the address space of each process, `disk` that of all files together, `output` what
    is read of standard output and of standard error. A program that writes more is killed.
    """

    cpu: float = 5.0
    wall: float = 20.0
    memory: int = 1024
    disk: int = 16
    output: int = 1
    processes: int = 16

    def __post_init__(self) -> None:
        require(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Walls:
    """The walls that were found to work, and why others are not among them.

    `home` is where control groups are made; without one the jail itself looks at memory.
    """

    isolation: Isolation
    home: Path | None = None
    without: tuple[str, ...] = ()

    def describe(self) -> str:
        """One line for people."""
        names = {"limits": UNHELD, "namespaces": "namespaces"}
        found = [names.get(self.isolation, self.isolation)]
        if self.isolation == "limits" and os.geteuid() == 0:
            found.append("this user is root, who may do all of that: run as another")
        if self.home:
            found.append(f"a cgroup below {self.home}")
        return "; ".join([" and ".join(found), *self.without])


def no_jail(why: str) -> RewardError:
    """The error of a machine that cannot isolate a program."""
    return RewardError(
        Finding(
            code="E284",
            what="programs of a model cannot be isolated here",
            got=why,
            expected="Linux with user namespaces that need no privilege, or bubblewrap",
            fix='rf.rewards.code(isolation="limits") where the programs are trusted',
        )
    )


@functools.cache
def visible_paths() -> list[str]:
    """The folders and files a jailed Python sees: the system's libraries and its own."""
    stdlib, packages = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
    own = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, stdlib, packages)}
    wanted = [path for path in sorted({*SYSTEM, *own}) if Path(path).exists()]
    return [
        path
        for path in wanted
        if not any(path != other and Path(path).is_relative_to(other) for other in wanted)
    ]


def _interpreter() -> str:
    """The path of this Python in a jail: below the real path of its folder, links left out."""
    path, prefix = Path(sys.executable), Path(sys.prefix)
    if not path.is_relative_to(prefix):
        return str(path)
    return str(Path(os.path.realpath(prefix)) / path.relative_to(prefix))


@dataclass(frozen=True, slots=True)
class Jail:
    """A jail that can be started: its command, what it inherits, and what it says of its trouble.

    `user` is who starts it, where that is not the user of this process.
    """

    command: list[str]
    reading: int
    writing: int
    inherited: tuple[int, ...]
    user: int | None

    def check(self, code: int, said: str) -> None:
        """Raise RewardError (E284) where a jail that has ended had failed, or never begun."""
        try:
            report = os.read(self.reading, CHUNK).decode(errors="replace")
        except BlockingIOError:
            raise no_jail(said.strip() or f"exit code {code}") from None
        if code == FAILED and (trouble := report.strip()):
            raise no_jail(trouble)


@contextlib.contextmanager
def jail_folder() -> Iterator[str]:
    """A temporary folder that is held by a lock, and is gone afterwards.

    Those of processes that were killed are held by nobody: the first of a process removes them.
    """
    sweep_jails(tempfile.gettempdir())
    while True:
        made = tempfile.TemporaryDirectory(prefix=PREFIX)
        with made as directory, contextlib.suppress(FileNotFoundError), _opened(directory) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if Path(directory).exists():  # else another process has swept before it was locked
                yield directory
                return


@functools.cache
def sweep_jails(parent: str) -> None:
    """Remove the folders of this user's jails in `parent` that nobody holds any more."""
    for path in Path(parent).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), _opened(str(path)) as lock:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)


@contextlib.contextmanager
def _opened(directory: str) -> Iterator[int]:
    """A folder's descriptor; OSError where it is none, or a link."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def jail(program: str, limits: Limits, walls: Walls) -> Iterator[Jail]:
    """A jail for a program; its folder and its control group are gone afterwards."""
    if sys.platform != "linux":
        raise no_jail(f"the platform is {sys.platform}")
    wrapped = walls.isolation == "bubblewrap"
    with contextlib.ExitStack() as held:
        directory = held.enter_context(jail_folder())
        group = _group(walls.home, limits) if walls.home else None
        if group:
            held.callback(group.close)
        told = _told("/sandbox" if wrapped else directory, program, limits, walls, group)
        file = held.enter_context(tempfile.TemporaryFile("w+", dir=directory))
        file.write(json.dumps(told))
        file.flush()
        file.seek(0)
        reading, writing = os.pipe()
        held.callback(os.close, reading)
        os.set_blocking(reading, False)
        guard = [str(GUARD)] if walls.isolation == "limits" else []
        python = [_interpreter(), "-I", "-B", *guard, "main.py"]
        outside = [sys.executable, "-I", "-S", str(JAIL)]
        start = bubblewrap(limits) if wrapped else outside
        inherited = (writing, file.fileno(), *((group.joining, group.events) if group else ()))
        command = [*start, str(file.fileno()), str(writing), *python]
        # Limits on processes do not hold for root, and what only root may read is not shown.
        user = NOBODY if wrapped and os.geteuid() == 0 else None
        yield Jail(command, reading, writing, inherited, user)


def _group(home: Path, limits: Limits) -> cgroup.ControlGroup:
    """A control group; its memory holds the program's files too, which lie in memory."""
    memory = (limits.memory + limits.disk) * MIB
    try:
        return cgroup.make(home, memory=memory, tasks=limits.processes)
    except OSError as error:
        raise no_jail(f"a cgroup below {home}: {error}") from error


def _told(
    directory: str, program: str, limits: Limits, walls: Walls, group: cgroup.ControlGroup | None
) -> dict[str, Any]:
    """What `jail.py` is told."""
    most = {
        "CPU": max(1, round(limits.cpu)),
        "AS": limits.memory * MIB,
        "FSIZE": limits.disk * MIB,
        "CORE": 0,
        "NOFILE": 64,
    }
    alone = walls.isolation != "limits"
    return {
        "isolation": walls.isolation,
        "group": [group.joining, group.events] if group else None,
        "directory": directory,
        "disk": limits.disk * MIB,
        "visible": visible_paths(),
        "program": program,
        "parent": os.getpid(),
        "wall": limits.wall + SLACK,
        "memory": limits.memory * MIB,
        "environment": {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
        "limits": most | ({"NPROC": limits.processes} if alone else {}),
    }


def bubblewrap(limits: Limits) -> list[str]:
    """The command of bubblewrap that starts `jail.py` as the first process of its own.

    The root lies in memory and holds the program's files, so that one size bounds them all.
    """
    shown: list[str] = []
    for path in visible_paths():
        link = Path(path).is_symlink()
        shown += (
            ["--symlink", str(Path(path).readlink()), path] if link else ["--ro-bind", path, path]
        )
    for path in DEVICES:
        shown += ["--dev-bind", path, path]
    return [
        shutil.which("bwrap") or "bwrap",
        *("--unshare-all", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"),
        *("--uid", str(INSIDE), "--gid", str(INSIDE)),
        *("--size", str(limits.disk * MIB), "--tmpfs", "/", *shown),
        *("--ro-bind", str(JAIL), "/jail.py", "--proc", "/proc"),
        *("--dir", "/sandbox", "--dir", "/tmp", "--chdir", "/sandbox", "--"),  # noqa: S108  inside
        *(_interpreter(), "-I", "-S", "/jail.py"),
    ]
