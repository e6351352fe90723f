"""The operators of a pipeline: `from rlflow import ops`. Declaring one runs nothing."""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from rlflow.errors import Finding, GraphError, near_names
from rlflow.graph.source import declared_at
from rlflow.graph.trace import require_handles
from rlflow.ops.averages import average
from rlflow.ops.declare import advantage, metrics, prompts, tokenize
from rlflow.ops.drafting import train_drafter
from rlflow.ops.forwards import log_probs, values
from rlflow.ops.loops.curriculum import track
from rlflow.ops.loops.episodes import act, ended, episodes, observe
from rlflow.ops.loops.loops import informative, repeat
from rlflow.ops.models import evaluate, rollout, update
from rlflow.ops.pairs import pair, scores
from rlflow.ops.rows.choices import duplicate, keep, split
from rlflow.ops.rows.joins import join
from rlflow.ops.rows.replays import replay
from rlflow.ops.rows.sets import concat
from rlflow.ops.scoring import reward
from rlflow.strict import strict

__all__ = [
    "act",
    "advantage",
    "average",
    "concat",
    "duplicate",
    "ended",
    "episodes",
    "evaluate",
    "informative",
    "join",
    "keep",
    "log_probs",
    "metrics",
    "observe",
    "pair",
    "prompts",
    "repeat",
    "replay",
    "reward",
    "rollout",
    "scores",
    "split",
    "tokenize",
    "track",
    "train_drafter",
    "update",
    "values",
]


def _of_handles(function: Callable[..., Any]) -> Callable[..., Any]:
    """The op, refusing lists and handles of other pipelines where handles go."""
    parameters = list(inspect.signature(function).parameters.values())
    kind = inspect.Parameter.VAR_POSITIONAL
    places = [n for n, p in enumerate(parameters) if p.kind is kind and p.annotation == "Handle"]

    @functools.wraps(function)
    def checked(*given: Any, **named: Any) -> Any:
        require_handles(function.__name__, given[places[0] :])
        return function(*given, **named)

    return checked if places else function


for _name in __all__:
    globals()[_name] = strict(where=declared_at)(_of_handles(globals()[_name]))


class UnknownOpError(GraphError, AttributeError):
    """`ops` has no operator of that name."""


if not TYPE_CHECKING:  # to a checker a name that is not declared is a mistake

    def __getattr__(name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        near = near_names(name, __all__)
        raise UnknownOpError(
            Finding(
                code="E121",
                what=f"there is no op {name!r}",
                where=declared_at(),
                expected=", ".join(__all__),
                near=near,
                fix=f"ops.{near[0]}(...)" if near else "an op of your own: @rf.op(per='row')",
            )
        )
