"""Rollouts that take newer weights at their third token."""

import rlflow as rf
from rlflow import ops
from tests.runtime.pipelines.placed import TINY, apart, together


class Config(rf.Config):
    epochs: int = 1
    lr: float = 1e-3
    temperature: float = 1.0


def letters(response: str) -> float:
    return float(sum(map(ord, response)) % 5)


def seen(version: list[list[int]], finished: list[bool]) -> dict[str, float]:
    before = [number for row in version for number in row[:3]]
    after = [number for row in version for number in row[3:]]
    found = {"oldest": min(before), "older": max(before), "all": len(before) + len(after)}
    found |= {"newer": min(after), "newest": max(after)} if after else {}
    stopped = sum(len(row) > 3 for row in version)
    return found | {"stopped": stopped, "ended": sum(finished)}


PLACEMENTS = {f"together{k}": together(staleness=k, pause_at=3) for k in (1, 2)}
PLACEMENTS |= {f"apart{k}": apart(staleness=k, pause_at=3) for k in (1, 2)}
PLACEMENTS |= {f"whole{k}": apart(staleness=k) for k in (1, 2)}


@rf.pipeline(placements=PLACEMENTS)
def paused(cfg: Config) -> None:
    actor = rf.Model("actor", TINY, optimizer=rf.AdamW(lr=cfg.lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=6, temperature=cfg.temperature)
    ops.metrics(samples, function=seen, name="seen")
    reward = ops.reward(letters, samples, name="judged")
    adv = ops.advantage("grpo", samples, reward)
    loss = rf.PolicyLoss(correction=rf.ImportanceSampling(cap=3.0)) if cfg.epochs > 1 else None
    given = [ops.log_probs(actor, samples)] if cfg.epochs > 1 else []
    ops.update(actor, samples, adv, *given, loss=loss or rf.PolicyLoss(), epochs=cfg.epochs)
