"""Episodes of a few turns, with what is seen of their versions, masks and log-probs."""

import itertools

import rlflow as rf
from rlflow import ops
from tests.runtime.pipelines.placed import TINY, apart, together


class Config(rf.Config):
    ends: str = "right"
    turns: int = 3
    on_error: str = "error"
    max_truncated: float = 1.0
    max_failures: float = 1.0
    max_tokens: int = 24
    told: float = 0.0
    everything: bool = False
    compared: bool = False
    lr: float = 1e-3


class Again(rf.Environment):
    def __init__(self, ends):
        self.ends = ends

    def begin(self, prompt):
        return {"prompt": prompt, "turn": 0}

    def step(self, state, response):
        state["turn"] += 1
        letters = sum(map(ord, response))
        if self.ends == "raises" and letters % 5 == 0:
            raise LookupError("no such sum")
        right = letters % 3 == 0 and self.ends != "never"
        return rf.Step(state["prompt"], right, letters % 7 / state["turn"], state)


@rf.op(per="row")
def ref_log_probs(
    rollout_log_probs: rf.Token[float], response_mask: rf.Token[bool], *, told: float = 0.0
) -> rf.Token[float]:
    import torch

    from rlflow.batch import flat, ragged_like

    values = flat(rollout_log_probs) - 0.1
    changed = torch.where(flat(response_mask), values, torch.tensor(told))
    return ragged_like(changed, rollout_log_probs)


@rf.op(per="row")
def response_mask(response_tokens: rf.Token[int]) -> rf.Token[bool]:
    import torch

    from rlflow.batch import flat, ragged_like

    return ragged_like(torch.ones(len(flat(response_tokens))).bool(), response_tokens)


def seen(
    version: list[list[int]], response_mask: list[list[bool]], rollout_log_probs: list[list[float]]
) -> dict[str, float]:
    tokens = [number for row in version for number in row]
    lengths = {len(a) - len(b) for a, b in zip(version, response_mask, strict=False)}
    quiet = [
        number
        for row, mask in zip(rollout_log_probs, response_mask, strict=False)
        for number, own in zip(row, mask, strict=False)
        if not own
    ]
    told = [sum(a and not b for a, b in itertools.pairwise(mask)) for mask in response_mask]
    return {
        "least_told": min(told),
        "most_told": max(told),
        "oldest": min(tokens),
        "newest": max(tokens),
        "first": max(row[0] for row in version),
        "last": max((row[-1] for row in version if len(row) > 6), default=0),
        "uneven": max(map(abs, lengths)),
        "ordered": all(sorted(row) == row for row in version),
        "loud": max(map(abs, quiet), default=0.0),
    }


def apart_by(
    response_mask: list[list[bool]],
    rollout_log_probs: list[list[float]],
    old_log_probs: list[list[float]],
) -> dict[str, float]:
    return {
        "most": max(
            abs(a - b)
            for mask, one, other in zip(
                response_mask, rollout_log_probs, old_log_probs, strict=False
            )
            for own, a, b in zip(mask, one, other, strict=False)
            if own
        )
    }


PLACEMENTS = {"together": together(), "apart": apart()}
PLACEMENTS |= {
    f"{name}_stale": made(staleness=1) for name, made in (("together", together), ("apart", apart))
}
PLACEMENTS |= {
    f"{name}_paused": made(staleness=1, pause_at=2)
    for name, made in (("together", together), ("apart", apart))
}
PLACEMENTS |= {
    "streamed": apart(stream=2),
    "streamed_paused": apart(stream=2, staleness=1, pause_at=2),
}


@rf.pipeline(placements=PLACEMENTS)
def again(cfg: Config) -> None:
    actor = rf.Model("actor", TINY, optimizer=rf.AdamW(lr=cfg.lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=1, test_size=20), batch=4)
    limits = {"max_failures": cfg.max_failures} if cfg.on_error != "error" else {}
    rows = ops.episodes(
        actor,
        Again(cfg.ends),
        prompts,
        n=4,
        max_turns=cfg.turns,
        max_new_tokens=4,
        max_tokens=cfg.max_tokens,
        on_error=cfg.on_error,
        max_truncated=cfg.max_truncated,
        **limits,
    )
    ops.metrics(rows, function=seen, name="seen")
    if cfg.compared:
        own = ops.log_probs(actor, rows)
        ops.metrics(rows.only("response_mask", "rollout_log_probs"), own, function=apart_by)
    adv = ops.advantage("grpo", rows)
    if cfg.everything:
        names = [o.name for o in rows.offers if o.name != "response_mask"]
        rows = rows.only(*names), response_mask(rows)
        ops.update(actor, *rows, adv, loss=rf.PolicyLoss())
        return
    ref = ref_log_probs(rows, told=cfg.told)
    ops.update(actor, rows, adv, ref, loss=rf.PolicyLoss(kl_coef=0.1))
