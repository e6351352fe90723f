"""Processes that run plain functions, each call within a time limit that is kept by killing.

A function that hangs, in C code too, costs its process and nothing else. This file knows no
rewards: it sends a function and keywords, and brings back a value or what was raised.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from rlflow.errors import Finding, RewardError, error_text
from rlflow.userfiles import dumped, own_modules

START = 60.0
HEADER = 8
# Bytes of standard error of a process that are shown, how many are read at once, and seconds that
# its last words are waited for.
MOST_ERRORS, PART, LAST_WORDS = 2**20, 2**16, 1.0
NO_MORE = b"\nrlflow: what else a reward's process writes to standard error is not shown\n"
MARK = "RLFLOW_REWARD_PROCESS"
OWN = __name__.partition(".")[0]


class WorkerLost(RuntimeError):
    """The process of a call died under it."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A function on its way to other processes: its bytes, and the key they know it by."""

    key: str
    blob: bytes


class Workers:
    """At most `size` processes, started when they are needed and kept until the program ends."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(None)

    def call(self, function: Packed, keywords: Mapping[str, Any], seconds: float | None) -> Any:
        """What `function(**keywords)` returns in one of the processes; waits for a free one.

        Raises TimeoutError after `seconds`, WorkerLost where the process died, and what the
        function raised.
        """
        process = self._idle.get()
        try:
            if process is not None and not process.alive():
                process.kill()  # what it has started may live on
                process = None
            if process is None:
                process = _SPAWNER.submit(_Process).result()
            worked, value = process.call(function, keywords, seconds)
        except BaseException:
            if process is not None:
                process.kill()
            process = None
            raise
        finally:
            self._idle.put(process)
        if not worked:
            raise value
        return value

    def close(self) -> None:
        """End all processes, once their calls have ended."""
        for process in [self._idle.get() for _ in range(self.size)]:
            if process is not None:
                process.kill()
            self._idle.put(None)


class _Process:
    """One child and the pipes to it."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "rlflow.rewards.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment | {"OMP_NUM_THREADS": "1", MARK: self._mark},
            start_new_session=True,
        )
        assert self._child.stderr is not None
        self._errors = threading.Thread(
            target=_hand_on, args=(self._child.stderr,), name="reward-errors", daemon=True
        )
        self._errors.start()
        self._known: set[str] = set()
        self._numbers = itertools.count()
        self._started = False

    def alive(self) -> bool:
        """Whether the child still runs."""
        return self._child.poll() is None

    def call(
        self, function: Packed, keywords: Mapping[str, Any], seconds: float | None
    ) -> tuple[bool, Any]:
        """Send a call and wait for its answer; the time of the first start is not counted.

        Whether the function returned, and what it returned or raised. An answer that is not the
        one to this call is never taken: the process is lost.
        """
        if not self._started:
            self._answer(time.monotonic() + START)
            self._started = True
        number, known = next(self._numbers), function.key in self._known
        blob = None if known else function.blob
        self._send(pickle.dumps((number, function.key, blob, dict(keywords))))
        self._known.add(function.key)
        until = None if seconds is None else time.monotonic() + seconds
        while isinstance(answer := pickle.loads(self._answer(until)), str):  # noqa: S301  our child's
            print(answer)  # noqa: T201  what the function has printed
        answered, worked, value = answer
        if answered != number:
            raise WorkerLost(f"the process answered call {answered} when asked call {number}")
        return worked, value

    def kill(self) -> None:
        """End the child at once, and what it has started, in sessions of their own too."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        for pid in _marked(f"{MARK}={self._mark}".encode()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._errors.join(LAST_WORDS)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                _close(pipe)

    def _send(self, body: bytes) -> None:
        pipe = self._child.stdin
        assert pipe is not None
        try:
            pipe.write(len(body).to_bytes(HEADER, "little") + body)
            pipe.flush()
        except OSError as error:
            raise WorkerLost("the process of the call died") from error

    def _answer(self, until: float | None) -> bytes:
        size = int.from_bytes(self._read(HEADER, until), "little")
        return self._read(size, until)

    def _read(self, size: int, until: float | None) -> bytes:
        assert self._child.stdout is not None
        pipe = self._child.stdout.fileno()
        found = b""
        while len(found) < size:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([pipe], [], [], left)[0]:
                raise TimeoutError
            part = os.read(pipe, size - len(found))
            if not part:
                status = self._child.wait()
                raise WorkerLost(f"the process of the call died ({_status(status)})")
            found += part
        return found


def _hand_on(pipe: IO[bytes]) -> None:
    """Write to standard error what comes through a pipe, no more than `MOST_ERRORS` of it."""
    left = MOST_ERRORS
    with pipe:
        while part := os.read(pipe.fileno(), PART):
            if left > 0:
                shown, left = part[:left], left - len(part)
                shown += b"" if left > 0 else NO_MORE
                with contextlib.suppress(OSError):  # nobody can read it
                    os.write(2, shown)


def _marked(mark: bytes) -> Iterator[int]:
    """The processes that have inherited an entry of an environment, as the kernel lists them."""
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in entry.read_bytes().split(b"\0"):
                yield int(entry.parent.name)


def _close(pipe: Any) -> None:
    try:
        pipe.close()
    except OSError:
        return


def _status(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit code {status}"


def packed_function(function: Callable[..., Any]) -> Packed:
    """A function as bytes: by name where it is installed, else by value with what it uses.

    Packed once for many calls: the register of modules that go by value is one for all threads.
    Raises RewardError (E654) for a function that cannot leave this process.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    with _PACKING, _by_value(_travelling(module)):
        try:
            blob = dumped(function)
        except Exception as error:
            raise RewardError(_not_packed(function, error)) from error
    return Packed(hashlib.sha256(blob).hexdigest(), blob)


