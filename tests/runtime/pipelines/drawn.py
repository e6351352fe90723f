"""Episodes within a loop that draws: [ prompts -> rollout -> [ act -> observe ] ] -> update."""

import rlflow as rf
from rlflow import ops
from tests.runtime.pipelines.placed import TINY, apart, together

PLACEMENTS = {"together": together(), "apart": apart()}
PLACEMENTS |= {"stale": apart(staleness=1)}


class Longer(rf.Environment):
    def begin(self, prompt: str) -> dict:
        return {"left": 1 + sum(map(ord, prompt)) % 3}

    def step(self, state: dict, response: str) -> rf.Step:
        left = state["left"] - (sum(map(ord, response)) % 2)
        reward = float(sum(map(ord, response)) % 3)
        return rf.Step(observation="3+4=", done=left <= 0, reward=reward, state={"left": left})


@rf.pipeline(placements=PLACEMENTS)
def drawn(cfg: rf.Config) -> None:
    actor = rf.Model("actor", TINY, optimizer=rf.AdamW(lr=1e-3))

    def attempt():
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=2)
        played = ops.episodes(
            actor,
            Longer(),
            prompts,
            n=3,
            max_turns=4,
            max_new_tokens=4,
            max_tokens=40,
            temperature=1.5,
        )
        return played, ops.informative(played)

    batch = ops.repeat(attempt, until="informative", groups=3, at_most=4, name="enough")
    ops.metrics(batch.only("reward", "group", "turns"), name="seen")
    ops.update(actor, batch, ops.advantage("grpo", batch), loss=rf.PolicyLoss())
