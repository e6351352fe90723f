"""The public names, pinned: adding or removing one is a decision."""

from __future__ import annotations

import rlflow as rf

PUBLIC = [
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
    "VLLM",
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
OPERATORS = [
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


def test_public_names():
    assert PUBLIC == sorted(rf.__all__)
    assert OPERATORS == sorted(rf.ops.__all__)


def test_every_public_name_is_there_and_documented():
    for module, names in ((rf, PUBLIC), (rf.ops, OPERATORS)):
        assert [] == [name for name in names if not getattr(module, name).__doc__]
