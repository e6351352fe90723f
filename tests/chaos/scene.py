"""Where a row happens: a folder, marked processes, and what is left of them in the end."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlflow.runtime.record.durable import is_leftover
from tests.chaos.faulted import ACT, FIRED
from tests.conftest import ROOT, Result
from tests.runtime.whole_runs import State, state

MARK = "RLFLOW_CHAOS"
PIPELINE = Path(__file__).with_name("faulted.py")
WORDS = (
    *("--placement", "one", "--threads", 1, "--save-every", 2),
    *("--devices", "cpu:1", "--iterations", 5),
)
# Seconds in which what a run has started has to be gone once it has ended.
GONE = 20.0
# Deadlines of a machine that has other work are so many times as long; the page says so.
SLOWER = float(os.environ.get("RLFLOW_CHAOS_SLOWER") or 1)
SHARED = Path("/dev/shm")
_whole: dict[tuple[str, ...], tuple[State, float]] = {}


class Scene:
    """One row's folder, its processes and its chances; `fired` counts what it has seen fire."""

    def __init__(self, folder: Path, seed: int, home: Path) -> None:
        self.folder, self.home = folder, home
        self.run_dir = folder / "run"
        self.temporary = folder / "t"
        self.temporary.mkdir(parents=True)
        self.chance = random.Random(seed)
        self.mark = uuid.uuid4().hex
        self.fired = 0
        self.skipped = ""
        self._started: list[subprocess.Popen[str]] = []
        self._room = own_shared_memory()
        self._shared = names_in(self.shared)

    @property
    def shared(self) -> Path:
        """The row's shared memory, which nobody else has where namespaces can be made."""
        return Path(f"/proc/{self._room.pid}/root{SHARED}") if self._room else SHARED

    def command(self, *words: Any, resume: bool = False, **environment: Any) -> subprocess.Popen:
        """`rlflow run` of the small pipeline in a process of its own, marked."""
        where = ("--resume" if resume else "--run-dir", self.run_dir)
        said = ["run", PIPELINE, *WORDS, *where, *words]
        return self.rlflow(*said, **environment)

    def rlflow(self, *words: Any, **environment: Any) -> subprocess.Popen[str]:
        """Any command, marked; a fault of `environment` is for it alone."""
        return self.started([sys.executable, "-m", "rlflow.cli.main", *words], **environment)

    def started(self, words: list[Any], **environment: Any) -> subprocess.Popen[str]:
        """Any program, marked, with the temporary directory of the row."""
        settings = {k: v for k, v in os.environ.items() if k not in ("RLFLOW_FAULT", ACT, FIRED)}
        settings |= {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONFAULTHANDLER": "1",
            "TMPDIR": str(self.temporary),
            # Torch makes it where it is imported, used or not.
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "torch"),
            "RLFLOW_COSTS": "off",
            FIRED: str(self.folder / "fired"),
            MARK: self.mark,
        }
        room = [f"--target={self._room.pid}", f"--wd={self.folder}"] if self._room else []
        enter = ["nsenter", "--mount", *room, "--"] if room else []
        made = subprocess.Popen(
            [*enter, *map(str, words)],
            cwd=self.folder,
            env=settings | {name: str(value) for name, value in environment.items()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=hears_ctrl_c,  # noqa: PLW1509  it calls nothing that another thread may hold
        )
        self._started.append(made)
        return made

    def ended(self, started: subprocess.Popen[str], within: float) -> Result:
        """What a process has said, once it has ended; after `within` seconds with all its stacks.

        Raises AssertionError where it is late.
        """
        within *= SLOWER
        try:
            out, err = started.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            started.send_signal(signal.SIGABRT)
            try:
                out, err = started.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                started.kill()
                out, err = started.communicate()
            raise AssertionError(f"not ended within {within:g} s\n{err[-6000:]}") from None
        return Result(started.returncode, out, err)

    def run(self, *words: Any, within: float = 90, resume: bool = False, **more: Any) -> Result:
        """A run from its start to whatever end."""
        return self.ended(self.command(*words, resume=resume, **more), within)

    def acted(self) -> None:
        """Count the act of the reward, which has made its file; AssertionError without one."""
        assert (self.folder / "fired").exists(), "the reward was never asked to misbehave"
        self.fired += 1

    def whole(self, *words: Any) -> State:
        """The bits of a run without an accident, made once a session."""
        return self._reference(*words)[0]

    def seconds(self) -> float:
        """How long a run without an accident takes here."""
        return self._reference()[1]

    def _reference(self, *words: Any) -> tuple[State, float]:
        key = tuple(map(str, words))
        if key not in _whole:
            folder = self.home / f"whole-{len(_whole)}"
            shutil.rmtree(folder, ignore_errors=True)
            made, began = Scene(folder, 0, self.home), time.monotonic()
            try:
                result = made.run(*words, within=300)
            finally:
                made.close()
            assert 0 == result.code, result.err
            _whole[key] = state(made.run_dir), time.monotonic() - began
        return _whole[key]

    def continues(self, *words: Any, like: tuple[Any, ...] = ()) -> Result:
        """Resume without a fault, to the bits of a run that had no accident, and no leftover."""
        result = self.run(*words, resume=True)
        assert 0 == result.code, result.err
        assert self.whole(*like) == state(self.run_dir), "the bits are not those of a whole run"
        assert not leftovers(self.run_dir)
        return result

    def wait_for(self, found: Any, started: subprocess.Popen[str], within: float = 90) -> None:
        """Wait until `found()`; AssertionError where the process ends before, or is late."""
        until = time.monotonic() + within * SLOWER
        while not found():
            assert started.poll() is None, (started.returncode, started.communicate()[1][-3000:])
            assert time.monotonic() < until, "what the fault waits for has not come"
            time.sleep(0.02)

    def left(self) -> list[str]:
        """What is left in the end: processes, shared memory, sockets, temporary files."""
        until = time.monotonic() + GONE * SLOWER
        while (found := [*self._alive(), *self._unheld()]) and time.monotonic() < until:
            time.sleep(0.2)
        for path in sorted(self.temporary.rglob("*")):
            kind = path.lstat().st_mode
            if stat.S_ISSOCK(kind) or stat.S_ISFIFO(kind) or path.parent == self.temporary:
                found.append(str(path.relative_to(self.folder)))
        return found

    def _alive(self) -> list[str]:
        return [f"process {pid}: {command}" for pid, command in self.processes().items()]

    def processes(self) -> dict[int, str]:
        """What this row has started and is alive, by pid, with its command."""
        return marked(self.mark, self.folder)

    def _unheld(self) -> list[str]:
        """Shared memory that came and that nobody has; what others just make has a moment."""
        new = names_in(self.shared) - self._shared
        held = held_files() if new else frozenset()
        left = [self.shared / name for name in sorted(new) if (self.shared / name).exists()]
        return [f"shared memory {file.name}" for file in left if identity(file) not in held]

    def close(self) -> None:
        """End what has not ended by itself."""
        for pid in self.processes():
            with suppressed():
                os.kill(pid, signal.SIGKILL)
        for each in self._started:
            if each.poll() is None:
                each.kill()
            each.communicate()
        if self._room:
            self._room.kill()
            self._room.communicate()


def hears_ctrl_c() -> None:
    """A shell has what it starts in the background ignore Ctrl-C, `nohup` SIGHUP, and so on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextmanager
def suppressed() -> Iterator[None]:
    """A process may have ended by itself."""
    try:
        yield
    except (ProcessLookupError, PermissionError):
        return


def marked(mark: str, folder: Path | None = None) -> dict[int, str]:
    """Processes that inherited a mark in their environment, by pid, with their command.

    A process that sets its title may have written it over its environment, as Ray's workers do:
    who has a file in `folder` open is one of them as well.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            known = f"{MARK}={mark}".encode() in (entry / "environ").read_bytes()
            if known or (folder is not None and uses(entry, folder)):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                found[int(entry.name)] = command[:200]
        except OSError:
            continue
    return found


def uses(process: Path, folder: Path) -> bool:
    """Whether a process has a file of a folder open."""
    for each in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            if str(each.readlink()).startswith(f"{folder}{os.sep}"):
                return True
    return False


def names_in(folder: Path) -> frozenset[str]:
    """The names in a folder; none where there is no such folder."""
    return frozenset(path.name for path in folder.iterdir()) if folder.is_dir() else frozenset()


def own_shared_memory() -> subprocess.Popen[str] | None:
    """A process that keeps a namespace of mounts with shared memory of its own, or none.

    Engines of others on this machine, and of rows beside this one, make names there all the time.
    """
    words = f"mount -t tmpfs shm {SHARED} && echo made && exec cat"
    if not (shutil.which("unshare") and shutil.which("nsenter")):
        return None
    made = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert made.stdout is not None
    if made.stdout.readline():
        return made
    made.communicate()
    return None


def held_files() -> frozenset[tuple[int, int]]:
    """The files of shared memory that a living process has mapped, whoever it is of.

    By device and inode: a semaphore is mapped under the name that it had before its own.
    """
    found: set[tuple[int, int]] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = [line.split() for line in maps.read_text().splitlines() if str(SHARED) in line]
        except OSError:
            continue
        for _, _, _, device, inode, *_ in lines:
            major, minor = (int(part, 16) for part in device.split(":"))
            found.add((os.makedev(major, minor), int(inode)))
    return frozenset(found)


def identity(file: Path) -> tuple[int, int]:
    """The device and inode of a file."""
    status = file.stat()
    return status.st_dev, status.st_ino


def leftovers(run_dir: Path) -> list[str]:
    """Files of a run's directory that a writer who died has left."""
    return [str(path) for path in run_dir.rglob("*") if is_leftover(path.name)]


def listening(mark: str) -> list[str]:
    """The addresses on which marked processes listen for TCP, in hexadecimal as the kernel says."""
    inodes = set()
    for pid in marked(mark):
        try:
            links = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1])
    return found
