"""One engine that is kept running: started, given up when lost, and started anew.

A thread of its own starts the process and waits for its end, so that a replacement comes up
while the plan goes on. This file knows neither weights nor rows: `restored` brings a new process
to where the lost one was.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.engines.process.client.link import Link, LostError, RefusedError
from rlflow.engines.process.client.process import Command, EngineProcess
from rlflow.engines.process.client.process_memory import held_bytes
from rlflow.errors import Finding, RlflowError, RunError, UsageError
from rlflow.graph.user.engine_options import EngineOptions

LOG = logging.getLogger(__name__)
# What a process prints where another has the port that it found free a moment before; and how often
# it is started for that.
TAKEN, PORT_TRIES = "address already in use", 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How an engine is started: as what process, told what, with which options.

    `message` makes what it is told; it is given whether the engine starts for the first time.
    `directory` is what it reads, removed when the replica is closed. So many of its
    `ranks` are on this host. After a loss another is started if it may be `replaced`.
    Nothing of it may stand still for longer than `patience` seconds while it is asked something.
    """

    name: str
    command: Command
    message: Callable[[bool], Mapping[str, Any]]
    directory: str
    cuda: bool
    options: EngineOptions
    patience: float
    ranks: int = 1
    replaced: bool = True


class Replica:
    """Keeps one engine; `link()` waits until it runs.

    After a loss a new process is started at once, or as soon as `wanted()` is true, and is
    `restored` before anybody else asks it. A replacement that is lost before it has answered
    anybody else is not replaced again. `facts` and `seconds` are of the last start. A start whose
    port was `taken` is made anew, a few times, where nobody else has to meet it there.
    """

    def __init__(
        self, launch: Launch, *, restored: Callable[[Link], None], wanted: Callable[[], bool]
    ) -> None:
        self.launch = launch
        self.facts: Mapping[str, Any] = {}
        self.starts = 0
        self.seconds = 0.0
        self.taken = 0
        self._restored = restored
        self._wanted = wanted
        self._change = threading.Condition()
        self._process: EngineProcess | None = None
        self._link: Link | None = None
        self._failed: RlflowError | None = None
        self._closing = False
        self._idle = False
        self._last_lines = ""
        self._thread = threading.Thread(target=self._keep, name="rlflow-sglang", daemon=True)
        self._thread.start()

    def link(self) -> Link:
        """The running engine; raises what its start or its second loss has raised."""
        with self._change:
            self._change.wait_for(lambda: self._running() is not None or self._failed is not None)
            found = self._running()
            if found is None:
                assert self._failed is not None
                raise self._failed
            return found

    def runs(self) -> bool:
        """Whether `link()` would not wait; raises what that would raise."""
        with self._change:
            if self._running() is None and self._failed is not None:
                raise self._failed
            return self._running() is not None

    def present(self) -> Link | None:
        """The engine, None where there is none and none is being started."""
        with self._change:
            self._change.wait_for(lambda: self._running() or self._failed or self._idle)
            return self._running()

    def _running(self) -> Link | None:
        """The engine, unless it is already lost."""
        return None if self._link is None or self._link.lost.is_set() else self._link

    def held_bytes(self) -> int | None:
        """Bytes that the engine's processes hold, None where that cannot be told."""
        with self._change:
            process = self._process
        return None if process is None else held_bytes(process.pid, cuda=self.launch.cuda)

    def look_again(self) -> None:
        """Ask again whether an engine is wanted."""
        with self._change:
            self._change.notify_all()

    def close(self) -> None:
        """End the engine for good, with all that it started."""
        with self._change:
            self._closing = True
            process = self._process
            self._change.notify_all()
        if process is not None:
            process.kill()
        if self._thread is not threading.current_thread():
            self._thread.join()
        shutil.rmtree(self.launch.directory, ignore_errors=True)

    def lost(self, reason: str) -> RunError:
        """What to raise where an engine was lost twice."""
        return RunError(
            Finding(
                code="E584",
                what=f"the engine of {self.launch.name!r} was lost, and so was its replacement",
                got=self._got(reason),
                expected="an engine that answers",
            )
        )

    def lost_for_good(self, reason: str) -> RunError:
        """What to raise where a part of an engine on several hosts was lost."""
        return RunError(
            Finding(
                code="E675",
                what=f"the engine of {self.launch.name!r} was lost, which lies on several hosts",
                got=self._got(reason),
                expected="an engine that answers; one on several hosts is not started anew",
                fix="--resume",
            )
        )

    def _got(self, reason: str) -> str:
        """Why an engine was lost, and what its last run has said at its end."""
        return "\n".join([reason, self._last_lines])

    def _keep(self) -> None:
        try:
            while self._awaited():
                self._one_run()
        except RlflowError as error:
            self._fail(error)
        except Exception as error:
            self._fail(RunError(Finding(code="E580", what=self._what(), got=repr(error))))

    def _awaited(self) -> bool:
        """Wait until an engine is wanted; false when none will ever be."""
        with self._change:
            self._idle = True
            self._change.notify_all()
            self._change.wait_for(lambda: self._closing or self._wanted())
            self._idle = False
            return not self._closing

    def _one_run(self) -> None:
        """Start the engine and wait until it is gone."""
        began = time.monotonic()
        process, link = self._started(began + self.launch.options.start_seconds)
        try:
            if self.starts:
                self._restore(link)
            with self._change:
                self.starts += 1
                self.seconds = time.monotonic() - began
                self._link = link
                self._change.notify_all()
            link.lost.wait()
        finally:
            self._end(process)
            with self._change:
                self._link = None
                closing = self._closing
        if not closing and not self.launch.replaced:
            raise self.lost_for_good(link.reason)
        if not closing and self.starts > 1 and not link.served:
            raise self.lost(link.reason)

    def _started(self, end: float) -> tuple[EngineProcess, Link]:
        """An engine that has started by some time; of one whose port was taken, another."""
        tries = PORT_TRIES if self.launch.replaced else 1
        while True:
            process = self._begun()
            try:
                return process, self._ready(process, end)
            except BaseException as error:
                tries -= 1
                again = isinstance(error, RunError) and tries and process.has_said(TAKEN)
                self._end(process)
                if not again:
                    raise
            self.taken += 1
            LOG.warning("the engine of %r starts anew: its port was taken", self.launch.name)

    def _end(self, process: EngineProcess) -> None:
        """End a process, and keep what it has said last."""
        process.kill()
        self._last_lines = process.last_lines()
        process.remove()

    def _begun(self) -> EngineProcess:
        command = self.launch.command
        try:
            process = EngineProcess(command)
        except OSError as error:
            finding = Finding(
                code="E582",
                what=f"the interpreter of the engine of {self.launch.name!r} cannot be run",
                got=f"{command.python}: {error.strerror}",
                fix=self.launch.options.install,
            )
            raise UsageError(finding) from error
        with self._change:
            self._process = process
            closing = self._closing
        if closing:
            process.kill()
        return process

    def _ready(self, process: EngineProcess, end: float) -> Link:
        """Wait until the engine has started, or say why it has not."""
        told: Mapping[str, Any] = {"gone": ""}
        try:
            process.connection.send(self.launch.message(self.starts == 0))
            if not process.connection.poll(max(0.0, end - time.monotonic())):
                told = {"late": ""}
            else:
                told = process.connection.recv()
        except (OSError, EOFError):
            pass
        if "ready" not in told:
            process.kill()
            raise self._not_started(process, told)
        self.facts = {**told["ready"], "directory": str(process.directory)}
        return Link(process.connection, process.kill, patience=self.launch.patience)

    def _not_started(self, process: EngineProcess, told: Mapping[str, Any]) -> RlflowError:
        lines = process.last_lines()
        if "missing" in told:
            return UsageError(
                Finding(
                    code="E582",
                    what=f"the engine of {self.launch.name!r} lacks a package",
                    got=f"{self.launch.command.python}: {told['missing']}",
                    expected=f"an interpreter that {self.launch.options.title} is installed for",
                    fix=self.launch.options.install,
                )
            )
        if "late" in told:
            limit = f"{self.launch.options.start_seconds:g} seconds"
            return RunError(
                Finding(
                    code="E581",
                    what=f"{self._what()} within {limit}",
                    got=lines,
                    fix=f"{self.launch.options.spelled()}(start_seconds=...)",
                )
            )
        got = lines or str(told.get("failed", ""))
        return RunError(Finding(code="E580", what=self._what(), got=got))

    def _restore(self, link: Link) -> None:
        try:
            self._restored(link)
            link.served = False
        except LostError as error:
            raise self.lost(str(error)) from error
        except RefusedError as error:
            raise RunError(Finding(code="E580", what=self._what(), got=str(error))) from error

    def _what(self) -> str:
        return f"the engine of {self.launch.name!r} did not start"

    def _fail(self, error: RlflowError) -> None:
        with self._change:
            self._failed = error
            self._change.notify_all()
