"""A way to a port of this process for those alone who know a token, from any host.

Whoever connects has to answer a number of the gate's with what follows from it and the token
(HMAC, RFC 2104, with SHA-256), and the gate answers one of theirs; the token itself is never sent.
Then bytes are passed on, in the clear. Knows sockets, and nothing of what is sent.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

LOOPBACK = "127.0.0.1"
SIZE = 32
# Seconds for an answer of somebody who has connected.
ANSWER = 10.0
READ_SIZE = 1 << 16
RETRY = 0.1
# The connections of this host: torch writes addresses of IPv4 as those of IPv6.
TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))


class WrongToken(OSError):
    """The other side does not know the token."""


def open_gate(held: socket.socket, token: bytes, port: int) -> None:
    """Take connections at a listening socket from now on; who knows the token reaches `port`."""

    def admit(caller: socket.socket) -> None:
        with contextlib.suppress(OSError):
            _prove(caller, token, first=True)
            _join(caller, socket.create_connection((LOOPBACK, port), timeout=ANSWER))
            return
        caller.close()

    _accept(held, admit, "rlflow gate")


def passage(address: str, port: int, token: bytes, *, seconds: float) -> int:
    """A port on the loopback that leads through the gate, for processes of this user alone.

    Raises WrongToken where the gate does not know the token or refuses it, OSError where no gate
    answers within so many seconds.
    """
    _through(address, port, token, seconds).close()
    listening = socket.create_server((LOOPBACK, 0))

    def lead(caller: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if _own(caller):
                _join(caller, _through(address, port, token, seconds))
                return
        caller.close()

    _accept(listening, lead, "rlflow passage")
    return int(listening.getsockname()[1])


def _through(address: str, port: int, token: bytes, seconds: float) -> socket.socket:
    """A connection behind the gate; it is knocked at until the time is over."""
    until = time.monotonic() + seconds
    while True:
        try:
            made = socket.create_connection((address, port), timeout=seconds)
            break
        except OSError:
            if time.monotonic() >= until:
                raise
            time.sleep(RETRY)
    try:
        made.settimeout(max(RETRY, until - time.monotonic()))
        _prove(made, token, first=False)
    except OSError:
        made.close()
        raise
    return made


def _prove(other: socket.socket, token: bytes, *, first: bool) -> None:
    """Show that this side knows the token, and see that the other does; `first` asks first."""
    mine = secrets.token_bytes(SIZE)
    if first:
        other.settimeout(ANSWER)
        other.sendall(mine)
        theirs, said = _received(other), _received(other)
        _require(said, token, b"caller", mine, theirs)
        other.sendall(_answer(token, b"gate", mine, theirs))
    else:
        theirs = _received(other)
        other.sendall(mine + _answer(token, b"caller", theirs, mine))
        _require(_received(other), token, b"gate", theirs, mine)


def _answer(token: bytes, who: bytes, *numbers: bytes) -> bytes:
    return hmac.digest(token, b"rlflow " + who + b"".join(numbers), "sha256")


def _require(said: bytes, token: bytes, who: bytes, *numbers: bytes) -> None:
    if not hmac.compare_digest(said, _answer(token, who, *numbers)):
        raise WrongToken("the token of the other side is another one")


def _received(other: socket.socket) -> bytes:
    found = b""
    while len(found) < SIZE:
        part = other.recv(SIZE - len(found))
        if not part:
            raise WrongToken("the other side has hung up: its token may be another one")
        found += part
    return found


def _own(caller: socket.socket) -> bool:
    """Whether a connection over the loopback is of this user, as the kernel knows; Linux alone."""
    found = [table for table in TABLES if table.exists()]
    rows = [line.split() for table in found for line in table.read_text().splitlines()[1:]]
    theirs, ours = (f":{end[1]:04X}" for end in (caller.getpeername(), caller.getsockname()))
    users = {int(row[7]) for row in rows if row[1].endswith(theirs) and row[2].endswith(ours)}
    return not found or users == {os.geteuid()}


def _accept(listening: socket.socket, take: Callable[[socket.socket], None], name: str) -> None:
    """Have each connection taken by a thread of its own."""

    def run() -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = listening.accept()
                threading.Thread(target=take, args=(caller,), name=name, daemon=True).start()

    threading.Thread(target=run, name=name, daemon=True).start()


def _join(one: socket.socket, other: socket.socket) -> None:
    """Pass on what either sends, until one of them has ended."""

    def move(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(READ_SIZE):
                target.sendall(part)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    for each in (one, other):
        each.settimeout(None)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    back = threading.Thread(target=move, args=(other, one), name="rlflow gate", daemon=True)
    back.start()
    move(one, other)
    back.join()
    one.close()
    other.close()
