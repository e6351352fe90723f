"""Bytes that survive a crash: write, flush, fsync, rename; and the failpoints that prove it.

Holds the file-system discipline that checkpoints, run directories and logs share, the
translation of an `OSError` into one of our errors with a line to paste, and `fault`, a
hook that a test arms through the environment to kill the process at a named point.
This file does not know what the bytes mean.

    RLFLOW_FAULT=POINT=ACTION[@N]   at the N-th pass (default 1) of POINT:
        kill9        the process kills itself with SIGKILL
        raise        InjectedFault is raised
        sleep:S      the thread sleeps S seconds
        enospc       OSError(ENOSPC) is raised, as by a full disk
        clock:S      the wall clock of this process's Python jumps by S seconds
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Literal, TextIO, TypeAlias

from rlflow.errors import Finding, RlflowError, UsageError, near_names

JSON: TypeAlias = (
    "bool | int | float | str | list[JSON] | tuple[JSON, ...] | Mapping[str, JSON] | None"
)

# What JSON of others may raise that is read as what it is meant to be.
NOT_READ = (
    *(ValueError, KeyError, TypeError, AttributeError),
    *(OverflowError, RecursionError),
)
FAULT_VARIABLE = "RLFLOW_FAULT"
FAULT_FORM = re.compile(
    r"(?P<point>[\w:.-]+)=(?P<action>kill9|raise|enospc|sleep:\d+(\.\d+)?|clock:-?\d+(\.\d+)?)"
    r"(@(?P<pass>[1-9]\d*))?"
)
FLOAT_TAG = "$float"
READ_SIZE = 1 << 20
# Permissions of files that anybody may read, and of those that may hold what is like a key.
SHARED, PRIVATE = 0o666, 0o600


class InjectedFault(RuntimeError):
    """Raised at a failpoint that is armed with `raise`; never caught by rlflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Armed:
    """A parsed RLFLOW_FAULT; `at` counts passes of the point from 1."""

    point: str
    action: str
    seconds: float
    at: int


class _Faults:
    """The failpoints of this process: all their names, the armed one, how often it passed."""

    def __init__(self) -> None:
        self.points: set[str] = set()
        self.armed: Armed | None = None
        self.passed = 0
        self.lock = threading.Lock()


_faults = _Faults()


def register_faults(*points: str) -> tuple[str, ...]:
    """Add names to the registry of failpoints; each module does so for its own."""
    clash = _faults.points.intersection(points)
    assert not clash, f"two modules claim the failpoints {sorted(clash)}"
    _faults.points.update(points)
    return points


def fault_points() -> tuple[str, ...]:
    """All failpoints of the modules imported so far, sorted."""
    return tuple(sorted(_faults.points))


def arm_from_environment() -> None:
    """Read RLFLOW_FAULT again (done once at import). Raises `UsageError` when it is malformed."""
    text = os.environ.get(FAULT_VARIABLE)
    _faults.armed = None if text is None else _parse_fault(text)
    _faults.passed = 0


def check_armed() -> None:
    """Raise `UsageError` if the armed point does not exist; call it when all is imported."""
    armed = _faults.armed
    if armed is not None and armed.point not in _faults.points:
        raise UsageError(
            Finding(
                code="E741",
                what=f"{FAULT_VARIABLE} names the failpoint {armed.point!r}, which does not exist",
                near=near_names(armed.point, fault_points()),
            )
        )


def fault(point: str) -> None:
    """Do what RLFLOW_FAULT asks for at `point`; one comparison when nothing is armed."""
    if _faults.armed is not None:
        _pass_point(point, _faults.armed)


def _parse_fault(text: str) -> Armed:
    match = FAULT_FORM.fullmatch(text)
    if match is None:
        raise UsageError(
            Finding(
                code="E740",
                what=f"{FAULT_VARIABLE} is not a fault",
                got=repr(text),
                expected="POINT=kill9, raise, enospc, sleep:SECONDS or clock:SECONDS, then @N",
                fix=f"export {FAULT_VARIABLE}=ckpt:rename=kill9@1",
            )
        )
    action, _, seconds = match["action"].partition(":")
    return Armed(
        point=match["point"],
        action=action,
        seconds=float(seconds or 0),
        at=int(match["pass"] or 1),
    )


def _pass_point(point: str, armed: Armed) -> None:
    assert point in _faults.points, f"failpoint {point!r} is not registered"
    if point != armed.point:
        return
    with _faults.lock:
        _faults.passed += 1
        due = _faults.passed == armed.at
    if not due:
        return
    if armed.action == "kill9":
        os.kill(os.getpid(), signal.SIGKILL)
    elif armed.action == "sleep":
        time.sleep(armed.seconds)
    elif armed.action == "clock":
        was = time.time
        time.time = lambda: was() + armed.seconds
        sys.stderr.write(f"failpoint {point}: the clock says {time.ctime(time.time())}\n")
        sys.stderr.flush()
    elif armed.action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    else:
        raise InjectedFault(f"failpoint {point}, pass {armed.at}")


