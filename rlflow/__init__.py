"""rlflow: a workflow engine for LLM reinforcement learning.

A pipeline declares PPO or GRPO as a graph of operators; a placement says where models
live; a compiler derives the plan. Importing this package imports neither torch nor ray;
`compile`, `simulate`, `tune`, `run` and `eval`, and what they return, are loaded once named.
"""

import importlib
from typing import TYPE_CHECKING

from rlflow.cli.shell import early as _early  # noqa: F401  before all others: signals may come

# isort: split
from rlflow import data, ops, rewards
from rlflow.data import Chat
from rlflow.envs import Environment, Step, ToolEnvironment
from rlflow.graph.fields import Row, Token
from rlflow.graph.model import AdamW, Average, LoRA, Model, Muon
from rlflow.graph.pipeline import Config, Pipeline, pipeline
from rlflow.graph.placement import On, Placement, on
from rlflow.graph.trace import Handle
from rlflow.graph.user.dispatch import register_dispatch
from rlflow.graph.user.engine_options import EngineOptions, register_engine
from rlflow.graph.user.engines import VLLM, SGLang
from rlflow.graph.user.iterations import Iterations
from rlflow.graph.user.lengths import Length, Lengths
from rlflow.graph.user.models import Sampler, Scorer
from rlflow.graph.user.op import op
from rlflow.graph.user.routers import Router
from rlflow.graph.user.speculative import Speculative
from rlflow.ops.controllers import AdaptiveEntropy, AdaptiveKL
from rlflow.ops.corrections import ImportanceSampling, Rejection
from rlflow.ops.loops.curriculum import PassRates
from rlflow.ops.losses.distill import DistillLoss
from rlflow.ops.losses.losses import PolicyLoss, SFTLoss, ValueLoss
from rlflow.ops.losses.preference import DPOLoss, RewardModelLoss
from rlflow.ops.losses.user import loss

if TYPE_CHECKING:
    from rlflow.cli.door.api import compile, eval, run, simulate, tune
    from rlflow.cli.door.evaluating import Evaluation, Interval
    from rlflow.cli.door.events import IterationDone
    from rlflow.cli.door.handle import RunHandle
    from rlflow.cli.door.shown import CompiledPlan, Simulated, TunedPlacements

__version__ = "0.1.0"

__all__ = [
    "VLLM",
    "AdamW",
    "AdaptiveEntropy",
    "AdaptiveKL",
    "Average",
    "Chat",
    "CompiledPlan",
    "Config",
    "DPOLoss",
    "DistillLoss",
    "EngineOptions",
    "Environment",
    "Evaluation",
    "Handle",
    "ImportanceSampling",
    "Interval",
    "IterationDone",
    "Iterations",
    "Length",
    "Lengths",
    "LoRA",
    "Model",
    "Muon",
    "On",
    "PassRates",
    "Pipeline",
    "Placement",
    "PolicyLoss",
    "Rejection",
    "RewardModelLoss",
    "Router",
    "Row",
    "RunHandle",
    "SFTLoss",
    "SGLang",
    "Sampler",
    "Scorer",
    "Simulated",
    "Speculative",
    "Step",
    "Token",
    "ToolEnvironment",
    "TunedPlacements",
    "ValueLoss",
    "compile",
    "data",
    "eval",
    "loss",
    "on",
    "op",
    "ops",
    "pipeline",
    "register_dispatch",
    "register_engine",
    "rewards",
    "run",
    "simulate",
    "tune",
]

_DOOR = {
    "compile": "api",
    "eval": "api",
    "run": "api",
    "simulate": "api",
    "tune": "api",
    "Evaluation": "evaluating",
    "Interval": "evaluating",
    "IterationDone": "events",
    "RunHandle": "handle",
    "CompiledPlan": "shown",
    "Simulated": "shown",
    "TunedPlacements": "shown",
}


if not TYPE_CHECKING:  # to a checker a name that is not declared is a mistake

    def __getattr__(name: str) -> object:
        """A name of the Python door, which loads the scheduler."""
        if name not in _DOOR:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"rlflow.cli.door.{_DOOR[name]}"), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    """Every public name, those too that are not loaded yet."""
    return sorted({*globals(), *__all__})
