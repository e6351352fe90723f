"""Ranks meet at a port that nobody can take in between, on one address of the node alone."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from rlflow.errors import RunError
from rlflow.runtime.ray.cluster import gate
from rlflow.runtime.ray.places import interface_of
from rlflow.runtime.ray.rendezvous import hold_port, meet

pytestmark = pytest.mark.torch


def met(address, port):
    return meet(address, port, token="the run's", seconds=30)


def test_the_port_is_held_until_the_store_serves_it():
    port = hold_port("127.0.0.2")
    with socket.socket() as thief, pytest.raises(OSError, match="in use"):
        thief.bind(("127.0.0.2", port))
    joined = []
    early = threading.Thread(target=lambda: joined.append(met("127.0.0.2", port)))
    early.start()

    first = met("127.0.0.2", port)
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
            meet("127.0.0.1", port, token="t", seconds=1)

    assert "E778" == raised.value.findings[0].code
    assert f"127.0.0.1:{port}" in raised.value.findings[0].expected


def test_an_address_of_another_node_cannot_be_held():
    with pytest.raises(RunError, match="E778"):
        hold_port("203.0.113.7")


def test_who_has_another_token_learns_nothing_and_the_others_meet():
    port = hold_port("127.0.0.2")
    first = met("127.0.0.2", port)
    first.set("addresses", "of all ranks")

    with pytest.raises(RunError, match="E778") as raised:
        meet("127.0.0.2", port, token="guessed", seconds=5)
    with pytest.raises(dist.DistNetworkError):  # torch's own client, which has none
        dist.TCPStore("127.0.0.2", port, is_master=False, timeout=timedelta(seconds=1))
    with socket.create_connection(("127.0.0.2", port), timeout=5) as silent:
        number = silent.recv(64)
        silent.sendall(bytes(64))
        assert (32, b"") == (len(number), silent.recv(64))

    assert "token" in raised.value.findings[0].got
    assert b"of all ranks" == met("127.0.0.2", port).get("addresses")


def test_who_stands_at_the_port_without_the_token_is_not_believed():
    with socket.create_server(("127.0.0.1", 0)) as forged:
        port = forged.getsockname()[1]

        def answer():
            caller, _ = forged.accept()
            with caller:
                caller.sendall(bytes(32))
                caller.recv(64)
                caller.sendall(bytes(32))

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(RunError, match="E778"):
            meet("127.0.0.1", port, token="the run's", seconds=5)


def test_an_interface_is_known_by_its_address():
    assert "lo" == interface_of("127.0.0.1")
    assert "" == interface_of("203.0.113.7")


def test_who_has_hung_up_is_nobody_though_the_kernel_calls_it_roots():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        caller = socket.create_connection(listening.getsockname())
        taken, _ = listening.accept()
        with taken:
            there = gate._own(taken)
            caller.sendall(b"last words")
            caller.close()

            assert (True, False) == (there, gate._own(taken))


def test_who_answers_byte_by_byte_is_given_no_more_time(monkeypatch):
    monkeypatch.setattr(gate, "ANSWER", 0.3)
    port = hold_port("127.0.0.2")
    met("127.0.0.2", port)
    with socket.create_connection(("127.0.0.2", port), timeout=10) as slow:
        number, sent = slow.recv(32), 0
        with contextlib.suppress(OSError):  # It has hung up.
            while sent < 63:
                slow.sendall(b"x")
                sent += 1
                time.sleep(0.05)

    assert 32 == len(number)
    assert 1 < sent < 30


def test_those_who_say_nothing_keep_nobody_out_for_longer_than_their_time(monkeypatch):
    monkeypatch.setattr(gate, "ANSWER", 0.3)
    monkeypatch.setattr(gate, "UNPROVEN", 2)
    port = hold_port("127.0.0.2")
    first = met("127.0.0.2", port)
    silent = [socket.create_connection(("127.0.0.2", port)) for _ in range(5)]

    met("127.0.0.2", port).set("plan", "sent")

    assert b"sent" == first.get("plan")
    assert [b""] * 5 == [(each.recv(32), each.recv(1), each.close())[1] for each in silent]
