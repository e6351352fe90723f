"""How reward functions may be called: limits, and how a function says that it has no answer.

Declaring a pipeline reads this file, which calls nothing and imports little.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CONCURRENCY = 16


class Unscorable(Exception):
    """Raised by a reward function: the sample has no reward, and trying again is no use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How a function is called: at most `concurrency` calls at a time, `timeout` seconds each.

    A call that fails is repeated up to `retries` times, after `backoff` seconds and then
    twice as long each time.
    """

    concurrency: int | None = None
    timeout: float | None = None
    retries: int = 0
    backoff: float = 1.0

    @property
    def longest(self) -> float:
        """Seconds that a call takes at most with all its repetitions; 0 where nothing limits it."""
        if self.timeout is None:
            return 0.0
        return (self.retries + 1) * self.timeout + self.backoff * (2.0**self.retries - 1)


PLAIN = Bounds()


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling the function gives an awaitable."""
    call = getattr(type(function), "__call__", None)  # noqa: B004  the method is looked at
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
