"""TRL's side: the PPOTrainer of its experimental part, in an environment of its own.

    python benchmarks/trl_ppo.py spec.json result.json

Policy, value, reference and reward model are of one size: the last three start from the same
weights, the two with a score head from a fresh head. Imports nothing of rlflow. Writes when
every iteration ended, in seconds.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
    set_seed,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer


class Clock(TrainerCallback):  # type: ignore[misc]
    """Notes the end of every iteration."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *_: Any, **others: Any) -> None:
        """The first iteration starts here."""
        self.ends.append(time.perf_counter())

    def on_step_end(self, *_: Any, **others: Any) -> None:
        """All epochs of an iteration are done."""
        self.ends.append(time.perf_counter())


def main() -> None:
    """Train as the specification says, and write the result."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    set_seed(spec["seed"])
    path = spec["model"]
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    encoded = [tokenizer(row["prompt"])["input_ids"] for row in spec["rows"]]
    rows = Dataset.from_dict({"input_ids": encoded})
    clock = Clock()
    trainer = PPOTrainer(
        args=arguments(spec),
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_model=scorer(path),
        value_model=scorer(path),
        train_dataset=rows,
        eval_dataset=rows.select(range(spec["prompts"])),
        callbacks=[clock],
    )
    trainer.train()
    count = len(clock.ends) - 1
    drawn = spec["prompts"] * spec["new_tokens"]
    result = {"ends": clock.ends, "tokens": [drawn] * count}
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


def scorer(path: str) -> Any:
    """The body of a model with a fresh head of one number."""
    return AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=1, dtype=torch.float32
    )


def arguments(spec: dict[str, Any]) -> PPOConfig:
    """One mini-batch of all rows, no stop token, no logging, no saving, float32."""
    return PPOConfig(
        output_dir=spec["output_dir"],
        seed=spec["seed"],
        total_episodes=spec["prompts"] * spec["iterations"],
        per_device_train_batch_size=spec["prompts"],
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        local_rollout_forward_batch_size=spec["prompts"],
        num_sample_generations=0,
        num_ppo_epochs=spec["epochs"],
        response_length=spec["new_tokens"],
        stop_token=None,
        temperature=1.0,
        kl_coef=spec["kl_coef"],
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
