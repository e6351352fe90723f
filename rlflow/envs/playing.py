"""Taking steps of many episodes at a time, each within its time; what fails is told apart.

An async step is awaited; a plain one runs in a thread, or with a time limit in a process that is
killed after it. This file knows neither rows nor what becomes of an episode that failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from rlflow.envs.base import Environment, Step, checked_step
from rlflow.rewards.bounds import CONCURRENCY, Bounds, is_async
from rlflow.rewards.judging import Failure, judge

Failed = Callable[[int, Failure], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A response, and the state it comes upon; for the first turn the fields of a new episode."""

    response: str
    state: Mapping[str, Any] | None = None
    fields: Mapping[str, str] | None = None


def play_turns(
    environment: Environment, turns: Sequence[Turn], *, bounds: Bounds, failed: Failed
) -> list[Step | Failure]:
    """The step that follows each turn, with its state; a `Failure` stands for one there is not.

    At most `bounds.concurrency` steps are under way at a time, 16 unless said. `failed` hears of
    a failure at once, with the turn's place, and may raise.
    """
    if not turns:
        return []
    calls = [{"turn": turn} for turn in turns]
    if is_async(environment.step):
        return _judged(_Awaited(environment), calls, bounds, failed)
    if bounds.timeout is not None:
        return _judged(_Called(environment), calls, bounds, failed)
    size = min(bounds.concurrency or CONCURRENCY, len(turns))
    pool = ThreadPoolExecutor(size, thread_name_prefix="rlflow episodes")
    try:
        return _judged(_InThread(environment, pool), calls, bounds, failed)
    finally:
        pool.shutdown(cancel_futures=True)


def _judged(
    function: Any, calls: list[dict[str, Turn]], bounds: Bounds, failed: Failed
) -> list[Step | Failure]:
    return judge(function, calls, bounds=bounds, check=checked_step, failed=failed).values


class _Called:
    """An environment's step as a function; its module is the environment's, so that travels too."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.__module__ = type(environment).__module__

    def __call__(self, turn: Turn) -> Any:
        """Begin the episode where it is new, and take its step."""
        state = self._state(turn)
        return _with_state(self.environment.step(dict(state), turn.response), state)

    def _state(self, turn: Turn) -> Mapping[str, Any]:
        if turn.state is not None:
            return turn.state
        return self.environment.begin(**dict(turn.fields or {}))


class _InThread(_Called):
    """The same in a thread of a pool."""

    def __init__(self, environment: Environment, pool: ThreadPoolExecutor) -> None:
        super().__init__(environment)
        self._pool = pool

    async def __call__(self, turn: Turn) -> Any:
        """Wait for the thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, super().__call__, turn)


class _Awaited(_Called):
    """The same for an async step."""

    async def __call__(self, turn: Turn) -> Any:
        """Await the step."""
        state = self._state(turn)
        taken: Any = self.environment.step(dict(state), turn.response)
        return _with_state(await taken, state)


def _with_state(step: Any, state: Mapping[str, Any]) -> Any:
    """A step whose state is told, also where it stays."""
    return replace(step, state=state) if isinstance(step, Step) and step.state is None else step
