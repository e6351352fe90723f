"""Prompts drawn by pass rates: tracked within a loop, behind it, or without one."""

import rlflow as rf
from rlflow import ops
from tests.runtime.pipelines.placed import TINY, apart, together


class Config(rf.Config):
    tracked: str = "plain"
    by: str = "level"


def letters(response: str) -> float:
    return (sum(map(ord, response)) % 5) / 4


def exact(response: str, answer: str) -> float:
    return float(response.strip() == answer)


def counts(level: list[str]) -> dict[str, float]:
    return {n: level.count(n) for n in "123"}


@rf.pipeline(
    placements={
        "together": together(),
        "apart": apart(),
        "pooled": rf.Placement(
            pools={"all": 1}, assign={k: rf.on("all") for k in ("*", "prompts", "passes")}
        ),
        "streamed": apart(stream=2),
        "late": together(staleness=1),
        "late_apart": apart(staleness=1),
        "ranks": apart(gen=2, staleness=1),
    }
)
def levels(cfg: Config) -> None:
    actor = rf.Model("actor", TINY, optimizer=rf.AdamW(lr=3e-4))
    sources = {str(n): rf.data.arithmetic(digits=n, test_size=90) for n in (1, 2, 3)}
    passes = rf.PassRates("passes", by=cfg.by, floor=0.2)
    data = rf.data.mix(sources, column="level")
    if cfg.by == "row_id":
        data = rf.data.arithmetic(digits=1, test_size=90)

    def attempt():
        prompts = ops.prompts(data, batch=4, weights=passes)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=5)
        reward = ops.reward(exact if cfg.tracked == "inside" else letters, samples)
        if cfg.tracked == "inside":
            ops.track(passes, samples, reward)
        if cfg.tracked == "plain":
            return samples, reward
        return samples, reward, ops.informative(samples, reward)

    if cfg.tracked == "plain":
        batch = attempt()
    else:
        batch = (
            ops.repeat(
                attempt, until="informative", groups=4, at_most=3, expected=2, exhausted="fill"
            ),
        )
    if cfg.tracked != "inside":
        ops.track(passes, *batch)
    if cfg.by == "level":
        ops.metrics(*batch, function=counts, name="counts")
    loss = rf.PolicyLoss(correction=rf.ImportanceSampling())
    ops.update(actor, *batch, ops.advantage("grpo", *batch), loss=loss)
