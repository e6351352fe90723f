"""Waiting with an end: values in order, one error that names who, and why a worker is gone."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import pytest
import ray
from ray import cloudpickle, exceptions

from rlflow.errors import Finding, RewardError, RunError
from rlflow.runtime.ray.cluster import deadline
from rlflow.runtime.ray.cluster.alive import bounded
from rlflow.runtime.ray.cluster.causes import cause_of
from rlflow.runtime.ray.cluster.deadline import wait

pytestmark = pytest.mark.ray
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it

FINDING = Finding(code="E640", what="the reward is a string", got="'1'", expected="a number")


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


@ray.remote(num_cpus=0)
class Worker:
    def pid(self):
        return os.getpid()

    def after(self, seconds, value):
        time.sleep(seconds)
        return value

    def ours(self):
        raise RewardError(FINDING, summary="in row 3")

    def plain(self, text):
        raise ConnectionError(text)

    def unpicklable(self):
        raise Unpicklable("a", "b")

    def end(self, how):
        time.sleep(0.2)
        {
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "terminate": lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(60)),
            "exit": lambda: sys.exit(3),
            "leave": lambda: os._exit(0),
            "crash": lambda: ctypes.string_at(0),
        }[how]()


@ray.remote(num_cpus=0)
class Unborn:
    def __init__(self):
        raise ValueError("no such device")

    def pid(self):
        return os.getpid()


@pytest.fixture(scope="module")
def pair(session):
    """Two workers."""
    actors = [Worker.remote(), Worker.remote()]
    wait([actor.pid.remote() for actor in actors], 60, doing="starting")
    return actors


@pytest.fixture
def mortal(session):
    """A worker of this test's own, and its process."""
    actor = Worker.remote()
    (pid,) = wait([actor.pid.remote()], 60, doing="starting")
    return actor, pid


@pytest.mark.slow
def test_values_come_in_the_order_they_were_asked_for(pair):
    slow, quick = pair
    refs = [slow.after.remote(0.2, "slow"), quick.after.remote(0, "quick")]

    assert ["slow", "quick", "slow"] == wait([*refs, refs[0]], 20, doing="asking")
    assert [] == wait([], 0, doing="asking nobody")


def test_who_does_not_answer_is_named(pair):
    refs = [pair[0].after.remote(0, 1), pair[1].after.remote(1, 2)]

    with pytest.raises(RunError) as raised:
        wait(refs, 0.5, doing="loading", who={0: "rank 0", 1: "rank 1 on node 10.0.0.2"})

    (finding,) = raised.value.findings
    assert "E775" == finding.code
    assert "loading: no answer within 0.5 s" == finding.what
    assert "1 of 2 answered; missing: rank 1 on node 10.0.0.2" == finding.got
    assert 2 == ray.get(refs[1])


def test_an_error_of_ours_comes_back_whole_while_others_hang(pair):
    hanging = pair[0].after.remote(1, None)

    with pytest.raises(RewardError) as raised:
        wait([hanging, pair[1].ours.remote()], 20, doing="scoring", who={1: "rank 1"})

    assert (FINDING,) == raised.value.findings
    assert "in row 3" == raised.value.summary
    assert ["raised by rank 1, scoring"] == raised.value.__notes__
    assert "in ours" in str(raised.value.__cause__)
    ray.get(hanging)


def told(answer):
    """The error that an answer stands for."""
    return RewardError(FINDING) if answer == "wrong" else None


@pytest.mark.slow
def test_an_error_that_is_told_ends_the_wait_while_others_hang(pair, monkeypatch):
    monkeypatch.setattr(deadline, "GRACE", 0.2)
    hanging = pair[0].after.remote(3, None)

    with pytest.raises(RewardError) as raised:
        wait([hanging, pair[1].after.remote(0, "wrong")], 20, doing="loading", told=told)

    assert (FINDING,) == raised.value.findings
    assert ([], [hanging]) == ray.wait([hanging], timeout=0)
    ray.get(hanging)


