"""A small pipeline whose reward does what the environment asks for, at one of its calls.

`RLFLOW_CHAOS_ACT=name@n` does it at the n-th call of a process, once: in whichever process first
makes the file of `RLFLOW_CHAOS_FIRED`, by which a row knows that its fault has fired.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rlflow as rf
from rlflow import ops

TINY = Path(__file__).resolve().parents[2] / "pipelines" / "assets" / "arith-tiny"
ACT, FIRED = "RLFLOW_CHAOS_ACT", "RLFLOW_CHAOS_FIRED"
# The call of the loss below at which the first rank asks alone.
ALONE = "RLFLOW_CHAOS_ALONE"
CALLS = [0]


class Config(rf.Config):
    """`timeout` above 0 has every call in a process of its own."""

    iterations: int = 5
    timeout: float = 0.0
    on_error: str = "error"
    own_loss: bool = False
    lr: float = 1e-3
    model: str = str(TINY)


def first(file: Path) -> bool:
    """Whether no other process has made this file before; it is there then."""
    with contextlib.suppress(FileExistsError):
        file.touch(exist_ok=False)
        return True
    return False


def judge(response: str) -> float:
    """A number that follows from the text alone, so that every iteration learns something."""
    CALLS[0] += 1
    name, _, at = os.environ.get(ACT, "").partition("@")
    value = float(zlib.crc32(response.encode()) % 5)
    if name and CALLS[0] == int(at or 1) and first(Path(os.environ[FIRED])):
        from tests.chaos import acts

        act: Callable[[float], Any] = getattr(acts, name)
        return act(value)  # type: ignore[no-any-return]
    return value


@rf.loss
def alone(
    log_probs: rf.Token[float],
    rollout_log_probs: rf.Token[float],
    advantages: rf.Token[float],
) -> rf.Token[float]:
    """A plain loss that asks the others for something, on the first rank alone, at a call of it."""
    CALLS[0] += 1
    at = int(os.environ.get(ALONE, "0"))
    if at and CALLS[0] >= at and os.environ["RANK"] == "0" and first(Path(os.environ[FIRED])):
        import torch

        groups = torch.distributed.distributed_c10d._world.pg_names
        own = next(group for group in groups if group.group_desc == "actor@cpus")
        torch.distributed.all_reduce(torch.zeros(1), group=own)
    return -(log_probs - rollout_log_probs).exp() * advantages


@rf.pipeline(
    placements={
        "one": rf.Placement(pools={"cpus": 1}, assign={"*": rf.on("cpus")}),
        "fsdp": rf.Placement(pools={"cpus": 2}, assign={"*": rf.on("cpus", fsdp=2)}),
    }
)
def faulted(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=2, test_size=9), batch=4)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=8)
    limits: dict[str, Any] = {}
    if cfg.timeout:
        limits = {"timeout": cfg.timeout, "concurrency": 2, "on_error": cfg.on_error}
        limits |= {} if cfg.on_error == "error" else {"max_failures": 0.5}
    reward = ops.reward(judge, samples, **limits)
    adv = ops.advantage("grpo", samples, reward)
    loss = alone() if cfg.own_loss else rf.PolicyLoss("ppo_clip")
    ops.update(actor, samples, adv, loss=loss)
