"""GRPO whose responses have drawn lengths with a long tail, on two pools of one core.

Lengths are log-normal, and the longest is eight means: which, the numbers decide that draw tokens.
Where a response is to end, the number is one that draws the tokenizer's EOS, and elsewhere one that
does not, of a random model, whose tokens are about equally likely. So a sample has its length in
whichever placement, engine and order it is decoded, and all else is what the engine does anyway.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import rlflow as rf
from rlflow import ops

MEAN, LONGEST, SPREAD = 48, 384, 1.0
# Of a log-normal variable of that spread, cut off at eight means, the mean is 0.96 of its own.
LOCATION = math.log(MEAN / 0.96) - SPREAD**2 / 2


class Config(rf.Config):
    """What `--set` may change."""

    prompts_per_iteration: int = 16
    group_size: int = 4
    lr: float = 1e-6
    model: str = "pipelines/assets/arith-tiny"
    first_groups: int | None = None
    balance: int | None = None


def length_of(uniform: float) -> int:
    """The length of a response, by a number in (0, 1)."""
    found = math.exp(LOCATION + SPREAD * NormalDist().inv_cdf(uniform))
    return max(1, min(round(found), LONGEST))


def arm(kind: type, state: dict[str, Any]) -> Any:
    """Have this process draw lengths, and make the judge that has brought this here."""
    import numpy as np

    from rlflow.engines.hf.generate import continuous, decoding, rng

    plain = rng.uniforms

    def drawn(
        seed: int, iteration: Any, stream: str, sample_ids: Any, count: int, *, first: Any = 0
    ) -> Any:
        """Numbers that end each response at its length: the second token is EOS, of 51."""
        numbers = 0.1 + 0.8 * plain(seed, iteration, stream, sample_ids, count, first=first)
        own = plain(seed, iteration, "lengths", sample_ids, 1)[:, 0]
        lengths = np.array([length_of(float(each)) for each in own])
        places = np.asarray(first).reshape(-1, 1) + np.arange(count)[None, :]
        numbers[places == lengths[:, None] - 1] = 1.5 / 51
        return numbers

    if decoding.uniforms.__name__ != "drawn":
        decoding.uniforms = continuous.uniforms = drawn
    made = kind.__new__(kind)
    made.__dict__.update(state)
    return made


class Judge:
    """A reward for anything, which brings the lengths along into every process."""

    def __call__(self, response: str) -> float:
        """A number that follows from a response."""
        return float(sum(map(ord, response)) % 7)

    def __reduce__(self) -> tuple[Any, ...]:
        return arm, (Judge, self.__dict__)


def apart(gen: int = 1, **options: Any) -> rf.Placement:
    assign = {"*": rf.on("train"), "actor.rollout": rf.on("gen")}
    return rf.Placement(pools={"train": 1, "gen": gen}, assign=assign, **options)


@rf.pipeline(
    placements={
        "split": apart(),
        "replicas": apart(gen=2),
        "stream2": apart(stream=2),
        "stream4": apart(stream=4),
        "stream8": apart(stream=8),
        "stale": apart(staleness=2),
        "continuous2": apart(staleness=2, continuous=True),
        "continuous4": apart(staleness=4, continuous=True),
        "continuous8": apart(staleness=8, continuous=True),
    }
)
def tails(cfg: Config) -> None:
    judge = arm(Judge, {"__name__": "judge", "__qualname__": "judge"})
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr), init="random")
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    sampling = {"n": cfg.group_size, "max_new_tokens": LONGEST}
    chosen = {"first_groups": cfg.first_groups, "balance": cfg.balance}
    samples = ops.rollout(actor, prompts, **chosen, **sampling)
    reward = ops.reward(judge, samples)
    adv = ops.advantage("grpo", samples, reward)
    ops.update(actor, samples, adv, loss=rf.PolicyLoss())
