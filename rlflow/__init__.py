"""rlflow: a workflow engine for LLM reinforcement learning.

A pipeline declares PPO or GRPO as a graph of operators; a placement says where models
live; a compiler derives the plan. Importing this package imports neither torch nor ray.
"""

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
from rlflow.graph.user.models import Sampler, Scorer
from rlflow.graph.user.op import op
from rlflow.graph.user.speculative import Speculative
from rlflow.ops.controllers import AdaptiveEntropy, AdaptiveKL
from rlflow.ops.corrections import ImportanceSampling, Rejection
from rlflow.ops.loops.curriculum import PassRates
from rlflow.ops.losses.distill import DistillLoss
from rlflow.ops.losses.losses import PolicyLoss, SFTLoss, ValueLoss
from rlflow.ops.losses.preference import DPOLoss, RewardModelLoss
from rlflow.ops.losses.user import loss

__version__ = "0.1.0"

__all__ = [
    "VLLM",
    "AdamW",
    "AdaptiveEntropy",
    "AdaptiveKL",
    "Average",
    "Chat",
    "Config",
    "DPOLoss",
    "DistillLoss",
    "EngineOptions",
    "Environment",
    "Handle",
    "ImportanceSampling",
    "Iterations",
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
    "Row",
    "SFTLoss",
    "SGLang",
    "Sampler",
    "Scorer",
    "Speculative",
    "Step",
    "Token",
    "ToolEnvironment",
    "ValueLoss",
    "data",
    "loss",
    "on",
    "op",
    "ops",
    "pipeline",
    "register_dispatch",
    "register_engine",
    "rewards",
]
