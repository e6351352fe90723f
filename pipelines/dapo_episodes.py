"""DAPO on episodes: several turns each, drawn until enough groups differ. A loop within a loop.

Groups whose episodes all earn alike are drawn again. `rlflow run pipelines/dapo_episodes.py`
"""

from __future__ import annotations

from typing import Any

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 150
    groups: int = 16
    prompts_per_trip: int = 16
    group_size: int = 8
    at_most: int = 3
    max_turns: int = 3
    lr: float = 5e-4
    model: str = "pipelines/assets/arith-tiny"


class AskAgain(rf.Environment):
    """A right sum ends the episode; after a wrong one the problem is put once more."""

    def begin(self, prompt: str, answer: str) -> dict[str, Any]:
        """What an episode has to know."""
        return {"prompt": prompt, "answer": answer, "worth": 1.0}

    def step(self, state: dict[str, Any], response: str) -> rf.Step:
        """What follows a response."""
        if response == state["answer"]:
            return rf.Step(observation="", done=True, reward=state["worth"])
        again = {**state, "worth": state["worth"] / 2}
        return rf.Step(observation=state["prompt"], done=False, state=again)


COLOCATE, H100 = (rf.Placement(pools={"all": n}, assign={"*": rf.on("all")}) for n in (1, 8))
apart = {"actor": rf.on("train"), "actor.rollout": rf.on("gen")}
SPLIT = rf.Placement(pools={"train": 1, "gen": 1}, assign=apart)


@rf.pipeline(placements={"colocate": COLOCATE, "split": SPLIT, "h100": H100})
def dapo_episodes(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    turns: dict[str, Any] = {"max_turns": cfg.max_turns, "max_new_tokens": 4, "max_tokens": 32}
    sums = rf.data.arithmetic(digits=1, test_size=20)

    def attempt() -> tuple[rf.Handle, ...]:
        prompts = ops.prompts(sums, batch=cfg.prompts_per_trip)
        episodes = ops.episodes(actor, AskAgain(), prompts, n=cfg.group_size, **turns)
        return episodes, ops.informative(episodes)

    goal: dict[str, Any] = {"groups": cfg.groups, "at_most": cfg.at_most, "exhausted": "fill"}
    batch = ops.repeat(attempt, until="informative", name="enough", **goal)
    ops.update(actor, batch, ops.advantage("grpo", batch), loss=rf.PolicyLoss(clip=(0.2, 0.28)))
