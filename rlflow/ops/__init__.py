"""The operators of a pipeline: `from rlflow import ops`. Declaring one runs nothing."""

from typing import NoReturn

from rlflow.errors import Finding, GraphError, near_names
from rlflow.graph.trace import declared_at
from rlflow.ops.averages import average
from rlflow.ops.curriculum import track
from rlflow.ops.declare import advantage, metrics, prompts, tokenize
from rlflow.ops.drafting import train_drafter
from rlflow.ops.episodes import act, ended, episodes, observe
from rlflow.ops.forwards import log_probs, values
from rlflow.ops.loops import informative, repeat
from rlflow.ops.models import evaluate, rollout, update
from rlflow.ops.pairs import pair, scores
from rlflow.ops.scoring import reward

__all__ = [
    "act",
    "advantage",
    "average",
    "ended",
    "episodes",
    "evaluate",
    "informative",
    "log_probs",
    "metrics",
    "observe",
    "pair",
    "prompts",
    "repeat",
    "reward",
    "rollout",
    "scores",
    "tokenize",
    "track",
    "train_drafter",
    "update",
    "values",
]


class UnknownOpError(GraphError, AttributeError):
    """`ops` has no operator of that name."""


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
