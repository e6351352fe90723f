"""Rollouts that never drain, and what tests see of their rows."""

from typing import TypedDict

import rlflow as rf
from rlflow import ops
from tests.runtime.pipelines.placed import TINY, apart, together


class Config(rf.Config):
    lr: float = 1e-3
    new: int = 24


def letters(response: str) -> float:
    return float(sum(map(ord, response)) % 5)


class Seen(TypedDict):
    group0: rf.Row[float]
    group1: rf.Row[float]
    group2: rf.Row[float]
    group3: rf.Row[float]
    groups: rf.Row[float]
    samples: rf.Row[float]
    oldest: rf.Row[float]
    newest: rf.Row[float]
    crossed: rf.Row[float]
    up: rf.Row[float]


@rf.op(per="batch")
def seen(group: rf.Row[int], sample: rf.Row[int], version: rf.Token[int]) -> Seen:
    """Which groups a batch has, how many samples, and how old its tokens are."""
    import torch

    names, rows = sorted(set(group.tolist())), [row.tolist() for row in version.unbind()]
    found = {f"group{place}": name for place, name in enumerate(names)}
    found |= {"groups": len(names), "samples": len(set(sample.tolist()))}
    found |= {"oldest": min(map(min, rows)), "newest": max(map(max, rows))}
    found["crossed"] = sum(len(set(row)) > 1 for row in rows)
    found["up"] = all(sorted(row) == row for row in rows)
    return {name: torch.full((len(group),), float(value)) for name, value in found.items()}


PLACEMENTS = {f"apart{k}": apart(staleness=k, continuous=True) for k in (2, 4)}
PLACEMENTS |= {f"together{k}": together(staleness=k, continuous=True) for k in (1, 3)}
PLACEMENTS |= {"replicas4": apart(gen=2, staleness=4, continuous=True)}
PLACEMENTS |= {"drained": apart(staleness=1)}


@rf.pipeline(placements=PLACEMENTS)
def lasting(cfg: Config) -> None:
    actor = rf.Model("actor", TINY, optimizer=rf.AdamW(lr=cfg.lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=cfg.new, temperature=3.0)
    ops.metrics(seen(samples, name="look"), name="seen")
    reward = ops.reward(letters, samples, name="judged")
    adv = ops.advantage("grpo", samples, reward)
    ops.update(actor, samples, adv, loss=rf.PolicyLoss())
