"""A loop that draws until five groups of rewards differ.

A group of 4 samples is mixed where the letters of some sum up to a multiple of 5 and those of
others do not; 5 such groups are wanted of 4 prompts a trip.
"""

import itertools
import zlib
from typing import TypedDict

import rlflow as rf
from rlflow import ops
from tests.runtime.pipelines.placed import TINY, apart, together


class Config(rf.Config):
    exhausted: str = "error"
    surplus: str = "drop"
    at_most: int = 5
    groups: int = 5
    multiple: int = 5
    ignore_eos: bool = False
    lost: bool = False


def letters(response: str, multiple: int, lost: bool) -> float:
    total = sum(map(ord, response))
    return float("nan") if lost and total % 7 == 0 else float(total % multiple == 0)


class Seen(TypedDict):
    digest: rf.Row[float]
    groups: rf.Row[float]
    rows: rf.Row[float]
    together: rf.Row[float]
    first: rf.Row[float]
    last: rf.Row[float]
    sorted: rf.Row[float]
    oldest: rf.Row[float]
    newest: rf.Row[float]


@rf.op(per="batch")
def seen(response: rf.Row[str], group: rf.Row[int], version: rf.Token[int]) -> Seen:
    import torch

    from rlflow.batch import flat, strings

    group = group.tolist()
    trips = [number // 4 for number in group]
    found = {
        "digest": zlib.crc32("|".join(strings(response)).encode()) % 2**20,
        "groups": len(set(group)),
        "rows": len(group),
        "together": sum(a == b for a, b in itertools.pairwise(group)),
        "first": min(trips),
        "last": max(trips),
        "sorted": trips == sorted(trips),
        "oldest": flat(version).min(),
        "newest": flat(version).max(),
    }
    return {name: torch.full((len(group),), float(value)) for name, value in found.items()}


PLACEMENTS = {
    "together": together(),
    "apart": apart("letters"),
    "stream": apart("letters", stream=4),
}
PLACEMENTS |= {"stale": apart("letters", staleness=1), "stale2": together(staleness=2)}
PLACEMENTS |= {"paused": apart("letters", staleness=2, pause_at=2, stream=2)}
PLACEMENTS |= {"paused2": together(staleness=2, pause_at=2)}


@rf.pipeline(placements=PLACEMENTS)
def mixed(cfg: Config) -> None:
    actor = rf.Model("actor", TINY, optimizer=rf.AdamW(lr=1e-3))

    policy = {"on_error": "drop_sample", "max_failures": 0.9} if cfg.lost else {}

    def attempt():
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(
            actor,
            prompts,
            n=4,
            max_new_tokens=6,
            temperature=1.5,
            ignore_eos=cfg.ignore_eos,
        )
        reward = ops.reward(
            letters, samples, multiple=cfg.multiple, lost=cfg.lost, name="letters", **policy
        )
        return samples, reward, ops.informative(samples, reward)

    batch = ops.repeat(
        attempt,
        until="informative",
        groups=cfg.groups,
        at_most=cfg.at_most,
        exhausted=cfg.exhausted,
        surplus=cfg.surplus,
        name="enough",
    )
    ops.metrics(seen(batch, name="look"), name="seen")
    ops.update(actor, batch, ops.advantage("grpo", batch), loss=rf.PolicyLoss())
