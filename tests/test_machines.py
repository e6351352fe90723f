"""A cluster that is joined while it is still coming up."""

from __future__ import annotations

import pytest

from rlflow.cli import machines
from rlflow.cli.commands import Target
from rlflow.errors import Finding, RunError
from rlflow.runtime.ray.cluster import joining

FOUR = Target(pipeline="x.py", devices="cpu:4")


def answers(monkeypatch, *found):
    """A cluster that answers so, one after the other; how often it was asked."""
    left = list(found)

    def rooms(address, target):
        now = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(now, Exception):
            raise now
        return now

    monkeypatch.setattr(machines, "_rooms_now", rooms)
    monkeypatch.setattr(machines, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(joining, "listens", lambda *_: True)


def nobody():
    return RunError(Finding(code="E771", what="no Ray cluster at h:1"))


def test_a_cluster_is_waited_for_until_it_answers_and_has_room(monkeypatch):
    answers(monkeypatch, nobody(), (2,), (2, 2))

    assert (2, 2) == machines.rooms_at("h:1", FOUR, wait=60)


def test_a_cluster_that_stays_too_small_is_taken_as_it_is(monkeypatch):
    answers(monkeypatch, (2,))

    assert (2,) == machines.rooms_at("h:1", FOUR, wait=0.05)


def test_without_a_wait_a_cluster_is_asked_once(monkeypatch):
    answers(monkeypatch, nobody(), (4,))

    with pytest.raises(RunError, match="E771"):
        machines.rooms_at("h:1", FOUR, wait=0)
