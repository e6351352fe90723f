"""A loop in a loop: rollout -> [ restarted -> [ tried -> good ] -> spoken -> over ] -> update."""

from typing import TypedDict

import rlflow as rf
from rlflow import ops
from tests.runtime.pipelines.placed import TINY, apart, together

PLACEMENTS = {"together": together(), "apart": apart("tried", "spoken")}


class Begun(TypedDict):
    turn: rf.Row[float]
    said: rf.Row[float]


@rf.op(per="row")
def begun(sample: rf.Row[int]) -> Begun:
    return {"turn": 0.0 * sample, "said": 1.0 * (sample % 4)}


@rf.op(per="row")
def wanted(sample: rf.Row[int]) -> rf.Row[float]:
    return 1.0 + sample % 4


@rf.op(per="row")
def restarted(turn: rf.Row[float]) -> rf.Row[float]:
    return 0.0 * turn


@rf.op(per="row")
def tried(draft: rf.Row[float], turn: rf.Row[float], wanted: rf.Row[float]) -> rf.Row[float]:
    return draft + (draft < (turn * wanted) % 4)


@rf.op(per="row")
def good(draft: rf.Row[float], turn: rf.Row[float], wanted: rf.Row[float]) -> rf.Row[bool]:
    return draft >= (turn * wanted) % 4


@rf.op(per="row")
def spoken(said: rf.Row[float], draft: rf.Row[float], turn: rf.Row[float]) -> rf.Row[float]:
    return 3 * said + draft * (turn + 1)


@rf.op(per="row")
def next_turn(turn: rf.Row[float], wanted: rf.Row[float]) -> rf.Row[float]:
    return turn + (turn < wanted)


@rf.op(per="row")
def over(turn: rf.Row[float], wanted: rf.Row[float]) -> rf.Row[bool]:
    return turn >= wanted


class Config(rf.Config):
    turns: int = 5
    tries: int = 4


@rf.pipeline(placements=PLACEMENTS)
def turns(cfg: Config) -> None:
    actor = rf.Model("actor", TINY, optimizer=rf.AdamW(lr=1e-3))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=4)
    aim = wanted(samples)

    def turn(state):
        def attempt(draft):
            after = tried(draft, state, aim).rename(draft="tried")
            return after, good(after, state, aim)

        blank = restarted(state).rename(draft="restarted")
        draft = ops.repeat(attempt, blank, until="good", at_most=cfg.tries, name="tries")
        said = spoken(draft, state).rename(said="spoken")
        later = next_turn(state, aim).rename(turn="next_turn")
        return said, later, over(later, aim)

    first = begun(samples)
    ended = ops.repeat(turn, first, until="over", at_most=cfg.turns, name="turns")
    ops.metrics(ended.only("said", "turn"), name="seen")
    reward = ended.only("said").rename(reward="said")
    ops.update(actor, samples, ops.advantage("grpo", samples, reward), loss=rf.PolicyLoss())
