"""Which optimizer a spec asks for, and those of a model in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rlflow.contract.engines import OptimizerSpec
from rlflow.engines.hf.optim.adamw import AdamWState
from rlflow.engines.hf.optim.int8 import Int8AdamWState
from rlflow.engines.hf.optim.muon import MuonState

OptimizerKind = Literal["adamw", "int8", "muon"]
Kinds = Mapping[OptimizerKind, type[AdamWState]]

WHOLE: Kinds = {"adamw": AdamWState, "int8": Int8AdamWState, "muon": MuonState}


def optimizer_kind(spec: OptimizerSpec) -> OptimizerKind:
    """The kind that a spec asks for."""
    if spec.momentum is not None:
        return "muon"
    return "int8" if spec.moments == "int8" else "adamw"
