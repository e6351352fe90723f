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
# Seconds in which somebody who has connected has to have shown the token, and how many may be at it
# at once: each has a thread and a file of this process.
ANSWER = 10.0
UNPROVEN = 64
READ_SIZE = 1 << 16
RETRY = 0.1
# The connections of this host: torch writes addresses of IPv4 as those of IPv6.
TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))


class WrongToken(OSError):
    """The other side does not know the token."""


def open_gate(held: socket.socket, token: bytes, port: int) -> None:
    """Take connections at a listening socket from now on; who knows the token reaches `port`."""

    def way_of(caller: socket.socket) -> socket.socket:
        _prove(caller, token, time.monotonic() + ANSWER, first=True)
        return socket.create_connection((LOOPBACK, port), timeout=ANSWER)

    _accept(held, way_of, "rlflow gate")


def passage(address: str, port: int, token: bytes, *, seconds: float) -> int:
    """A port on the loopback that leads through the gate, for processes of this user alone.

    Raises WrongToken where the gate does not know the token or refuses it, OSError where no gate
    answers within so many seconds.
    """
    _through(address, port, token, seconds).close()
    listening = socket.create_server((LOOPBACK, 0))

    def way_of(caller: socket.socket) -> socket.socket:
        if not _own(caller):
            raise WrongToken("the caller is of another user")
        return _through(address, port, token, seconds)

    _accept(listening, way_of, "rlflow passage")
    return int(listening.getsockname()[1])


def _through(address: str, port: int, token: bytes, seconds: float) -> socket.socket:
    """A connection behind the gate; it is knocked at until the time is over."""
    until = time.monotonic() + seconds
    while True:
        try:
            left = max(RETRY, until - time.monotonic())
            made = socket.create_connection((address, port), timeout=left)
            break
        except OSError:
            if time.monotonic() >= until:
                raise
            time.sleep(RETRY)
    try:
        _prove(made, token, max(until, time.monotonic() + RETRY), first=False)
    except OSError:
        made.close()
        raise
    return made


def _prove(other: socket.socket, token: bytes, until: float, *, first: bool) -> None:
    """Show that this side knows the token, and see that the other does; `first` asks first.

    It has to be done by the time `until`, of `time.monotonic`.
    """
    mine = secrets.token_bytes(SIZE)
    if first:
        other.sendall(mine)
        theirs, said = _received(other, until), _received(other, until)
        _require(said, token, b"caller", mine, theirs)
        other.sendall(_answer(token, b"gate", mine, theirs))
    else:
        theirs = _received(other, until)
        other.sendall(mine + _answer(token, b"caller", theirs, mine))
        _require(_received(other, until), token, b"gate", theirs, mine)


def _answer(token: bytes, who: bytes, *numbers: bytes) -> bytes:
    return hmac.digest(token, b"rlflow " + who + b"".join(numbers), "sha256")


def _require(said: bytes, token: bytes, who: bytes, *numbers: bytes) -> None:
    if not hmac.compare_digest(said, _answer(token, who, *numbers)):
        raise WrongToken("the token of the other side is another one")


def _received(other: socket.socket, until: float) -> bytes:
    """The next number or answer; who sends it byte by byte has no more time for it."""
    found = b""
    while len(found) < SIZE:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        other.settimeout(left)
        part = other.recv(SIZE - len(found))
        if not part:
            raise WrongToken("the other side has hung up: its token may be another one")
        found += part
    return found


def _own(caller: socket.socket) -> bool:
    """Whether a connection over the loopback is of this user, as the kernel knows; Linux alone.

    One that its caller has closed is nobody's: the kernel calls it root's, without an inode.
    """
    found = [table for table in TABLES if table.exists()]
    rows = [line.split() for table in found for line in table.read_text().splitlines()[1:]]
    theirs, ours = (f":{end[1]:04X}" for end in (caller.getpeername(), caller.getsockname()))
    ends = [row for row in rows if row[1].endswith(theirs) and row[2].endswith(ours)]
    held = bool(ends) and all(row[9] != "0" for row in ends)
    return not found or (held and {int(row[7]) for row in ends} == {os.geteuid()})


def _accept(
    listening: socket.socket, way_of: Callable[[socket.socket], socket.socket], name: str
) -> None:
    """Have each connection taken by a thread of its own, and joined with the way that it is given.

    Those that have none yet are `UNPROVEN` at most; others wait for their turn.
    """
    places = threading.BoundedSemaphore(UNPROVEN)

    def take(caller: socket.socket) -> None:
        try:
            way = way_of(caller)
        except OSError:
            caller.close()
            return
        finally:
            places.release()
        _join(caller, way)

    def run() -> None:
        while listening.fileno() >= 0:
            places.acquire()
            try:
                caller, _ = listening.accept()
                threading.Thread(target=take, args=(caller,), name=name, daemon=True).start()
            except (OSError, RuntimeError):  # Who hung up early, or no file or thread is free.
                places.release()
                time.sleep(RETRY)

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
        with contextlib.suppress(OSError):  # Of one that is reset meanwhile.
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    back = threading.Thread(target=move, args=(other, one), name="rlflow gate", daemon=True)
    back.start()
    move(one, other)
    back.join()
    one.close()
    other.close()
