"""The operators of a pipeline: `from rlflow import ops`. Declaring one runs nothing."""

from rlflow.ops.declare import advantage, metrics, prompts, reward, tokenize
from rlflow.ops.models import evaluate, log_probs, rollout, update, values

__all__ = [
    "advantage",
    "evaluate",
    "log_probs",
    "metrics",
    "prompts",
    "reward",
    "rollout",
    "tokenize",
    "update",
    "values",
]
