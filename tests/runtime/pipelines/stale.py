"""Samples of older weights: by the ratio, by weights, by the pipeline's own word, or refused."""

import rlflow as rf
from rlflow import ops
from tests.runtime.pipelines.placed import TINY, apart, together


class Config(rf.Config):
    batch: int = 4
    epochs: int = 1
    lr: float = 3e-4
    sevens: bool = False


def sevens(response: str) -> float:
    return float(response.count("7"))


def letters(response: str) -> float:
    return float(sum(map(ord, response)) % 5)


def seen(version: list[int]) -> dict[str, float]:
    tokens = [number for row in version for number in row]
    return {"oldest": min(tokens), "newest": max(tokens), "tokens": len(tokens)}


PLACEMENTS = {"together": together(), "apart": apart()}
PLACEMENTS |= {f"together{k}": together(staleness=k) for k in range(4)}
PLACEMENTS |= {f"apart{k}": apart(staleness=k) for k in range(4)}


def declare(cfg, loss, **old):
    actor = rf.Model("actor", TINY, optimizer=rf.AdamW(lr=cfg.lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.batch)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=6)
    ops.metrics(samples, function=seen, name="seen")
    reward = ops.reward(sevens if cfg.sevens else letters, samples, name="judged")
    adv = ops.advantage("grpo", samples, reward)
    given = [ops.log_probs(actor, samples)] if loss.correction and cfg.epochs > 1 else []
    ops.update(actor, samples, adv, *given, loss=loss, epochs=cfg.epochs)


@rf.pipeline(placements=PLACEMENTS)
def ratio(cfg: Config) -> None:
    declare(cfg, rf.PolicyLoss())


@rf.pipeline(placements=PLACEMENTS)
def weights(cfg: Config) -> None:
    declare(cfg, rf.PolicyLoss(correction=rf.ImportanceSampling(cap=3.0)))


@rf.pipeline(placements=PLACEMENTS, staleness=2)
def said(cfg: Config) -> None:
    declare(cfg, rf.PolicyLoss())


@rf.pipeline(placements=PLACEMENTS)
def current(cfg: Config) -> None:
    declare(cfg, rf.PolicyLoss(old="current"))