arm_from_environment()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What a file must be to be the one that was written: size in bytes, sha256 in hex."""

    size: int
    sha256: str


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def register_file_faults(prefix: str) -> str:
    """Register the failpoints that `write_file` passes under `prefix`, and return it."""
    register_faults(f"{prefix}:write", f"{prefix}:fsync")
    return prefix


def write_file(
    path: Path, parts: Iterable[bytes | memoryview], points: str, *, mode: int = SHARED
) -> FileRecord:
    """Write a new file of `parts` and fsync it, hashing each byte once on its way out.

    The directory entry is not yet durable: see `fsync_dir`. Raises `OSError`; the caller
    removes what was left.
    """
    digest = hashlib.sha256()
    size = 0
    with open(path, "xb", opener=partial(os.open, mode=mode)) as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
            fault(f"{points}:write")
        file.flush()
        os.fsync(file.fileno())
    fault(f"{points}:fsync")
    return FileRecord(size=size, sha256=digest.hexdigest())


def register_atomic_faults(prefix: str) -> str:
    """Register the failpoints that `write_atomic` passes under `prefix`, and return it."""
    register_faults(f"{prefix}:rename", f"{prefix}:dirsync")
    return register_file_faults(prefix)


def write_atomic(path: Path, data: bytes, points: str, *, mode: int = SHARED) -> None:
    """Replace a file by `data`: at every instant `path` is the old file or the new one, whole.

    A link is replaced, not followed. `mode` are its permissions, before the process's own mask.
    Raises `OSError` after removing the temporary file; a kill leaves it behind under a name
    that `is_leftover` knows.
    """
    temporary = temporary_name(path)
    try:
        write_file(temporary, [data], points, mode=mode)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fault(f"{points}:rename")
    fsync_dir(path.parent)
    fault(f"{points}:dirsync")


def open_private(path: Path, mode: Literal["a", "w"] = "a") -> TextIO:
    """A text file to write to, for its user alone; OSError where its name is a link."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, PRIVATE)

    return open(path, mode, encoding="utf-8", errors="replace", opener=opener)


def append(file: FileIO, data: bytes) -> None:
    """Hand all of `data` to the system before returning. Raises `OSError`.

    Nothing is buffered, so that closing the file after a full disk does not fail again.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no other writer uses."""
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:12]}")


def is_leftover(name: str) -> bool:
    """Whether a file or directory of this name was left by a writer that died."""
    return re.search(r"\.tmp-[0-9a-f]{12}$", name) is not None


def read_record(path: Path) -> FileRecord:
    """Measure a file: its size and sha256. Raises `OSError`."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while block := file.read(READ_SIZE):
            digest.update(block)
            size += len(block)
    return FileRecord(size=size, sha256=digest.hexdigest())


def exact_json(value: JSON) -> str:
    """JSON text from which `exact_value` makes the same value again, bit for bit.

    Keys are sorted. Floats are written by `repr`; those JSON has no word for become
    `{"$float": "nan"}`. A tuple comes back as a list. Raises `TypeError`, with the path to
    the culprit, for what JSON would change silently or cannot hold.
    """
    return json.dumps(_tag_floats(value, ""), indent=1, sort_keys=True, allow_nan=False) + "\n"


def exact_value(value: JSON) -> JSON:
    """Undo `exact_json` on the result of `json.loads`."""
    if isinstance(value, Mapping):
        if value.keys() == {FLOAT_TAG}:
            return float(str(value[FLOAT_TAG]))
        return {key: exact_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [exact_value(item) for item in value]
    return value


def _tag_floats(value: object, where: str) -> JSON:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {FLOAT_TAG: repr(float(value))}
    if isinstance(value, list | tuple):
        return [_tag_floats(item, f"{where}[{place}]") for place, item in enumerate(value)]
    if not isinstance(value, Mapping):
        raise TypeError(f"{where} is a {type(value).__name__}")
    for key in value:
        if not isinstance(key, str) or key == FLOAT_TAG:
            raise TypeError(f"{where or 'the top level'} has the key {key!r}")
    return {key: _tag_floats(item, f"{where}.{key}".lstrip(".")) for key, item in value.items()}


def check_space(path: Path, needed: int, error: type[RlflowError]) -> None:
    """Raise `error` unless the disk of the directory `path` has `needed` bytes free."""
    disk = os.statvfs(path)
    free = disk.f_bavail * disk.f_frsize
    if free < needed:
        raise error(
            Finding(
                code="E701",
                what=f"no space left to write into {path}",
                got=f"{free:,} bytes free",
                expected=f"{needed:,} bytes",
                fix=f"df -h {path}",
            )
        )


_DISK_ERRORS = {
    errno.ENOSPC: ("E701", "no space left", "df -h {path}"),
    errno.EDQUOT: ("E701", "disk quota exceeded", "quota -s"),
    errno.EFBIG: ("E702", "the file would be larger than the limit", "ulimit -f unlimited"),
    errno.EACCES: ("E703", "permission denied", "ls -ld {path}"),
    errno.EPERM: ("E703", "operation not permitted", "ls -ld {path}"),
    errno.EEXIST: ("E706", "something of that name is in the way", "ls -ld {path}"),
    errno.EISDIR: ("E706", "a directory is where a file should be", "ls -ld {path}"),
    errno.ENOENT: ("E705", "there is no such file or directory", "ls -ld {path}"),
    errno.ENAMETOOLONG: ("E705", "the name is too long", "ls {path}"),
    errno.ELOOP: ("E705", "links lead back to themselves", "namei -l {path}"),
    errno.EMFILE: ("E705", "this process has too many open files", "ulimit -n"),
    errno.ENFILE: ("E705", "the machine has too many open files", "sysctl fs.file-nr"),
    errno.ENOTDIR: ("E706", "a file is where a directory should be", "ls -ld {path}"),
    errno.EROFS: ("E704", "the file system is read-only", "findmnt -T {path}"),
}


@contextmanager
def disk_errors(error: type[RlflowError], what: str, path: Path) -> Iterator[None]:
    """Translate an `OSError` inside the block into `error`, saying what was being done."""
    try:
        yield
    except OSError as cause:
        code, reason, fix = _DISK_ERRORS.get(
            cause.errno or 0, ("E705", "the file system reported an error", "dmesg | tail")
        )
        raise error(
            Finding(
                code=code,
                what=f"cannot {what}: {reason}",
                got=f"{cause}",
                fix=fix.format(path=path),
            )
        ) from cause
