"""Rollouts that the devices of the trainer help to draw."""

import rlflow as rf
from rlflow import ops
from tests.runtime.pipelines.placed import TINY, apart, together


class Config(rf.Config):
    lr: float = 1e-3
    temperature: float = 1.0


def letters(response: str) -> float:
    return float(sum(map(ord, response)) % 5)


def seen(version: list[list[int]], finished: list[bool]) -> dict[str, float]:
    """The versions that sampled the rows of the first prompts, and those of the others."""
    assert len(version) == len(finished) == 16
    halves = [{number for row in half for number in row} for half in (version[:8], version[8:])]
    (gen,), (train,) = halves
    return {"gen": gen, "train": train, "ended": sum(finished)}


HELPED = {"actor.rollout": rf.on("gen", also="train", share="1/2")}
PLACEMENTS = {
    "together": together(),
    **{f"apart{k}": apart(staleness=k) for k in (0, 1)},
    **{
        f"helped{k}": rf.Placement(
            pools={"train": 1, "gen": 1}, assign={"*": rf.on("train"), **HELPED}, staleness=k
        )
        for k in (0, 1, 2)
    },
    "open": rf.Placement(
        pools={"train": 1, "gen": 1},
        assign={"*": rf.on("train"), "actor.rollout": rf.on("gen", also="train")},
        staleness=1,
    ),
    "wide": rf.Placement(
        pools={"train": 2, "gen": 2}, assign={"*": rf.on("train"), **HELPED}, staleness=1
    ),
}


@rf.pipeline(placements=PLACEMENTS)
def helped(cfg: Config) -> None:
    actor = rf.Model("actor", TINY, optimizer=rf.AdamW(lr=cfg.lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=6, temperature=cfg.temperature)
    ops.metrics(samples, function=seen, name="seen")
    reward = ops.reward(letters, samples, name="judged")
    adv = ops.advantage("grpo", samples, reward)
    ops.update(actor, samples, adv, loss=rf.PolicyLoss())
