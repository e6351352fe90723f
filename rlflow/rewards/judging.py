"""Calling reward functions: in order, or many at a time with limits; what fails is told apart.

A failure is never a number. This file knows neither rows of a batch nor what becomes of a
sample without a reward.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlflow.errors import RlflowError, error_text, value_text
from rlflow.rewards.bounds import CONCURRENCY, PLAIN, Bounds, Unscorable, is_async
from rlflow.rewards.workers import Packed, WorkerLost, Workers, packed_function, workers
from rlflow.userfiles import kept_alive

Cause = Literal["raised", "timeout", "not a number", "lost"]
Function = Callable[..., Any]

LARGEST = 3.4028234663852886e38  # of float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a call has no reward; `error` is what it raised."""

    cause: Cause
    problem: str
    error: BaseException | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """The values of all calls in order, and how many attempts were made beyond the first."""

    values: list[Any]
    retried: int = 0


def judge(
    function: Function,
    samples: Sequence[Mapping[str, Any]],
    *,
    bounds: Bounds = PLAIN,
    check: Callable[[Any], Any] | None = None,
    failed: Callable[[int, Failure], None] | None = None,
) -> _Judged:
    """Call the function with the keywords of every sample; a `Failure` stands for its value.

    `check` turns a call's value into what is kept, or raises ValueError for one that is no
    reward. `failed` hears of a failure at once, with the sample's place, and may raise. An
    error of rlflow's own, such as no jail for programs, is no failure of a sample: it is raised.
    """
    keep = check or number
    told = failed or (lambda place, failure: None)
    if is_async(function) or bounds.timeout is not None:
        return _run(_many(function, samples, bounds, keep, told))
    values, retried = [], 0
    for place, sample in enumerate(samples):
        value, again = _in_order(function, sample, bounds, keep)
        retried += again
        if isinstance(value, Failure):
            told(place, value)
        values.append(value)
    return _Judged(values=values, retried=retried)


def number(value: Any) -> float:
    """A reward as a float; raises ValueError for text, None and what float32 cannot hold."""
    if isinstance(value, str | bytes) or value is None:
        raise ValueError(f"returned {value_text(value)}")
    try:
        found = float(value)
    except Exception as error:  # what a class of others makes of itself may raise anything
        raise ValueError(f"returned {value_text(value)}: {error_text(error)}") from None
    if not math.isfinite(found):
        raise ValueError(f"returned {found}")
    if abs(found) > LARGEST:
        raise ValueError(f"returned {found:g}, which float32 cannot hold")
    return found


def _in_order(
    function: Function, sample: Mapping[str, Any], bounds: Bounds, keep: Callable[[Any], Any]
) -> tuple[Any, int]:
    """The value of one sample and how often it was tried again."""
    for attempt in range(bounds.retries + 1):
        value = _kept(keep, lambda: function(**sample))
        if not _again(value) or attempt == bounds.retries:
            return value, attempt
        time.sleep(bounds.backoff * 2**attempt)
    raise AssertionError("there is at least one attempt")


def _kept(keep: Callable[[Any], Any], call: Callable[[], Any]) -> Any:
    try:
        with kept_alive():
            value = call()
    except RlflowError:
        raise
    except KeyboardInterrupt as error:
        # Ctrl-C comes to the main thread alone: elsewhere the function has raised it.
        if threading.current_thread() is threading.main_thread():
            raise
        return failure_of(error)
    except BaseException as error:  # SystemExit and classes of one's own beside Exception too
        return failure_of(error)
    try:
        return keep(value)
    except (TypeError, ValueError) as error:
        return Failure(cause="not a number", problem=str(error), error=error)


def failure_of(error: BaseException, seconds: float | None = None) -> Failure:
    """A failure for what a call raised; `seconds` is its time limit."""
    if isinstance(error, TimeoutError):
        late = f"no answer within {seconds:g} s" if seconds is not None else error_text(error)
        return Failure(cause="timeout", problem=late, error=error)
    if isinstance(error, WorkerLost):
        return Failure(cause="lost", problem=str(error), error=error)
    return Failure(cause="raised", problem=error_text(error), error=error)


def _again(value: Any) -> bool:
    """Whether another attempt may help."""
    return isinstance(value, Failure) and not isinstance(value.error, Unscorable)


async def _many(
    function: Function,
    samples: Sequence[Mapping[str, Any]],
    bounds: Bounds,
    keep: Callable[[Any], Any],
    told: Callable[[int, Failure], None],
) -> _Judged:
    """All samples, a bounded number at a time; those under way end with the first that raises."""
    pool = None if is_async(function) else workers(bounds.concurrency)
    sent = packed_function(function) if pool else None
    gate = asyncio.Semaphore(pool.size if pool else bounds.concurrency or CONCURRENCY)
    retried = 0

    async def one(place: int, sample: Mapping[str, Any]) -> Any:
        nonlocal retried
        value: Any = None
        for attempt in range(bounds.retries + 1):
            async with gate:
                value = await _attempt(sent or function, sample, bounds.timeout, keep, pool)
            if not _again(value) or attempt == bounds.retries:
                break
            retried += 1
            await asyncio.sleep(bounds.backoff * 2**attempt)
        if isinstance(value, Failure):
            told(place, value)
        return value

    under_way = [asyncio.ensure_future(one(*item)) for item in enumerate(samples)]
    try:
        return _Judged(values=list(await asyncio.gather(*under_way)), retried=retried)
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


async def _attempt(
    function: Function | Packed,
    sample: Mapping[str, Any],
    seconds: float | None,
    keep: Callable[[Any], Any],
    pool: Workers | None,
) -> Any:
    """One call within its time; an async function is cancelled after it, a plain one killed."""
    if isinstance(function, Packed):
        assert pool is not None
        call = asyncio.to_thread(pool.call, function, sample, seconds)
    else:
        call = _awaited(function, sample)
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=None if pool is not None else seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        return failure_of(TimeoutError(), seconds)
    try:
        value = task.result()
    except RlflowError:
        raise
    except TimeoutError as error:
        return failure_of(error, seconds if pool is not None else None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return failure_of(error)
    return _kept(keep, lambda: value)


async def _awaited(function: Function, sample: Mapping[str, Any]) -> Any:
    """The function's answer; what would end the event loop must not reach it as itself."""
    try:
        return await function(**sample)
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        # Ctrl-C comes to the main thread alone: elsewhere the function has raised it.
        pressed = threading.current_thread() is threading.main_thread()
        if isinstance(error, KeyboardInterrupt) and pressed:
            raise
        raise RuntimeError(error_text(error)) from error


def _run(made: Any) -> _Judged:
    """Run a coroutine to its end, in a thread of its own where an event loop runs here already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with kept_alive():
            judged: _Judged = asyncio.run(made)
        return judged
    found: list[_Judged | BaseException] = []

    def beside() -> None:
        try:
            with kept_alive():
                found.append(asyncio.run(made))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=beside, name="rlflow judges")
    thread.start()
    thread.join()
    (outcome,) = found
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
