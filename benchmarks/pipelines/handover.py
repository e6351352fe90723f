"""Rows of an engine on one device that another device reads: what `vs_verl_handover.py` times.

The engine is a process beside its worker, as SGLang is, that has its answers already; the
variable HANDOVER has their numbers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import rlflow as rf
from rlflow import ops

if TYPE_CHECKING:
    from torch import Tensor

SCRIPT = Path(__file__).resolve().parents[1] / "handover_engine.py"
MODEL = "pipelines/assets/arith-tiny"


class Config(rf.Config):
    """What `--set` may change."""

    rows: int = 1024
    prompt: int = 32
    response: int = 1024


@rf.register_engine
class Answers(rf.EngineOptions):
    """An engine whose process is benchmarks/handover_engine.py; it needs nothing but Python."""

    engine: ClassVar[str] = "answers"
    title: ClassVar[str] = "answers"

    context_length: int = 1 << 20

    def load(self, path: str, **how: Any) -> tuple[Any, Any]:
        """Start the script beside this process."""
        from rlflow.engines.process.client.load import SERVER, EngineKind, start_engine
        from rlflow.engines.process.client.rollout import SGLangRollout

        def environment(python: str, **more: Any) -> dict[str, str]:
            places = [str(SERVER), str(SCRIPT.parent)]
            return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}

        def arguments(options: Any, **known: Any) -> dict[str, Any]:
            return {}

        kind = EngineKind(script=SCRIPT, arguments=arguments, environment=environment)
        model = start_engine(path, kind, options=self, **how)
        return model, SGLangRollout(model)


class Sums(TypedDict):
    """Of a row: the sums of what was read."""

    prompt: rf.Row[float]
    tokens: rf.Row[float]
    log_probs: rf.Row[float]


@rf.op(per="row")
def read(
    prompt_tokens: rf.Token[int],
    response_tokens: rf.Token[int],
    rollout_log_probs: rf.Token[float],
) -> Sums:
    import torch

    def summed(field: Tensor) -> Tensor:
        return torch.stack([row.double().sum() for row in field.unbind()]).float()

    fields = (prompt_tokens, response_tokens, rollout_log_probs)
    prompt, tokens, log_probs = (summed(field) for field in fields)
    return {"prompt": prompt, "tokens": tokens, "log_probs": log_probs}


@rf.pipeline(
    placements={
        "split": rf.Placement(
            pools={"gen": 1, "train": 1},
            assign={
                "actor": rf.on("gen", engine=Answers(max_total_tokens=1 << 21)),
                "read": rf.on("train"),
            },
        )
    }
)
def handover(cfg: Config) -> None:
    said = "7" * cfg.prompt

    def row(index: int) -> dict[str, str]:
        return {"prompt": said}

    actor = rf.Model("actor", MODEL)
    source = rf.data.generator(row, size=cfg.rows, columns=("prompt",))
    prompts = ops.prompts(source, batch=cfg.rows)
    samples = ops.rollout(actor, prompts, max_new_tokens=cfg.response)
    ops.metrics(read(samples))
