"""Calling reward functions: order, bounds, retries, time limits, and what counts as a number."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlflow.errors import Finding, RewardError
from rlflow.rewards import Unscorable, judging
from rlflow.rewards.bounds import Bounds, is_async
from rlflow.rewards.judging import Failure, judge, number
from rlflow.rewards.workers import Workers, packed_function


def samples(count):
    return [{"place": place} for place in range(count)]


def causes(judged):
    return [value.cause if isinstance(value, Failure) else value for value in judged.values]


# --- numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"), [(1, 1.0), (True, 1.0), (-0.5, -0.5), (3.4e38, 3.4e38), (10**30, 1e30)]
)
def test_what_is_a_number(value, expected):
    assert expected == number(value)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "returned None"),
        ("1", "returned '1'"),
        (b"1", "returned b'1'"),
        (math.nan, "returned nan"),
        (math.inf, "returned inf"),
        (1e39, "returned 1e+39, which float32 cannot hold"),
        (-1e39, "returned -1e+39, which float32 cannot hold"),
        (10**400, "int too large"),
        (1j, "complex"),
        ([1.0], "float() argument"),
        ({}, "float() argument"),
    ],
)
def test_what_is_none(value, problem):
    with pytest.raises(ValueError, match="returned") as caught:
        number(value)
    assert problem in str(caught.value)


class Unsayable(Exception):
    """Neither shown, told nor a number: whatever it is asked for, it raises."""

    def __str__(self):
        raise RuntimeError

    __repr__ = __float__ = __str__


def test_what_cannot_even_be_told_is_told_by_its_class():
    def function(place):
        raise Unsayable

    for judged in (judge(function, samples(1)), judge(awaiting(Unsayable), samples(1))):
        assert "Unsayable, whose message cannot be told (RuntimeError)" in judged.values[0].problem
    judged = judge(lambda place: KeyError_(), samples(1))
    assert "returned a value of class KeyError_: KeyError: 'no'" == judged.values[0].problem


class KeyError_:
    """A number that is none, by an error that is no TypeError."""

    def __float__(self):
        raise KeyError("no")

    def __repr__(self):
        raise KeyError("no")


def awaiting(kind):
    async def function(place):
        raise kind

    return function


def test_a_copy_that_a_function_forks_and_that_comes_back_ends(tmp_path):
    def function(place):
        copy = os.fork()
        if copy:
            os.waitpid(copy, 0)
        return 1.0

    judge(function, samples(1))
    with (tmp_path / "back").open("a") as file:  # by this process alone
        file.write("once")
    assert "once" == (tmp_path / "back").read_text()


# --- in order -------------------------------------------------------------------------------


def test_values_come_in_the_order_of_the_samples():
    called = []

    def function(place):
        called.append(place)
        return place

    assert [0.0, 1.0, 2.0] == judge(function, samples(3)).values
    assert [0, 1, 2] == called


class Odd(BaseException):
    """No Exception, as some libraries have for what nobody should catch."""


@pytest.mark.parametrize(
    "kind", [ValueError, SystemExit, RecursionError, MemoryError, GeneratorExit, Odd]
)
def test_whatever_a_function_raises_is_a_failure_of_its_sample(kind):
    def function(place):
        if place == 1:
            raise kind("no")
        return 1.0

    judged = judge(function, samples(3))
    assert [1.0, "raised", 1.0] == causes(judged)
    assert f"{kind.__name__}: no" == judged.values[1].problem
    assert isinstance(judged.values[1].error, kind)


def test_ctrl_c_is_not_a_failure():
    def function(place):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge(function, samples(1))


@pytest.mark.parametrize("awaited", [False, True])
def test_in_a_thread_nobody_presses_ctrl_c(awaited):
    def plain(place):
        raise KeyboardInterrupt

    async def waiting(place):
        raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as threads:
        judged = threads.submit(judge, waiting if awaited else plain, samples(1)).result()
    assert ["raised"] == causes(judged)
    assert "KeyboardInterrupt" in judged.values[0].problem


@pytest.mark.parametrize("awaited", [False, True])
def test_a_function_that_ends_its_process_ends_its_call(awaited):
    """Here it raises; a forked copy ends as it always did; afterwards nothing is left."""
    real = os._exit

    def plain(place):
        copy = os.fork()
        if copy == 0:
            os._exit(7)
        assert 7 == os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
        os._exit(0)

    async def waiting(place):
        os._exit(0)

    judged = judge(waiting if awaited else plain, samples(1))
    assert ["raised"] == causes(judged)
    assert "os._exit(0)" in judged.values[0].problem
    assert real is os._exit


def test_the_first_failure_may_stop_the_calls():
    called = []

    def function(place):
        called.append(place)
        return math.nan

    def stop(place, failure):
        raise RuntimeError(f"{place}: {failure.problem}")

    with pytest.raises(RuntimeError, match="0: returned nan"):
        judge(function, samples(3), failed=stop)
    assert [0] == called


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("worth", [math.nan, None])
def test_a_flaky_function_is_called_again_and_the_attempts_are_counted(awaited, worth):
    tries = {}

    def flaky(place):
        tries[place] = tries.get(place, 0) + 1
        if tries[place] <= place:
            return worth
        return 7.0

    async def later(place):
        return flaky(place)

    judged = judge(later if awaited else flaky, samples(4), bounds=Bounds(retries=2, backoff=0))
    assert [7.0, 7.0, 7.0, "not a number"] == causes(judged)
    assert 0 + 1 + 2 + 2 == judged.retried


@pytest.mark.parametrize("awaited", [False, True])
def test_an_unscorable_sample_is_not_tried_again(awaited):
    tries = []

    def function(place):
        tries.append(place)
        raise Unscorable("refused")

    async def later(place):
        return function(place)

    judged = judge(later if awaited else function, samples(2), bounds=Bounds(retries=5, backoff=0))
    assert ["raised", "raised"] == causes(judged)
    assert (0, 2) == (judged.retried, len(tries))


# --- async ----------------------------------------------------------------------------------


class Gate:
    """Judges that wait until `most` of them are in, and say how many were in at once."""

    def __init__(self, most):
        self.most, self.inside, self.peak = most, 0, 0

    async def __call__(self, place):
        self.inside += 1
        self.peak = max(self.peak, self.inside)
        for _ in range(50):
            await asyncio.sleep(0)
        self.inside -= 1
        return float(place)


@pytest.mark.parametrize("most", [1, 3, 8])
def test_so_many_calls_are_under_way_and_no_more(most):
    gate = Gate(most)
    judged = judge(gate, samples(20), bounds=Bounds(concurrency=most))
    assert list(map(float, range(20))) == judged.values
    assert most == gate.peak


def test_a_callable_object_may_be_async():
    assert is_async(Gate(1))
    assert not is_async(number)


def test_a_judge_that_does_not_answer_costs_its_time_and_no_other_sample():
    async def function(place):
        if place == 1:
            await asyncio.Event().wait()
        return 1.0

    judged = judge(function, samples(3), bounds=Bounds(timeout=0.05))
    assert [1.0, "timeout", 1.0] == causes(judged)
    assert "no answer within 0.05 s" == judged.values[1].problem


@pytest.mark.parametrize("kind", [ValueError, SystemExit, asyncio.CancelledError, TimeoutError])
def test_what_a_judge_raises_is_its_own_failure(kind):
    async def function(place):
        if place == 0:
            raise kind("no")
        return 1.0

    expected = "timeout" if kind is TimeoutError else "raised"
    assert [expected, 1.0] == causes(judge(function, samples(2)))


def test_the_first_failure_cancels_judges_that_wait():
    cancelled = []

    async def function(place):
        if place == 2:
            return "no number"
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(place)
            raise

    def stop(place, failure):
        raise RuntimeError(f"{place}: {failure.problem}")

    with pytest.raises(RuntimeError, match="2: returned 'no number'"):
        judge(function, samples(4), failed=stop)
    assert [0, 1, 3] == sorted(cancelled)


def test_judges_run_where_an_event_loop_runs_already():
    async def function(place):
        return 2.0

    async def outer():
        return judge(function, samples(2)).values

    assert [2.0, 2.0] == asyncio.run(outer())


# --- plain functions with a time limit ------------------------------------------------------


def trouble(place):
    """What a plain function may do to its process."""
    if place == 1:
        while True:
            pass
    if place == 2:
        os._exit(3)
    if place == 3:
        raise KeyError("no")
    if place == 4:
        raise SystemExit(0)
    sys.stdout.write("x" * 100_000)
    sys.stdout.flush()
    return float(place)


def test_a_plain_function_with_a_time_limit_is_killed_after_it():
    judged = judge(trouble, samples(6), bounds=Bounds(timeout=0.5, concurrency=2))
    assert [0.0, "timeout", "lost", "raised", "raised", 5.0] == causes(judged)
    assert "no answer within 0.5 s" == judged.values[1].problem
    assert "the process of the call died (exit code 3)" == judged.values[2].problem
    assert "KeyError: 'no'" == judged.values[3].problem
    assert "SystemExit: 0" in judged.values[4].problem


def test_processes_are_kept_from_call_to_call_and_know_functions_made_here():
    offset = 10

    def process(place):
        return os.getpid() + 0 * (place + offset)

    bounds = Bounds(timeout=20, concurrency=1)
    first = judge(process, samples(2), bounds=bounds, check=int).values
    again = judge(process, samples(2), bounds=bounds, check=int).values
    assert 1 == len({*first, *again})
    assert os.getpid() not in first


@pytest.mark.parametrize("awaited", [False, True])
def test_an_error_of_rlflows_own_is_no_failure_of_a_sample(awaited):
    def function(place):
        raise RewardError(Finding(code="E284", what="no jail"))

    async def later(place):
        return function(place)

    with pytest.raises(RewardError, match="no jail"):
        judge(later if awaited else function, samples(2))


@pytest.mark.slow
def test_closing_ends_every_process():
    pool = Workers(2)
    with ThreadPoolExecutor(2) as threads:
        meet = [threads.submit(pool.call, packed_function(os.getppid), {}, 20.0) for _ in range(4)]
        assert {os.getpid()} == {done.result() for done in meet}
    held = [process for process in pool._idle.queue if process is not None]
    assert held
    pool.close()
    assert not any(process.alive() for process in held)
    assert [None, None] == list(pool._idle.queue)
    assert os.getpid() == pool.call(packed_function(os.getppid), {}, 20.0)
    pool.close()


@pytest.mark.parametrize("awaited", [False, True])
def test_the_pause_doubles_with_every_attempt(monkeypatch, awaited):
    waited = []

    async def note(seconds):
        waited.append(seconds)

    monkeypatch.setattr(judging.time, "sleep", waited.append)
    monkeypatch.setattr(judging.asyncio, "sleep", note)

    def function(place):
        return None

    async def later(place):
        return None

    judge(later if awaited else function, samples(1), bounds=Bounds(retries=3, backoff=0.5))
    assert [0.5, 1.0, 2.0] == waited
