"""Whether a Ray cluster answers at an address, found out in seconds and without Ray.

Ray itself asks for minutes before it gives up. Knows sockets and the first bytes of HTTP/2,
which Ray's head node speaks (RFC 9113, sections 3.4 and 6.5).
"""

from __future__ import annotations

import os
import socket
from typing import NoReturn

from rlflow.errors import Finding, RunError, UsageError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = 4
EMPTY_SETTINGS = bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0])
PATIENCE = 10.0


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of `host:port` or `[IPv6]:port`. Raises UsageError for anything else."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not host or not port.isdigit() or (":" in host and not address.startswith("[")):
        raise UsageError(
            Finding(
                code="E771",
                what=f"--address {address!r} is not the address of a Ray cluster",
                expected="host:port of its head node, as `ray start --head` prints it",
                fix="--address 10.0.0.1:6379",
            )
        )
    return host, int(port)


def require_head(address: str, seconds: float = PATIENCE) -> None:
    """Raise RunError unless something that may be a Ray head node answers in time."""
    host, port = host_and_port(address)
    try:
        with socket.create_connection((host, port), timeout=seconds) as connection:
            if os.environ.get("RAY_USE_TLS", "0") == "0" and not _speaks_http2(connection):
                _refuse(address, "something answers that is not Ray")
    except TimeoutError:
        _refuse(address, f"no answer within {seconds:g} s")
    except socket.gaierror:
        _refuse(address, f"no machine is known by the name {host!r}")
    except OSError as error:
        _refuse(address, f"{error.strerror or error}".lower())


def listens(address: str, seconds: float) -> bool:
    """Whether anything listens at the address."""
    try:
        with socket.create_connection(host_and_port(address), timeout=seconds):
            return True
    except OSError:
        return False


def _speaks_http2(connection: socket.socket) -> bool:
    """Greet, and look at the head of the first frame that comes back."""
    connection.sendall(PREFACE + EMPTY_SETTINGS)
    head = b""
    while len(head) < len(EMPTY_SETTINGS):
        received = connection.recv(len(EMPTY_SETTINGS) - len(head))
        if not received:
            return False
        head += received
    return head[3] == SETTINGS


def _refuse(address: str, got: str) -> NoReturn:
    raise RunError(
        Finding(
            code="E771",
            what=f"no Ray cluster at {address}",
            got=got,
            expected="the head node of a running cluster; it prints its address as it starts",
            fix="ray start --head, or leave --address out and one is started for the run",
        )
    )
