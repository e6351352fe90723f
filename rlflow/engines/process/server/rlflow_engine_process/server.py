"""Requests over a socket, answered on an event loop in any order; the end of the socket ends all.

Requests are dictionaries with an `id`, what to `do`, and its `fields`; answers have the `id`, and a
`value` or an `error`. What has moved is reported now and then. This file knows no engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from .sweeping import sweep

BEAT_SECONDS = 0.05

# A row of a weight: name, dtype, shape, offset in bytes.
Entry = tuple[str, str, tuple[int, ...], int]


class Refused(Exception):
    """The engine did not do what it was asked; the text says why."""


def end() -> NoReturn:
    """End this process and all of its group."""
    os.killpg(os.getpgrp(), signal.SIGKILL)
    raise AssertionError("killed")


class Server:
    """Answers a request by the method `do_` and its name, while others wait.

    `counts` are new tokens of rows by call and row, to report; `live` are the names of requests
    in flight by call, of which those of `aborted` end.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.live: dict[int, set[str]] = {}
        self.aborted: set[int] = set()
        self.routing: set[int] = set()
        self.counts: dict[int, dict[int, int]] = {}
        self.touched = 0

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; the worker is gone where that fails, and so is this group."""
        try:
            self.connection.send(message)
        except OSError:
            sweep()
            end()

    def receive(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand every request to the event loop; at the end of the socket end this group."""
        while True:
            try:
                request = self.connection.recv()
            except (EOFError, OSError):
                sweep()
                end()
            asyncio.run_coroutine_threadsafe(self.answer(request), loop)

    async def run(self) -> None:
        """Serve until the worker is gone, and report what has moved, if anything has."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self.receive, args=(loop,), daemon=True).start()
        heard: object = None
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            seen, counts = self.moved(), self.counts
            self.counts = {}
            if counts or seen != heard:
                heard = seen
                self.send({"progress": counts})

    def moved(self) -> object:
        """Something that is another value once anything has moved."""
        return self.touched

    def broken(self) -> bool:
        """Whether the engine can answer nothing any more."""
        return False

    async def answer(self, request: dict[str, Any]) -> None:
        """Do what is asked and send its result, or the reason why not."""
        try:
            value = await getattr(self, f"do_{request['do']}")(**request["fields"])
        except Refused as error:
            found = {"error": str(error)}
        except Exception as error:
            if self.broken():
                traceback.print_exc()
                end()
            found = {"error": "".join(traceback.format_exception(error))}
        else:
            found = {"value": value}
        self.send({"id": request["id"], **found})


def refuse_start(connection: Connection, error: BaseException) -> NoReturn:
    """Say why an engine does not start, and end."""
    traceback.print_exception(error)
    kind = "missing" if isinstance(error, ModuleNotFoundError) else "failed"
    connection.send({kind: f"{type(error).__name__}: {error}"})
    raise SystemExit(1)


def connected() -> Connection:
    """The socket whose descriptor is the first argument; those of the others stay open here."""
    for descriptor in sys.argv[1:]:
        os.set_inheritable(int(descriptor), False)
    return Connection(int(sys.argv[1]))
