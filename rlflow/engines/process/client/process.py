"""An engine's process as its worker sees it: started, watched, ended with all that it started.

The worker's child is a guardian, the leader of a process group that holds the engine and what the
engine starts. This file knows neither what is sent nor why.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from rlflow.engines.process.client.process_memory import members
from rlflow.engines.process.server.rlflow_engine_process.sweeping import (
    note_before,
    note_held,
    remove_held,
)

SCRIPT = Path(__file__).parents[1] / "server" / "rlflow_guardian.py"
LAST_LINES = 20
# Processes that were killed take a moment, to give back memory, until they are gone.
KILL_SECONDS = 10.0
LONGEST_LINE = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How a process is started: interpreter and script, environment, descriptors to inherit."""

    python: str
    script: Path
    environment: Mapping[str, str]
    descriptors: Sequence[int]


class EngineProcess:
    """One run of the script; `connection` is this process's end of their socket.

    It dies with this process. Raises OSError where the interpreter cannot be run.
    """

    def __init__(self, command: Command) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="rlflow-sglang-"))
        self._log = self.directory / "log"
        note_before(str(self.directory))
        mine, theirs = socket.socketpair()
        given = (SCRIPT, theirs.fileno(), os.getpid(), command.script)
        words = [command.python, *map(str, given)]
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(  # noqa: S603
                    words,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={**command.environment, "TMPDIR": str(self.directory)},
                    pass_fds=[theirs.fileno(), *command.descriptors],
                    start_new_session=True,
                )
        except BaseException:
            mine.close()
            self.remove()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.connection = Connection(mine.detach())

    def kill(self) -> None:
        """End the whole group, stopped processes too, and wait until they are gone."""
        if self._process.returncode is None:
            note_held(str(self.directory), self.pid)
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        end = time.monotonic() + KILL_SECONDS
        while members(self.pid) and time.monotonic() < end:
            time.sleep(0.01)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def remove(self) -> None:
        """Remove what the process wrote, and what shared memory it and those it started held."""
        remove_held(str(self.directory))
        shutil.rmtree(self.directory, ignore_errors=True)

    def last_lines(self) -> str:
        """The end of what the process and those that it started have printed."""
        try:
            text = self._log.read_text(errors="replace")
        except OSError:
            return ""
        lines = [line[:LONGEST_LINE] for line in text.splitlines() if line.strip()]
        return "\n".join(lines[-LAST_LINES:])

    def has_said(self, words: str) -> bool:
        """Whether any of these processes has printed some words, in whatever case."""
        try:
            return words.lower() in self._log.read_text(errors="replace").lower()
        except OSError:
            return False
