"""What an environment is: where an episode begins, and what follows a response.

All that an environment remembers of an episode is in its state, plain data that travels with the
rows as JSON text; so any process may take any step. This file runs no step.
"""

from __future__ import annotations

import inspect
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

LARGEST = 3.4028234663852886e38  # of float32


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answers to a response: an observation, and whether the episode is over.

    `reward` is that of this step; the rewards of an episode add up. `state` is handed to the next
    step and must be plain data, as JSON knows it; None keeps the state as it was.
    """

    observation: str
    done: bool
    reward: float = 0.0
    state: Mapping[str, Any] | None = None


class Environment(ABC):
    """An environment of episodes. A subclass has a `step`, and a `begin` where it needs a state.

    `role` is the role of its observations as messages of a chat template.
    """

    role: ClassVar[str] = "user"

    def begin(self, *_: Any, **fields: Any) -> dict[str, Any]:
        """The state of a new episode; its parameters are the text fields of the row it reads."""
        return dict(fields)

    @abstractmethod
    def step(self, state: dict[str, Any], response: str) -> Step | Awaitable[Step]:
        """What follows the response of a turn, from nothing but the state; may be `async def`."""

    def fields(self) -> tuple[str, ...]:
        """The text fields of a row that `begin` reads."""
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        found = inspect.signature(self.begin).parameters.values()
        return tuple(parameter.name for parameter in found if parameter.kind in named)

    def describe(self) -> str:
        """The printed form."""
        return type(self).__qualname__


def checked_step(step: object) -> Step:
    """A step as it is, if it can be what follows; raises ValueError with what is wrong with it."""
    if not isinstance(step, Step):
        raise ValueError(f"returned {step!r:.60}, not an rf.Step")
    if not isinstance(step.observation, str):
        raise ValueError(f"observation is {step.observation!r:.60}, not text")
    if not isinstance(step.done, bool):
        raise ValueError(f"done is {step.done!r:.60}, not a bool")
    number = isinstance(step.reward, int | float)
    if not number or not math.isfinite(step.reward) or abs(step.reward) > LARGEST:
        raise ValueError(f"reward is {step.reward!r:.60}, not a finite number")
    state_text(step.state)
    return step


def state_text(state: object) -> str:
    """A state as JSON text; raises ValueError where JSON does not know it."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state is {state!r:.60}, not a dict")
    try:
        return json.dumps(dict(state), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"state is not JSON: {error}") from None
