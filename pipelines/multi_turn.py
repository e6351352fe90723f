"""Episodes of several turns: after a wrong sum the environment asks again, and the model may retry.

What it says is not trained on. `rlflow run pipelines/multi_turn.py --placement split`
"""

from __future__ import annotations

from typing import Any

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 150
    prompts_per_iteration: int = 32
    group_size: int = 8
    max_turns: int = 3
    lr: float = 5e-4
    model: str = "pipelines/assets/arith-tiny"


class AskAgain(rf.Environment):
    """A right sum ends the episode; after a wrong one the problem is put once more."""

    def begin(self, prompt: str, answer: str) -> dict[str, Any]:
        """What an episode has to know, of its row."""
        return {"prompt": prompt, "answer": answer, "worth": 1.0}

    def step(self, state: dict[str, Any], response: str) -> rf.Step:
        """What follows a response."""
        if response == state["answer"]:
            return rf.Step(observation="", done=True, reward=state["worth"])
        later = state | {"worth": state["worth"] / 2}
        return rf.Step(observation=state["prompt"], done=False, state=later)


def placed(train: int, gen: int) -> rf.Placement:
    assign = {"actor": rf.on("train"), "actor.rollout": rf.on("gen")}
    return rf.Placement(pools={"train": train, "gen": gen}, assign=assign)


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": placed(1, 1),
        "h100": rf.Placement(pools={"all": 8}, assign={"*": rf.on("all")}),
        "h100_split": placed(4, 4),
    }
)
def multi_turn(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    problems = rf.data.arithmetic(digits=1, test_size=20)
    prompts = ops.prompts(problems, batch=cfg.prompts_per_iteration)
    turns: dict[str, Any] = {"max_turns": cfg.max_turns, "max_new_tokens": 4, "max_tokens": 32}
    episodes = ops.episodes(actor, AskAgain(), prompts, n=cfg.group_size, **turns)
    adv = ops.advantage("grpo", episodes)
    ops.update(actor, episodes, adv, loss=rf.PolicyLoss("ppo_clip"))
