"""Waiting for Ray with an end: answers within so many seconds, or one error that says why not.

An error that a worker raised comes back as it was raised there. Knows references and Ray's
exceptions, not what was asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import ray

from rlflow.errors import DeviceLostError, Finding, RlflowError
from rlflow.runtime.ray.cluster.alive import require_cluster
from rlflow.runtime.ray.cluster.causes import LOST, cause_of, unwrapped

__all__ = ["NoAnswer", "cause_of", "wait"]

Names: TypeAlias = Mapping[int, str] | Mapping[str, str]
GRACE = 3.0
FIRST_LOOK = 0.05
LOOK = 0.5
GET_SECONDS = 30.0


def wait(
    refs: Sequence[Any],
    seconds: float,
    *,
    doing: str,
    who: Names | None = None,
    told: Callable[[Any], BaseException | None] = lambda _: None,
    moving: Callable[[], bool] = lambda: False,
) -> list[Any]:
    """What the references hold, in their order, all of them within so many seconds.

    `who` names those asked, by place in `refs` or by a reference's hexadecimal id. The first
    error ends the wait, but one that may be the mere echo of a death, such as a broken
    connection, waits a moment for the death to be known; so does one that is `told` by an answer
    instead of raised. The time begins anew where `moving` says, when it is over, that work has
    gone on since. Raises what a worker raised or told, and DeviceLostError where one died or did
    not answer, RunError where the cluster is gone.
    """
    answers: dict[Any, Any] = {}
    errors: dict[Any, BaseException] = {}
    pending = list(dict.fromkeys(refs))
    end, look = time.monotonic() + seconds, FIRST_LOOK
    while pending and not any(_tells_all(errors[ref]) for ref in errors.keys() - answers.keys()):
        left = max(0.0, end - time.monotonic())
        ready, pending = ray.wait(pending, num_returns=len(pending), timeout=min(look, left))
        for ref in ready:
            _take(ref, answers, errors, told)
        if errors:
            end = min(end, time.monotonic() + GRACE)
        if pending and time.monotonic() >= end:
            if errors or not moving():
                break
            end = time.monotonic() + seconds
        if pending:
            require_cluster()
        look = min(LOOK, 2 * look)
    names = {ref: _name(place, ref, who or {}) for place, ref in enumerate(refs)}
    if errors:
        raise _most_telling(errors, names, doing)
    if pending:
        raise _late([names[ref] for ref in pending], len(names), doing, seconds)
    return [answers[ref] for ref in refs]


def _take(
    ref: Any,
    answers: dict[Any, Any],
    errors: dict[Any, BaseException],
    told: Callable[[Any], BaseException | None],
) -> None:
    """Note what a reference that is ready holds, and the error that it may tell."""
    try:
        answers[ref] = ray.get(ref, timeout=GET_SECONDS)
    except Exception as error:
        errors[ref] = unwrapped(error)
        return
    said = told(answers[ref])
    if said is not None:
        errors[ref] = said


def _tells_all(error: BaseException) -> bool:
    """Whether nothing that another worker says could explain this error."""
    return isinstance(error, (*LOST, RlflowError))


def _most_telling(
    errors: Mapping[Any, BaseException], names: Mapping[Any, str], doing: str
) -> BaseException:
    """A lost worker explains the others' broken connections; else one of ours, else the first."""
    ranked = sorted(
        errors, key=lambda ref: (not isinstance(errors[ref], LOST), not _tells_all(errors[ref]))
    )
    first = ranked[0]
    error = errors[first]
    if not isinstance(error, LOST):
        error.add_note(f"raised by {names[first]}, {doing}")
        return error
    lost = DeviceLostError(
        Finding(
            code="E776",
            what=f"{doing}: {names[first]} was lost",
            got=cause_of(error),
            expected="every worker process to live as long as the run",
        )
    )
    lost.__cause__ = error
    return lost


class NoAnswer(DeviceLostError):
    """Somebody who was asked has not answered in time."""


def _late(missing: Sequence[str], asked: int, doing: str, seconds: float) -> NoAnswer:
    return NoAnswer(
        Finding(
            code="E775",
            what=f"{doing}: no answer within {seconds:.3g} s",
            got=f"{asked - len(missing)} of {asked} answered; missing: {', '.join(missing)}",
            expected="an answer of each; one that is busy needs a longer deadline",
        )
    )


def _name(place: int, ref: Any, who: Mapping[Any, str]) -> str:
    return who.get(place) or who.get(ref.hex()) or f"worker {place}"
