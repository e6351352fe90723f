"""The cases beside the advantages of TRL 1.16.0."""

from __future__ import annotations

from typing import Any

import torch

from numerics.compare import Case, Fields, Made, Ours, Variant
from rlflow.ops.math.advantages.group import gdpo, grpo, rloo
from rlflow.ops.math.advantages.token import token_rewards
from rlflow.ops.math.kl import token_kl

SCALED = "std_eps is 1e-6, in TRL 1e-4"
UNSCORED = [1, 8, 9, 10]
FLOAT32 = 1e-5
"""TRL computes advantages in float32."""


def estimator(name: str, trainer: str, ours: Ours, **changed: Any) -> Case:
    """Advantages, of four groups of four samples in order: TRL knows no others."""
    return Case(
        name=name,
        kind="estimator",
        function=f"{trainer}._generate_and_score_completions",
        ours=ours,
        batches=("sorted",),
        tolerance=FLOAT32,
        **changed,
    )


def advantage_cases() -> list[Case]:
    """GRPO with every scale, several rewards, and RLOO with and without a KL."""
    found = [
        estimator(
            f"grpo, scale {scale}",
            "GRPOTrainer",
            grouped(scale=scale),
            given={"config": {"scale_rewards": scale}},
            reason=SCALED,
            option="std_eps=1e-4",
            reached=grouped(scale=scale, std_eps=1e-4),
        )
        for scale in ("group", "batch")
    ]
    several = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [0.7, -0.2]}
    return [
        *found,
        estimator(
            "dr_grpo",
            "GRPOTrainer",
            grouped(scale="none"),
            given={"config": {"scale_rewards": "none"}},
        ),
        estimator(
            "gdpo, weights [0.7, -0.2]",
            "GRPOTrainer",
            several_rewards(),
            given={"rewards": 2, "config": several},
            reason=SCALED,
            option="std_eps=1e-4",
            reached=several_rewards(std_eps=1e-4),
        ),
        estimator("rloo", "RLOOTrainer", leave_one_out()),
        *(
            estimator(
                f"{name}, samples without a reward dropped",
                trainer,
                dropped(ours),
                given={"unscored": UNSCORED, "config": config},
            )
            for name, trainer, ours, config in (
                ("dr_grpo", "GRPOTrainer", grouped(scale="none"), {"scale_rewards": "none"}),
                ("rloo", "RLOOTrainer", leave_one_out(), {}),
            )
        ),
        estimator(
            "rloo, whiten",
            "RLOOTrainer",
            leave_one_out(whiten=True),
            given={"config": {"normalize_advantages": True}},
        ),
        *(
            estimator(
                f"rloo, reward_clip_range{told}",
                "RLOOTrainer",
                leave_one_out(held=(-0.5, 0.4), kl_coef=beta),
                given={"config": {"reward_clip_range": [-0.5, 0.4], "beta": beta}},
            )
            for told, beta in (("", 0.0), (", KL in the reward", 0.05))
        ),
        estimator(
            "rloo, KL in the reward",
            "RLOOTrainer",
            leave_one_out(kl_coef=0.05),
            given={"config": {"beta": 0.05}},
        ),
    ]


def grouped(**options: Any) -> Ours:
    """GRPO of the rewards; TRL returns a number a row."""

    def made(fields: Fields, variant: Variant) -> Made:
        return {"advantages": grpo(fields["rewards"][:, 0], fields["group"], **options)}

    return made


def dropped(ours: Ours) -> Ours:
    """Ours of the rows that have a reward, as `on_error="drop_sample"` leaves them; else 0."""

    def made(fields: Fields, variant: Variant) -> Made:
        left = torch.ones(len(fields["group"]), dtype=torch.bool)
        left[UNSCORED] = False
        found = ours({**fields, **{k: fields[k][left] for k in ("rewards", "group")}}, variant)
        whole = torch.zeros(len(left), dtype=torch.float64)
        whole[left] = found["advantages"]
        return {"advantages": whole}

    return made


def several_rewards(**options: Any) -> Ours:
    """GDPO with the weights of the case."""

    def made(fields: Fields, variant: Variant) -> Made:
        weights = [0.7, -0.2]
        found = gdpo(fields["rewards"], fields["group"], weights=weights, **options)
        return {"advantages": found}

    return made


def leave_one_out(
    *, kl_coef: float = 0.0, held: tuple[float, float] | None = None, **options: Any
) -> Ours:
    """RLOO; as in the body of the estimator the reward is held first, and tokens pay a KL."""

    def made(fields: Fields, variant: Variant) -> Made:
        reward, mask = fields["rewards"][:, 0], fields["response_mask"]
        if held is not None:
            reward = reward.clamp(*held)
        if kl_coef:
            kl = token_kl(fields["rollout_log_probs"], fields["ref_log_probs"], mask, kind="k1")
            reward = token_rewards(reward, mask, kl=kl, kl_coef=kl_coef).sum(-1)
        return {"advantages": rloo(reward, fields["group"], **options)}

    return made