@pytest.mark.slow
def test_a_death_is_the_cause_of_an_error_that_is_told(pair, mortal):
    actor, _ = mortal

    refs = [pair[0].after.remote(0, "wrong"), actor.end.remote("kill")]
    with pytest.raises(RunError, match=r"E776") as raised:
        wait(refs, 20, doing="saving", who={1: "rank 1"}, told=told)

    assert "rank 1 was lost" in raised.value.findings[0].what


def test_any_other_error_comes_back_as_it_was_raised(pair):
    ref = pair[0].plain.remote("reset by peer")

    with pytest.raises(ConnectionError) as raised:
        wait([ref], 20, doing="meeting", who={ref.hex(): "rank 0"})

    assert "reset by peer" == str(raised.value)
    assert ["raised by rank 0, meeting"] == raised.value.__notes__


def test_an_error_that_cannot_be_read_here_still_says_what_it_was(pair):
    with pytest.raises(Exception, match="Unpicklable"):
        wait([pair[0].unpicklable.remote()], 20, doing="working")


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("kill", "was killed"),
        ("terminate", "stopped by SIGTERM"),
        ("exit", "exit code 3"),
        ("leave", "ended without a word"),
        ("crash", "crashed (SIGSEGV)"),
    ],
)
def test_a_death_is_one_sentence(how, said, pair, mortal):
    actor, pid = mortal

    with pytest.raises(RunError) as raised:
        wait([pair[0].pid.remote(), actor.end.remote(how)], 30, doing="updating", who={1: "rank 1"})

    (finding,) = raised.value.findings
    assert ("E776", "updating: rank 1 was lost") == (finding.code, finding.what)
    assert f"its process {pid} on node 127.0.0.1" in finding.got
    assert said in finding.got
    assert "\n" not in finding.got


def test_a_death_explains_the_connections_it_broke(pair, mortal):
    echo = pair[0].plain.remote("connection closed by peer")
    death = mortal[0].end.remote("exit")

    with pytest.raises(RunError, match="rank 1 was lost"):
        wait([echo, death], 30, doing="updating", who={0: "rank 0", 1: "rank 1"})


@pytest.mark.slow
def test_a_worker_stopped_by_us_and_one_that_never_was(mortal):
    hanging = mortal[0].after.remote(300, None)
    ray.kill(mortal[0])
    with pytest.raises(RunError, match="stopped by this run"):
        wait([hanging], 30, doing="asking")
    unborn = Unborn.remote()
    with pytest.raises(RunError, match="could not be created: ValueError: no such device"):
        wait([unborn.pid.remote()], 30, doing="asking")


def test_a_call_that_hangs_is_given_up():
    assert 3 == bounded(lambda: 3, 20, doing="counting")
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, 20, doing="dividing")
    with pytest.raises(RunError, match="E779") as raised:
        bounded(lambda: time.sleep(1), 0.05, doing="sleeping")

    assert "sleeping: Ray does not answer" == raised.value.findings[0].what


def lost(detail):
    return exceptions.RayActorError(error_msg=f"died\n\tpid: 12\n\tip: 10.0.0.2\n{detail}")


@pytest.mark.parametrize(
    ("detail", "said"),
    [
        ("Task was killed due to the node running low on memory.", "its node ran out of memory"),
        ("The actor died because its node has died. Node Id: ab", "died with its node"),
        ("The actor is dead because its owner has died.", "process that started it died"),
        ("Worker exit type: INTENDED_USER_EXIT by an user request.", "ended by itself"),
        (
            "Worker unexpectedly exits with a connection error code 2. End of file. Some common "
            "causes include: (1) the process was killed by the OOM killer, exit code 9",
            "was killed, or ended without a word",
        ),
    ],
)
def test_what_ray_says_of_a_death_is_put_plainly(detail, said):
    assert cause_of(lost(detail)).startswith("its process 12 on node 10.0.0.2 ")
    assert said in cause_of(lost(detail))


@pytest.mark.slow
def test_causes_of_what_is_no_death():
    outer = RuntimeError("outer")
    outer.__cause__ = ValueError("first line\nthe reason")

    assert "RuntimeError: the reason" == cause_of(outer)
    assert "the reward is a string" == cause_of(RewardError(FINDING))