@contextlib.contextmanager
def _by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Pickle what modules define by value; one that somebody registered stays registered."""
    import cloudpickle

    registered = cloudpickle.list_registry_pickle_by_value()
    own = [module for module in modules if module.__name__ not in registered]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _travelling(module: ModuleType | None) -> list[ModuleType]:
    """A function's module, and those beside it or of its package that a child cannot import."""
    if module is None or _installed(module):
        return []
    file = getattr(module, "__file__", None)
    beside = own_modules(Path(file)) if file else []
    return [module, *(m for m in beside if m is not module and not _importable(m))]


def _importable(module: ModuleType) -> bool:
    """Whether a child, which looks where this process looks now, finds the module by its name."""
    top = module.__name__.partition(".")[0]
    found = PathFinder.find_spec(top)
    return found is not None and found.origin == getattr(sys.modules.get(top), "__file__", None)


def _not_packed(function: Callable[..., Any], error: Exception) -> Finding:
    name = getattr(function, "__qualname__", type(function).__name__)
    return Finding(
        code="E654",
        what=f"function {name!r} cannot be sent to a process of its own, which timeout= asks for",
        got=error_text(error),
        expected="a function whose globals and closure can be pickled",
        fix="make locks, clients and open files inside of the function",
    )


def _installed(module: Any) -> bool:
    """Whether a child can import the module by its name."""
    name = module.__name__.partition(".")[0]
    path = Path(getattr(module, "__file__", None) or "")
    return name == OWN or name in sys.stdlib_module_names or "site-packages" in path.parts


# A child asks to be killed with the thread that started it, so that thread must last.
_SPAWNER = ThreadPoolExecutor(1, thread_name_prefix="rlflow workers")
_POOLS: dict[int, Workers] = {}
_PACKING = threading.RLock()


def workers(size: int | None = None) -> Workers:
    """The processes of this program for a size (this machine's cores unless given)."""
    count = size or len(os.sched_getaffinity(0))
    with _PACKING:
        if count not in _POOLS:
            _POOLS[count] = Workers(count)
            atexit.register(_POOLS[count].close)
        return _POOLS[count]
