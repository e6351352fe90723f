"""Addresses where no Ray cluster answers: one clear error each, long before Ray gives up."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from rlflow.errors import RunError, UsageError
from rlflow.runtime.ray.cluster import session
from rlflow.runtime.ray.cluster.joining import host_and_port, listens, require_head

HTTP = b"HTTP/1.1 400 Bad Request\r\n\r\n"
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@contextlib.contextmanager
def server(reply):
    """Accepts connections; answers each with the bytes given, or never."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(10)
        ended = threading.Event()

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection:
                        if reply is None:
                            ended.wait(10)
                        else:
                            connection.sendall(reply)
                            connection.recv(100)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        ended.set()
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.fixture
def nobody():
    """An address where nothing listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("10.0.0.1:6379", ("10.0.0.1", 6379)),
        ("head-node:1", ("head-node", 1)),
        ("[::1]:6379", ("::1", 6379)),
    ],
)
def test_an_address_has_a_host_and_a_port(address, parts):
    assert parts == host_and_port(address)


@pytest.mark.parametrize("address", ["", "10.0.0.1", ":6379", "10.0.0.1:", "::1:x", "::1", "a:b"])
def test_what_is_no_address_is_refused_with_an_example(address):
    with pytest.raises(UsageError) as raised:
        host_and_port(address)

    assert "E771" == raised.value.findings[0].code
    assert raised.value.findings[0].fix


def refusal(address, seconds=5.0):
    with pytest.raises(RunError) as raised:
        require_head(address, seconds)
    (finding,) = raised.value.findings
    assert "E771" == finding.code
    assert address in finding.what
    return finding.got


def test_nothing_listens(nobody):
    assert "refused" in refusal(nobody)
    assert not listens(nobody, 1.0)


def test_a_name_that_nobody_knows():
    assert "no.such.host.invalid" in refusal("no.such.host.invalid:6379")


def test_a_web_server_is_not_a_head_node():
    with server(HTTP) as address:
        assert "not Ray" in refusal(address)


def test_a_server_that_hangs_up_is_not_a_head_node():
    with server(b"") as address:
        assert "not Ray" in refusal(address)


def test_a_server_that_says_nothing():
    with server(None) as address:
        assert "no answer within 0.5 s" in refusal(address, 0.5)


def test_what_speaks_http2_may_be_a_head_node():
    with server(SETTINGS) as address:
        require_head(address, 5.0)

        assert listens(address, 5.0)


def test_a_head_that_was_said_to_come_back_is_waited_for_so_long(nobody, monkeypatch):
    monkeypatch.setattr(session, "PROBES", 1)
    assert "nothing answers" in session.Session(nobody)._gone()
    monkeypatch.setenv(session.PATIENCE, "60")
    patient = session.Session(nobody)
    clock = [100.0]
    monkeypatch.setattr(session.time, "monotonic", lambda: clock[0])
    assert "" == patient._gone()
    clock[0] = 159.0
    assert "" == patient._gone()
    clock[0] = 161.0
    assert "nothing answers" in patient._gone()
    patient._away.back()
    assert "" == patient._gone()
