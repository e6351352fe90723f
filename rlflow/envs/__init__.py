"""Environments that answer a model's responses, exposed as `rf.Environment` and beside it.

    Environment        what a user derives: `begin` and `step`, pure in a state of plain data
    Step               what a step returns
    ToolEnvironment    Python functions that a model calls by name

This package knows no tensors and no graphs.
"""

from rlflow.envs.base import Environment, Step
from rlflow.envs.tools import ToolEnvironment

__all__ = ["Environment", "Step", "ToolEnvironment"]
