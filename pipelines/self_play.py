"""Self-play: two policies answer the same prompts, and the one that is closer wins; both learn.

Zero-sum as in SPIRAL (Liu et al. 2025, arXiv 2506.24119). `rlflow run pipelines/self_play.py`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 200
    prompts_per_iteration: int = 32
    group_size: int = 8
    lr: float = 2e-4
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


def outcome(response: str, rival: str, answer: str) -> float:
    words = (response, rival)
    mine, theirs = (abs(int(w) - int(answer)) if w.isdecimal() else 1000 for w in words)
    return float(mine < theirs) - float(mine > theirs)


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


shared = {"*": rf.on("all")}
apart = {"alice": rf.on("left"), "bob": rf.on("right")}


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign=shared),
        "split": rf.Placement(pools={"left": 1, "right": 1}, assign=apart),
        "h100": rf.Placement(pools={"all": 8}, assign=shared),
        "h100_split": rf.Placement(pools={"left": 4, "right": 4}, assign=apart),
    }
)
def self_play(cfg: Config) -> None:
    alice, bob = (rf.Model(n, cfg.model, optimizer=rf.AdamW(lr=cfg.lr)) for n in ("alice", "bob"))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    test = rf.data.arithmetic(digits=2, split="test")
    for player, other in ((alice, bob), (bob, alice)):
        who = player.name
        move = ops.rollout(other, prompts, max_new_tokens=12, name=f"{who}.rival")
        move = move.rename(rival="response")
        samples = ops.rollout(player, move, n=cfg.group_size, max_new_tokens=12)
        won = ops.reward(outcome, samples, name=f"{who}.reward")
        adv = ops.advantage("grpo", samples, won, name=f"{who}.advantage")
        ops.update(player, samples, adv, loss=rf.PolicyLoss("ppo_clip"))
        name, every = f"{who}.eval", cfg.eval_every
        ops.evaluate(player, test, exact_match, every=every, max_new_tokens=12, name=name)
