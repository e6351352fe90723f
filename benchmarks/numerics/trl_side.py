"""TRL's side of `vs_numerics.py`; runs in TRL's environment and imports no rlflow.

    python numerics/trl_side.py SPEC.json INPUTS.pt RESULTS.pt

TRL's formulas stand inside its trainers. Each call builds the trainer with its configuration
on a tiny model, and calls the trainer's own method on a prepared batch. The log-probs of the
model are made the leaf of the graph, in float64, so that the arithmetic after them and the
gradient in them are seen; they are returned under `seen`, for the other side to start from.
"""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

Fields = Mapping[str, Tensor]
Options = Mapping[str, Any]
Answer = dict[str, Any]

PROMPTS = ("1+2=", "12+34=", "7+7=", "90+9=")
PAIR = {"prompt": "1+2=", "chosen": "3", "rejected": "4"}
PROMPT_TOKENS, FIRST_TOKEN, TOKENS = 3, 2, 49
MOVED = {"old_log_probs": "old_per_token_logps", "ref_log_probs": "ref_per_token_logps"}
TRAINERS = {
    "GRPOTrainer": (GRPOTrainer, GRPOConfig),
    "GMPOTrainer": (GMPOTrainer, GMPOConfig),
    "RLOOTrainer": (RLOOTrainer, RLOOConfig),
}


@dataclass(slots=True)
class Side:
    """The model's directory, and what a reward function is to return."""

    model: str
    output: str
    rewards: list[list[float | None]] = field(default_factory=list)
    trainers: dict[str, Any] = field(default_factory=dict)

    def reward(self, column: int) -> Callable[..., list[float | None]]:
        """A reward function that returns what the batch says."""

        def function(completions: list[str], **others: Any) -> list[float | None]:
            return self.rewards[column]

        function.__name__ = f"reward{column}"
        return function

    def online(self, name: str, options: Options) -> Any:
        """A trainer of samples, with the configuration of the call."""
        key = name + json.dumps(options.get("config", {}), sort_keys=True)
        if key not in self.trainers:
            made, config = TRAINERS[name]
            set_seed(0)
            self.trainers[key] = made(
                model=AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float64),
                reward_funcs=[self.reward(k) for k in range(options.get("rewards", 1))],
                args=config(**{**self.common(), **self.sampling(), **options.get("config", {})}),
                train_dataset=Dataset.from_list([{"prompt": text} for text in PROMPTS]),
                processing_class=AutoTokenizer.from_pretrained(self.model, padding_side="left"),
            )
            steps = options.get("config", {}).get("gradient_accumulation_steps", 1)
            self.trainers[key].current_gradient_accumulation_steps = steps
        return self.trainers[key]

    def common(self) -> dict[str, Any]:
        """One device, no logging, no saving."""
        return {
            "output_dir": self.output,
            "gradient_accumulation_steps": 1,
            "gradient_checkpointing": False,
            "bf16": False,
            "use_cpu": True,
            "report_to": "none",
            "logging_strategy": "no",
            "save_strategy": "no",
            "disable_tqdm": True,
        }

    def sampling(self) -> dict[str, Any]:
        """Four samples of each of four prompts."""
        return {
            "per_device_train_batch_size": 16,
            "num_generations": 4,
            "max_completion_length": 17,
            "temperature": 1.0,
            "beta": 0.0,
        }


class Opened:
    """A trainer whose model's log-probs and entropies are leaves in float64 while it is open."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.compute = trainer._get_per_token_logps_and_entropies
        self.leaves: list[Tensor] = []

    def __enter__(self) -> Opened:
        self.trainer._get_per_token_logps_and_entropies = self.opened
        return self

    def __exit__(self, *error: object) -> None:
        self.trainer._get_per_token_logps_and_entropies = self.compute

    def opened(self, *given: Any, **named: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The trainer's own method, cut from the model's graph."""
        log_probs, entropy, aux = self.compute(*given, **named)
        self.leaves.append(log_probs.detach().double().requires_grad_())
        if entropy is not None:
            entropy = entropy.detach().double()
        return self.leaves[-1], entropy, aux


def tokens(mask: Tensor) -> dict[str, Tensor]:
    """Prompts and completions for a mask, whose holes are holes of the completion mask."""
    drawn = torch.Generator().manual_seed(int(mask.sum()))
    rows, width = mask.shape
    ids = torch.randint(TOKENS, (rows, PROMPT_TOKENS + width), generator=drawn) + FIRST_TOKEN
    return {
        "prompt_ids": ids[:, :PROMPT_TOKENS],
        "prompt_mask": torch.ones(rows, PROMPT_TOKENS, dtype=torch.int64),
        "completion_ids": ids[:, PROMPT_TOKENS:],
        "completion_mask": mask.long(),
    }


