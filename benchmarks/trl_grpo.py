"""TRL's side: GRPOTrainer over given rows, in an environment of its own.

    python benchmarks/trl_grpo.py spec.json result.json

Imports nothing of rlflow. Writes when every iteration ended, how many tokens it drew, and
the greedy accuracy on held-out rows where that was asked for. Times are seconds.
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
    AutoTokenizer,
    GenerationConfig,
    TrainerCallback,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):  # type: ignore[misc]
    """Notes the end of every iteration, and evaluates where it is due."""

    def __init__(self, spec: dict[str, Any], tokenizer: Any) -> None:
        self.spec = spec
        self.tokenizer = tokenizer
        self.ends: list[float] = []
        self.paused: list[float] = []
        self.accuracy: list[tuple[int, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The first iteration starts here."""
        self.evaluate(0, others["model"])
        self.ends.append(time.perf_counter())
        self.paused.append(0.0)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """One iteration is one optimizer step; the evaluation after it is not its time."""
        self.ends.append(time.perf_counter())
        self.evaluate(state.global_step, others["model"])
        self.paused.append(time.perf_counter() - self.ends[-1])

    @torch.no_grad()
    def evaluate(self, iteration: int, model: Any) -> None:
        """Greedy accuracy on the held-out rows."""
        every = self.spec["eval_every"]
        if not every or iteration % every:
            return
        rows = self.spec["held_out"]
        inputs = self.tokenizer([row["prompt"] for row in rows], padding=True, return_tensors="pt")
        inputs = inputs.to(model.device)
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=self.spec["new_tokens"],
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        model.eval()
        made = model.generate(**inputs, generation_config=config)[:, inputs["input_ids"].shape[1] :]
        model.train()
        texts = self.tokenizer.batch_decode(made, skip_special_tokens=True)
        right = sum(text == row["answer"] for text, row in zip(texts, rows, strict=True))
        self.accuracy.append((iteration, right / len(rows)))


def main() -> None:
    """Train as the specification says, and write the result."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if spec["device"] == "cpu":
        torch.set_num_threads(1)
    set_seed(spec["seed"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    tokens: list[int] = []

    def reward(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        tokens.append(sum(len(row) for row in completion_ids))
        pairs = zip(completions, answer, strict=True)
        if spec["fixed"]:
            return [float(text.startswith(right)) for text, right in pairs]
        return [float(text == right) for text, right in pairs]

    clock = Clock(spec, tokenizer)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments(spec),
        train_dataset=Dataset.from_list(spec["rows"]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    result = {
        "ends": clock.ends,
        "paused": clock.paused,
        "tokens": tokens,
        "accuracy": clock.accuracy,
    }
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


def arguments(spec: dict[str, Any]) -> GRPOConfig:
    """One batch of all samples an iteration, no logging, no saving, weights in float32."""
    return GRPOConfig(
        output_dir=spec["output_dir"],
        seed=spec["seed"],
        max_steps=spec["iterations"],
        per_device_train_batch_size=spec["prompts"] * spec["group_size"],
        gradient_accumulation_steps=1,
        num_generations=spec["group_size"],
        max_completion_length=spec["new_tokens"],
        temperature=1.0,
        beta=spec["kl_coef"],
        loss_type="dapo",
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=spec["dtype"] == "bfloat16",
        use_cpu=spec["device"] == "cpu",
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )


if __name__ == "__main__":
    main()
