"""KL in the reward and in the loss, and the entropy: three coefficients that move every time."""

import rlflow as rf
from rlflow import ops
from tests.runtime.pipelines.placed import TINY, together


class Config(rf.Config):
    pass


def letters(response: str) -> float:
    return float(sum(map(ord, response)) % 5)


@rf.pipeline(placements={"one": together(), "two": together(2), "old": together(staleness=2)})
def adaptive(cfg: Config) -> None:
    actor = rf.Model("actor", TINY, optimizer=rf.AdamW(lr=3e-4))
    ref = rf.Model("ref", TINY)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=5)
    reward = ops.reward(letters, samples)
    ref_lp = ops.log_probs(ref, samples)
    in_reward = rf.AdaptiveKL(1e-3, horizon=10, init=0.05, per="sequence")
    adv = ops.advantage("rloo", samples, reward, ref_lp, kl_coef=in_reward)
    loss = rf.PolicyLoss(
        kl_coef=rf.AdaptiveKL(1e-3, horizon=20, init=0.1),
        entropy_coef=rf.AdaptiveEntropy(0.6, step=0.003, init=0.01),
        old="loglinear",
        correction=rf.ImportanceSampling(),
        rejection=rf.Rejection("k3", over="row-max", high=0.5),
    )
    ops.update(actor, samples, adv, ref_lp, loss=loss, epochs=2)