def policy_loss(side: Side, function: str, fields: Fields, options: Options) -> Answer:
    """`_compute_loss` of a trainer of samples, with the gradient in the log-probs.

    With gradient accumulation the rows are cut into as many micro-batches, whose losses add up.
    """
    trainer = side.online(function.partition(".")[0], options)
    mask = fields["response_mask"]
    batch = tokens(mask)
    if not function.startswith("RLOO"):
        batch["completion_mask"] = (mask.flip(-1).cumsum(-1).flip(-1) > 0).long()
        batch["tool_mask"] = mask.long()
    batch["advantages"] = fields[options.get("advantages", "row_advantages")]
    seen: dict[str, Tensor] = {}
    with Opened(trainer) as opened:
        with torch.no_grad():
            own, entropy, _ = opened.opened(*whole(trainer, batch), compute_entropy=True)
            own = own.detach()
        for name, column in MOVED.items():
            seen[name] = own + (fields[name] - fields["log_probs"])
            batch[column] = seen[name]
        batch["old_logps"] = (seen["old_log_probs"] * mask).sum(-1)
        if options.get("old") == "current":
            del batch["old_per_token_logps"]
            batch["old_logps"] = (own * mask).sum(-1)
            seen["old_log_probs"] = own
        loss = torch.zeros((), dtype=torch.float64)
        gradients: list[Tensor] = []
        for part in torch.arange(len(mask)).chunk(trainer.current_gradient_accumulation_steps):
            micro = {name: column[part] for name, column in batch.items()}
            one = trainer._compute_loss(trainer.model, {**micro, "num_items_in_batch": mask.sum()})
            gradients += torch.autograd.grad(one, opened.leaves[-1])
            loss = loss + one.detach()
        seen["log_probs"] = own
        if entropy is not None:
            seen["entropy"] = entropy
    made = {"loss": loss, "gradient": torch.cat(gradients)}
    return {"made": made, "seen": seen}


def whole(trainer: Any, batch: Fields) -> tuple[Any, Tensor, Tensor, int]:
    """What the trainer's method of log-probs takes, for a prepared batch."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    return trainer.model, ids, attended, batch["completion_ids"].shape[1]


def advantages(side: Side, function: str, fields: Fields, options: Options) -> Answer:
    """`_generate_and_score_completions`: sampled with the model, scored as the batch says.

    Rows in `unscored` have no reward.
    """
    side.rewards = fields["rewards"].T.tolist()
    for row in options.get("unscored", ()):
        for column in side.rewards:
            column[row] = None
    trainer = side.online(function.partition(".")[0], options)
    moved = getattr(trainer, "ref_model", None)
    if moved is not None:
        disturb(moved)
    count = len(fields["reward"]) // len(PROMPTS)
    with Opened(trainer) as opened:
        made = trainer._generate_and_score_completions(
            [{"prompt": text} for text in PROMPTS for _ in range(count)]
        )
    seen: dict[str, Tensor] = {"response_mask": made["completion_mask"].bool()}
    if moved is not None:
        old, ref = (leaf.detach() for leaf in opened.leaves[-2:])
        seen |= {"rollout_log_probs": old, "ref_log_probs": ref}
    return {"made": {"advantages": made["advantages"].double()}, "seen": seen}


@functools.cache
def disturb(model: Any) -> None:
    """Move a reference away from the policy, once."""
    drawn = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weights in model.parameters():
            noise = torch.randn(weights.shape, generator=drawn, dtype=torch.float64)
            weights.add_(noise.to(weights.dtype), alpha=0.02)


class Scored:
    """A reward model that gives the scores it is told, `[rows, 1]`, as leaves."""

    def __init__(self, scores: Tensor) -> None:
        self.leaf = scores.clone().requires_grad_()

    def __call__(self, **given: Any) -> Any:
        """Outputs with nothing but the scores."""
        return SimpleNamespace(logits=self.leaf[:, None])


class Cut:
    """A model whose log-probs are leaves in float64 (float32 where the trainer cannot)."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.model = model
        self.dtype = dtype
        self.leaf = torch.zeros(())
        self.squares = torch.zeros(())

    def __call__(self, **given: Any) -> Any:
        """The model's outputs, cut from its graph."""
        outputs = self.model(**given)
        self.leaf = outputs.log_probs.detach().to(self.dtype).requires_grad_()
        outputs.log_probs = self.leaf
        squares = getattr(outputs, "log_sum_sq_probs", None)
        if squares is not None:
            outputs.log_sum_sq_probs = squares.detach().to(self.dtype)
            self.squares = outputs.log_sum_sq_probs.exp()
        return outputs


