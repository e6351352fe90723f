"""Ranks meet at a port that nobody can take in between, on one address of the node alone."""

from __future__ import annotations

import socket
import threading

import pytest

from rlflow.errors import RunError
from rlflow.runtime.ray.rendezvous import hold_port, meet

pytestmark = pytest.mark.torch


def test_the_port_is_held_until_the_store_serves_it():
    port = hold_port("127.0.0.2")
    with socket.socket() as thief, pytest.raises(OSError, match="in use"):
        thief.bind(("127.0.0.2", port))
    joined = []
    early = threading.Thread(target=lambda: joined.append(meet("127.0.0.2", port, seconds=30)))
    early.start()

    first = meet("127.0.0.2", port, seconds=30)
    early.join(30)

    first.set("plan", "sent")
    assert b"sent" == joined[0].get("plan")
    with socket.socket() as elsewhere:
        elsewhere.bind(("127.0.0.1", port))


@pytest.mark.slow
def test_a_meeting_that_nobody_serves_is_given_up():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]

        with pytest.raises(RunError) as raised:
            meet("127.0.0.1", port, seconds=1)

    assert "E778" == raised.value.findings[0].code
    assert f"127.0.0.1:{port}" in raised.value.findings[0].expected


def test_an_address_of_another_node_cannot_be_held():
    with pytest.raises(RunError, match="E778"):
        hold_port("203.0.113.7")
