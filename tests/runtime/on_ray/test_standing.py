"""Ranks that wait in a collective for one that does not come: who is told, and how soon."""

from __future__ import annotations

import queue
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlflow.runtime.execute.deadlines import Deadlines
from rlflow.runtime.ray import backend, ranks
from rlflow.runtime.ray.backend import RayBackend
from rlflow.runtime.ray.cluster.standing import behind, crossed, uneven_calls
from rlflow.runtime.ray.made import Made, packed_made
from rlflow.runtime.ray.ranks import GroupCalls, RankStanding, rank_name
from rlflow.scheduler.plan.plan import HOST
from tests.runtime.test_local import action, plan_of

pytestmark = [pytest.mark.ray, pytest.mark.torch]


def standing(*groups, moves=0):
    counted = {name: GroupCalls(group=name, devices=of, count=n) for name, of, n in groups}
    return RankStanding(counted=counted, moves=moves)


ALL = (0, 1, 2)
SKIPPED = {
    0: standing(("train", ALL, 42)),
    1: standing(("train", ALL, 41)),
    2: standing(("train", ALL, 42)),
}
SAID = "rank of device 1 at collective 41, rank of device 0 and rank of device 2 at collective 42"


def test_a_rank_that_has_nothing_to_do_and_is_behind_keeps_the_others_waiting():
    assert [f"{SAID} of group train"] == behind(SKIPPED, idle={1})
    assert [] == behind(SKIPPED, idle=set())
    assert [] == behind(SKIPPED, idle={0})
    assert [] == behind(SKIPPED, idle={0, 1, 2})


def test_ranks_that_are_each_behind_the_other_wait_for_each_other():
    apart = {
        0: standing(("all", (0, 1), 8), ("mesh", (0, 1), 3)),
        1: standing(("all", (0, 1), 7), ("mesh", (0, 1), 4)),
    }
    assert 2 == len(crossed(apart))
    assert [] == crossed(SKIPPED)
    assert [f"{SAID} of group train"] == uneven_calls(SKIPPED)
    assert [] == uneven_calls({0: standing(("a", (0, 1), 1)), 1: standing(("b", (0, 1), 2))})


class Reference:
    def __init__(self, answer=None):
        self.answer = answer

    def _on_completed(self, told):
        if self.answer is not None:
            told(self.answer)


class Call:
    def __init__(self, answer):
        self.remote = lambda *_: Reference(answer)


class Actor:
    """A rank that answers at once or never."""

    def __init__(self, answers):
        now = time.time()
        self.run = Call(packed_made(Made(start=now, end=now)) if answers else None)


class Ranks:
    """Three ranks, of which the second answers, at these counts one look after another."""

    def __init__(self, *looks):
        self.looks = list(looks)
        self.killed = False

    def actor(self, device):
        return Actor(device == 1)

    def name(self, device):
        return rank_name(device)

    def standing(self, seconds):
        found = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(found, Exception):
            raise found
        return found

    def silent(self, seconds, senders):
        return ()

    def kill(self):
        self.killed = True


@pytest.fixture
def failed(monkeypatch):
    monkeypatch.setattr(backend, "TICK", 0.01)
    monkeypatch.setattr(backend, "APART", 0.05)
    monkeypatch.setattr(backend, "require_cluster", lambda: None)

    def call(*looks, deadline=60.0):
        plan = plan_of(replace(action("reshard", *ALL), kind="reshard", node=None))
        ranks, done = Ranks(*looks), queue.SimpleQueue()
        made = RayBackend(plan, ranks, deadlines=Deadlines(plan, deadline), now=time.perf_counter)
        made.submit(plan.actions[0], 3, done.put)
        try:
            return done.get(timeout=10).error, ranks
        finally:
            made.close()

    return call


def test_a_skipped_collective_ends_the_run_long_before_a_deadline(failed):
    error, ranks = failed(SKIPPED)
    assert "reshard in iteration 3: ranks wait in a collective" in str(error)
    assert ("E781", f"{SAID} of group train") == (error.findings[0].code, error.findings[0].got)
    assert ranks.killed


def test_what_still_moves_is_waited_for(failed):
    looks = [{**SKIPPED, 0: standing(("train", ALL, 42), moves=moves)} for moves in range(100)]
    error, _ = failed(*looks, deadline=0.6)
    assert "E763" == error.findings[0].code
    assert f"no answer from rank of device 0, rank of device 2; before, {SAID}" in str(error)


def test_a_watch_that_fails_ends_the_run(failed):
    error, ranks = failed(ZeroDivisionError("odd"))
    assert ("E782", "ZeroDivisionError('odd')") == (error.findings[0].code, error.findings[0].got)
    assert ranks.killed


def test_a_sender_is_frozen_and_not_who_waits_for_its_rows(monkeypatch):
    """Ray keeps back what is asked of a receiver as long as its rows have not come."""

    class Frozen:
        def __init__(self, device):
            self.progress = SimpleNamespace(remote=lambda action, iteration: device)

    answering = ([], [HOST, 0, 1])
    monkeypatch.setattr(ranks.ray, "wait", lambda asked, **_: answering)
    found = ranks.Ranks({device: Frozen(device) for device in (HOST, 0, 1, 2)}, {})

    assert (HOST, 0, 1) == found.silent(5)
    assert (0, 1) == found.silent(5, [{HOST: [1, 2]}])
    assert (1,) == found.silent(5, [{HOST: [0]}, {0: [1], 2: [0]}])
    assert (HOST, 0, 1) == found.silent(5, [{HOST: [1], 0: [HOST], 1: [0]}])
    assert (HOST, 0, 1) == found.silent(5, [{HOST: [2], 1: [1]}])
