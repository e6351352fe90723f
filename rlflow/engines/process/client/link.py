"""Requests to an engine process and their answers, which come in any order.

Threads read and write the socket. Who asked waits for the answer, or until nothing has moved for
too long. This file knows neither what requests mean nor how processes start.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from rlflow.contract.progress import advance


class LostError(Exception):
    """The engine process is gone, or was ended since nothing moved; the text says which."""


class RefusedError(Exception):
    """The engine answered that it did not do what was asked; the text is its reason."""


class PendingRequest:
    """One request in flight; `number` is its id."""

    def __init__(self, link: Link, number: int) -> None:
        self.number = number
        self.answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._link = link
        self._began = time.monotonic()

    def next(self) -> dict[str, Any]:
        """The next message about this request.

        Raises RefusedError for a refusal, LostError where the engine is gone or nothing of it
        has moved for `patience` seconds, after which its process is ended.
        """
        began = time.monotonic()
        while True:
            left = self._link.patience - (time.monotonic() - max(began, self._link.moved))
            try:
                message = self.answers.get(timeout=max(left, 0.0))
            except queue.Empty:
                if time.monotonic() - max(began, self._link.moved) < self._link.patience:
                    continue
                self._link.lose(f"nothing moved for {self._link.patience:g} seconds")
                message = self.answers.get()
            if "lost" in message:
                raise LostError(self._link.reason)
            if "error" in message:
                raise RefusedError(message["error"])
            advance(1, "messages of the engine")
            return message

    def poll(self) -> dict[str, Any] | None:
        """The next message if it is there; raises what `next` raises."""
        if not self.answers.empty():
            return self.next()
        if time.monotonic() - max(self._began, self._link.moved) > self._link.patience:
            self._link.lose(f"nothing moved for {self._link.patience:g} seconds")
        return None

    def about(self, do: str, fields: Mapping[str, Any]) -> PendingRequest:
        """Ask for something about this request; raises LostError where the engine is gone."""
        return self._link.ask(do, {**fields, "call": self.number})

    def result(self) -> Any:
        """The answer to a request that has a single one."""
        return self.next()["value"]


class Link:
    """One end of a socket to an engine process; `end` ends that process.

    `moved` is when the engine last made progress (time.monotonic), `lost` is set when it is
    gone, `served` once it has answered a request.
    """

    def __init__(self, connection: Connection, end: Callable[[], None], *, patience: float) -> None:
        self.patience = patience
        self.moved = time.monotonic()
        self.lost = threading.Event()
        self.reason = "its process ended"
        self.served = False
        self._connection = connection
        self._end = end
        self._numbers = itertools.count()
        self._calls: dict[int, PendingRequest] = {}
        self._lock = threading.Lock()
        self._outgoing: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        for work in (self._read, self._write):
            threading.Thread(target=work, name="rlflow-sglang", daemon=True).start()

    def ask(self, do: str, fields: Mapping[str, Any], *, numbered: bool = False) -> PendingRequest:
        """Send a request; with `numbered` its number goes along as the field `call`.

        Raises LostError where the engine is gone.
        """
        call = PendingRequest(self, next(self._numbers))
        with self._lock:
            if self.lost.is_set():
                raise LostError(self.reason)
            self._calls[call.number] = call
        more = {"call": call.number} if numbered else {}
        self._outgoing.put({"id": call.number, "do": do, "fields": {**fields, **more}})
        return call

    def lose(self, reason: str) -> None:
        """End the process, for a reason; every request in flight is lost."""
        with self._lock:
            if not self.lost.is_set():
                self.reason = reason
        self._end()

    def _write(self) -> None:
        """Send what is asked; a process that is stopped may read nothing for long."""
        while (message := self._outgoing.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                return

    def _read(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                break
            self.moved = time.monotonic()
            if "progress" in message:
                for number, counts in message["progress"].items():
                    self._pass(number, {"counts": counts}, last=False)
            else:
                self._pass(message["id"], message, last="row" not in message)
        with self._lock:
            self.lost.set()
            calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.answers.put({"lost": True})
        self._outgoing.put(None)

    def _pass(self, number: int, message: dict[str, Any], *, last: bool) -> None:
        with self._lock:
            call = self._calls.pop(number, None) if last else self._calls.get(number)
        if call is not None:
            self.served = self.served or "value" in message or "row" in message
            call.answers.put(message)
