"""verl's side of `vs_verl_handover.py`; runs in verl's environment and imports no rlflow.

    python verl_handover_side.py SPEC.json RESULT.json

An actor with verl's AgentLoopWorker has the engine's answers at hand, as lists. It makes a
DataProto of them by verl's own methods, the driver joins that to its batch, as the trainer does,
and a RayWorkerGroup reads it.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import ray
import torch
from gauges import Turn
from handover_rows import answers
from transformers import AutoTokenizer
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopMetrics,
    AgentLoopOutput,
    AgentLoopWorker,
)
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl_side import on_ray


class Answering(AgentLoopWorker):
    """verl's worker, whose requests are answered: it is left what it does with the answers."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.tokenizer = AutoTokenizer.from_pretrained(spec["tokenizer"])
        self.processor = None
        self.mm_processor_kwargs: dict[str, Any] = {}
        self.reward_loop_worker_handles = None
        self.distillation_enabled = False
        sizes = {"prompt_length": spec["prompt"], "response_length": spec["response"]}
        self.rollout_config = SimpleNamespace(**sizes)
        self.prompt = [7] * spec["prompt"]
        self.made = list(answers(spec["rows"], spec["response"], ragged=spec["ragged"]))

    async def generate_sequences(self, batch: DataProto) -> DataProto:
        """The rows of a batch, padded and put together."""
        return self._postprocess(await asyncio.gather(*map(self.padded, batch.batch["index"])))

    async def padded(self, index: torch.Tensor) -> Any:
        """One row as verl pads it."""
        tokens, log_probs = self.made[int(index)]
        output = AgentLoopOutput(
            prompt_ids=self.prompt,
            response_ids=tokens,
            response_mask=[1] * len(tokens),
            response_logprobs=log_probs,
            num_turns=2,
            metrics=AgentLoopMetrics(),
        )
        return await self._agent_loop_postprocess(output, False, raw_prompt="")


class Reading(Worker):
    """What reads the rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def read(self, batch: DataProto) -> DataProto:
        """The sums of every row."""
        held, mask = batch.batch, batch.batch["response_mask"]
        return DataProto.from_single_dict(
            {
                "prompt": held["prompts"].sum(dim=1),
                "tokens": (held["responses"] * mask).sum(dim=1),
                "log_probs": (held["rollout_log_probs"] * mask).double().sum(dim=1),
            }
        )


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """All turns of one process, and the sums of what was read."""
    rollout = ray.remote(num_cpus=1)(Answering).remote(spec)
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Reading)), use_gpu=False)
    turns = []
    for _ in range(spec["warmup"] + spec["turns"]):
        batch = DataProto.from_single_dict({"index": torch.arange(spec["rows"])})
        turn = Turn()
        with turn.running():
            made = DataProto.concat(ray.get([rollout.generate_sequences.remote(batch)]))
            read = group.read(batch.union(made))
        turns.append(turn)
    found = {name: float(read.batch[name].double().sum()) for name in ("tokens", "log_probs")}
    return {"turns": [asdict(turn) for turn in turns[spec["warmup"] :]], **found}


if __name__ == "__main__":
    on_ray(measure)