def preference(side: Side, function: str, fields: Fields, options: Options) -> Answer:
    """`DPOTrainer._compute_loss`: the first half of the rows was chosen, the others rejected."""
    set_seed(0)
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(side.model, dtype=torch.float64),
        ref_model=AutoModelForCausalLM.from_pretrained(side.model, dtype=torch.float64),
        args=DPOConfig(**side.common(), **options.get("config", {})),
        train_dataset=Dataset.from_list([PAIR]),
        processing_class=AutoTokenizer.from_pretrained(side.model),
    )
    disturb(trainer.ref_model)
    lengths = fields["response_mask"].sum(-1).tolist()
    ids = tokens(fields["response_mask"])
    prompts = ids["prompt_ids"].tolist()
    rows = [row[:n] for row, n in zip(ids["completion_ids"].tolist(), lengths, strict=True)]
    half = len(rows) // 2
    batch = trainer.data_collator(
        [
            {"prompt_ids": prompts[k], "chosen_ids": rows[k], "rejected_ids": rows[half + k]}
            for k in range(half)
        ]
    )
    dtype = torch.float32 if options.get("float32") else torch.float64
    own, ref = Cut(trainer.model, dtype), Cut(trainer.ref_model, dtype)
    trainer.ref_model = ref
    loss = trainer._compute_loss(own, batch, False)
    mask = batch["completion_mask"][:, 1:].bool()
    (slopes,) = torch.autograd.grad(loss, own.leaf)
    gradient = torch.where(mask, slopes, 0.0).double()
    seen = {"log_probs": own.leaf, "ref_log_probs": ref.leaf}
    if trainer.args.use_weighting:
        seen["sum_pi_squared"] = own.squares
    return {
        "made": {"loss": loss.detach().double(), "gradient": gradient},
        "seen": {"response_mask": mask, **{k: x.detach().double() for k, x in seen.items()}},
    }


def distillation(side: Side, function: str, fields: Fields, options: Options) -> Answer:
    """`GKDTrainer.generalized_jsd_loss`, a mean over the tokens."""
    mask = fields["response_mask"]
    x = fields["student_logits"].clone().requires_grad_()
    labels = torch.where(mask, 1, -100)
    loss = GKDTrainer.generalized_jsd_loss(x, fields["teacher_logits"], labels, **options)
    return {"made": differentiated(loss, x)}


def reward_model(side: Side, function: str, fields: Fields, options: Options) -> Answer:
    """`RewardTrainer.compute_loss` of given scores; the first half of the rows was chosen."""
    key = function + json.dumps(options, sort_keys=True)
    if key not in side.trainers:
        side.trainers[key] = RewardTrainer(
            model=side.model,
            args=RewardConfig(**side.common(), **options["config"]),
            train_dataset=Dataset.from_list([PAIR]),
            processing_class=AutoTokenizer.from_pretrained(side.model),
        )
    model, rows = Scored(fields["scores"]), len(fields["scores"])
    margin = fields["reward"][: rows // 2].abs()
    batch = {"attention_mask": torch.ones(rows, 1), "margin": margin}
    loss = side.trainers[key].compute_loss(model, batch)
    return {"made": differentiated(loss, model.leaf)}


def simpo(side: Side, function: str, fields: Fields, options: Options) -> Answer:
    """`CPOTrainer.cpo_loss` of the mean log-probs of each response."""
    config = {**side.common(), **options, "loss_type": "simpo", "cpo_alpha": 0.0}
    trainer = CPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(side.model, dtype=torch.float64),
        args=CPOConfig(**config),
        train_dataset=Dataset.from_list([PAIR]),
        processing_class=AutoTokenizer.from_pretrained(side.model),
    )
    x, mask = fields["log_probs"].clone().requires_grad_(), fields["response_mask"]
    means = torch.where(mask, x, 0.0).sum(-1) / mask.sum(-1)
    losses, _, _ = trainer.cpo_loss(*means.chunk(2))
    return {"made": differentiated(losses.mean(), x)}


def differentiated(loss: Tensor, x: Tensor) -> dict[str, Tensor]:
    """A loss and its gradient in x."""
    (gradient,) = torch.autograd.grad(loss, x)
    return {"loss": loss.detach(), "gradient": gradient}


KINDS: dict[str, Callable[[Side, str, Fields, Options], Answer]] = {
    "policy": policy_loss,
    "estimator": advantages,
    "preference": preference,
    "distillation": distillation,
    "reward": reward_model,
    "simpo": simpo,
}


def answer(side: Side, call: Mapping[str, Any], fields: Fields) -> Answer:
    """What one call makes of one batch, or how it fails."""
    try:
        return KINDS[call["kind"]](side, call["function"], fields, call["options"])
    except Exception:
        return {"error": traceback.format_exc(limit=-4)}


def main() -> None:
    """Read the calls and the inputs, write the results of every seed."""
    given, inputs, results = (Path(word) for word in sys.argv[1:4])
    torch.set_num_threads(1)
    spec = json.loads(given.read_text(encoding="utf-8"))
    side = Side(model=spec["model"], output=spec["output_dir"])
    made = [
        {
            call["id"]: {name: answer(side, call, seed[name]) for name in call["batches"]}
            for call in spec["calls"]
        }
        for seed in torch.load(inputs)
    ]
    torch.save(made, results)


if __name__ == "__main__":
    main()
