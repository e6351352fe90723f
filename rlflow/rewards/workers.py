"""Processes that run plain functions, each call within a time limit that is kept by killing.

A function that hangs, in C code too, costs its process and nothing else. This file knows no
rewards: it sends a function and keywords, and brings back a value or what was raised.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import pickle
import queue
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

START = 60.0
HEADER = 8
OWN = __name__.partition(".")[0]


class WorkerLost(RuntimeError):
    """The process of a call died under it."""


class Workers:
    """At most `size` processes, started when they are needed and kept until the program ends."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(None)

    def call(
        self, function: Callable[..., Any], keywords: Mapping[str, Any], seconds: float | None
    ) -> Any:
        """What `function(**keywords)` returns in one of the processes; waits for a free one.

        Raises TimeoutError after `seconds`, WorkerLost where the process died, and what the
        function raised.
        """
        process = self._idle.get()
        try:
            if process is None or not process.alive():
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
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "rlflow.rewards.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )
        self._known: set[str] = set()
        self._started = False

    def alive(self) -> bool:
        """Whether the child still runs."""
        return self._child.poll() is None

    def call(
        self, function: Callable[..., Any], keywords: Mapping[str, Any], seconds: float | None
    ) -> tuple[bool, Any]:
        """Send a call and wait for its answer; the time of the first start is not counted.

        Whether the function returned, and what it returned or raised.
        """
        if not self._started:
            self._answer(START)
            self._started = True
        blob = packed(function)
        key = hashlib.sha256(blob).hexdigest()
        self._send(pickle.dumps((key, None if key in self._known else blob, dict(keywords))))
        self._known.add(key)
        worked, value = pickle.loads(self._answer(seconds))  # noqa: S301  from our own child
        return worked, value

    def kill(self) -> None:
        """End the child at once."""
        self._child.kill()
        self._child.wait()
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

    def _answer(self, seconds: float | None) -> bytes:
        until = None if seconds is None else time.monotonic() + seconds
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


def _close(pipe: Any) -> None:
    try:
        pipe.close()
    except OSError:
        return


def _status(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit code {status}"


def packed(function: Callable[..., Any]) -> bytes:
    """A function as bytes: by name where it is installed, else by value with what it uses."""
    import cloudpickle

    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or _installed(module):
        return bytes(cloudpickle.dumps(function))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(function))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _installed(module: Any) -> bool:
    """Whether a child can import the module by its name."""
    name = module.__name__.partition(".")[0]
    path = Path(getattr(module, "__file__", None) or "")
    return name in (OWN, *sys.builtin_module_names) or "site-packages" in path.parts


# A child asks to be killed with the thread that started it, so that thread must last.
_SPAWNER = ThreadPoolExecutor(1, thread_name_prefix="rlflow workers")
_POOLS: dict[int, Workers] = {}


def workers(size: int | None = None) -> Workers:
    """The processes of this program for a size (this machine's cores unless given)."""
    count = size or len(os.sched_getaffinity(0))
    if count not in _POOLS:
        _POOLS[count] = Workers(count)
        atexit.register(_POOLS[count].close)
    return _POOLS[count]
