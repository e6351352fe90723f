"""The cases beside the advantage estimators of verl 0.9.1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numerics.compare import Case, Fields, Made, Ours, Variant
from numerics.ours import rows, tokens
from rlflow.ops.math.advantages.group import (
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    opo,
    pass_at_k,
    reinforce_pp_baseline,
    rloo,
)
from rlflow.ops.math.advantages.token import gae, optimal_token_baseline, reinforce_pp, remax

REWARD = ("reward", "group")
WITH_SMALL = ("ragged", "edge", "small")
OF_ONE = "a group of one has no baseline and gets 0, in verl its reward"
KEEPS = 'single="reward"'
FLOAT32 = 2e-6
"""verl has constants, or whole functions, in float32, whatever the inputs are."""
COUNT_EPS = 1e-7
"""verl adds 1e-8 to the count that a masked mean divides by."""


def group_case(name: str, function: str, estimator: Any, *names: str, **changed: Any) -> Case:
    """An estimator that differs from verl's for groups of one, on the edge batch."""
    options = changed.pop("options", {})
    return Case(
        name=name,
        kind="estimator",
        function=function,
        batches=changed.pop("batches", WITH_SMALL),
        ours=rows(estimator, *names, **options),
        reason=OF_ONE,
        option=KEEPS,
        reached=rows(estimator, *names, **options, single="reward"),
        **changed,
    )


def group_estimators() -> list[Case]:
    """Estimators of rows."""
    unscaled = {"config": {}, "arguments": {"norm_adv_by_std_in_grpo": False}}
    return [
        group_case("grpo", "grpo", grpo, *REWARD, tolerance=FLOAT32),
        *vectorized(),
        group_case("dr_grpo", "grpo", dr_grpo, *REWARD, given=unscaled),
        group_case("rloo", "rloo", rloo, *REWARD),
        Case(
            name="rloo",
            kind="estimator",
            function="rloo_vectorized",
            ours=rows(rloo, *REWARD),
        ),
        group_case("opo", "opo", opo, *REWARD, "response_mask"),
        Case(
            name="gpg",
            kind="estimator",
            function="gpg",
            ours=rows(gpg, *REWARD),
            reason="alpha counts the rows of level groups as silent, in verl those of reward 0",
            option='alpha="zero_reward", single="reward"',
            reached=rows(gpg, *REWARD, alpha="zero_reward", single="reward"),
            tolerance=FLOAT32,
        ),
        group_case(
            "reinforce_pp_baseline",
            "reinforce_plus_plus_baseline",
            reinforce_pp_baseline,
            *REWARD,
            "response_mask",
            tolerance=COUNT_EPS,
        ),
        Case(
            name="pass_at_k",
            kind="estimator",
            function="grpo_passk",
            ours=rows(pass_at_k, *REWARD),
            batches=("ragged", "far", "small"),
        ),
        Case(
            name="pass_at_k, as in the paper",
            kind="estimator",
            function="grpo_passk",
            given={"config": {"norm_adv_by_std_in_grpo": False}},
            ours=rows(pass_at_k, *REWARD, scale="none"),
            batches=("ragged", "far", "small"),
        ),
        *gdpo_cases(),
    ]


def vectorized() -> list[Case]:
    """GRPO beside the second form of verl, in float32; level groups are on the edge batch alone."""
    edge = group_case("grpo, level groups", "grpo_vectorized", grpo, *REWARD, tolerance=5e-3)
    rounding = "; of equal rewards ours are exactly 0, verl's the rounding of float32 over std_eps"
    return [
        Case(
            name="grpo",
            kind="estimator",
            function="grpo_vectorized",
            batches=("ragged", "far", "full"),
            ours=rows(grpo, *REWARD),
            tolerance=1e-5,
        ),
        replace(edge, batches=("edge",), reason=edge.reason + rounding),
    ]


def gdpo_cases() -> list[Case]:
    """GDPO, with and without weights."""
    given = ("rewards", "group", "response_mask")
    why = f"whitened over rows, in verl over tokens; {OF_ONE}"
    option = 'over="tokens", single="reward"'
    return [
        Case(
            name=f"gdpo, weights {weights}",
            kind="estimator",
            function="gdpo",
            given={"config": {"gdpo_reward_weights": weights}},
            ours=rows(gdpo, *given, weights=weights),
            reason=why,
            option=option,
            reached=rows(gdpo, *given, weights=weights, over="tokens", single="reward"),
            tolerance=FLOAT32,
        )
        for weights in ([1.0, 1.0], [0.7, -0.2])
    ]


def token_estimators() -> list[Case]:
    """Estimators of tokens; rewards on every token, one where the estimator wants an outcome."""
    dense = {"rewards": "dense_rewards", "returns": True}
    discounts = ({"gamma": 1.0, "lam": 1.0}, {"gamma": 0.97, "lam": 0.9})
    return [
        Case(
            name="gae",
            kind="estimator",
            function="gae",
            given=dense,
            variants=tuple({"arguments": pair} for pair in discounts),
            batches=WITH_SMALL,
            ours=tokens(gae, "dense_rewards", "values", "response_mask"),
            tolerance=COUNT_EPS,
        ),
        Case(
            name="reinforce_pp",
            kind="estimator",
            function="reinforce_plus_plus",
            given=dense,
            variants=({"config": {"gamma": 1.0}}, {"config": {"gamma": 0.9}}),
            batches=WITH_SMALL,
            ours=tokens(reinforce_pp, "dense_rewards", "response_mask"),
            tolerance=COUNT_EPS,
        ),
        Case(
            name="remax",
            kind="estimator",
            function="remax",
            given=dense,
            ours=tokens(remax, "dense_rewards", "baseline", "response_mask"),
        ),
    ]


def token_baselines() -> list[Case]:
    """The optimal token baseline beside both of its forms in verl."""
    dense = {"rewards": "dense_rewards", "returns": True}
    energies = ("old_log_probs", "sum_pi_squared", "response_mask", "group")
    tails = ({"handle_zero_tail": True}, {"handle_zero_tail": False})
    return [
        Case(
            name="optimal_token_baseline",
            kind="estimator",
            function="tir_optimal_token_baseline",
            given=dense,
            variants=tuple({"arguments": tail} for tail in tails),
            ours=_otb(energies, single="zero"),
            reason=OF_ONE,
            option=KEEPS,
            reached=_otb(energies, single="reward"),
            tolerance=COUNT_EPS,
        ),
        Case(
            name="optimal_token_baseline, no holes",
            kind="estimator",
            function="optimal_token_baseline",
            given=dense,
            variants=tuple({"arguments": tail} for tail in tails),
            batches=("full",),
            ours=_otb(energies, single="zero"),
            tolerance=COUNT_EPS,
        ),
        Case(
            name="optimal_token_baseline",
            kind="estimator",
            function="optimal_token_baseline",
            given=dense,
            batches=("ragged",),
            ours=_otb(energies, single="zero"),
            reason="rows are aligned by unmasked tokens, here in verl by columns",
            option="none; verl's form for several turns aligns as ours",
        ),
    ]


def _otb(names: tuple[str, ...], *, single: str) -> Ours:
    def made(fields: Fields, variant: Variant) -> Made:
        zero_tail = variant.get("arguments", {}).get("handle_zero_tail", True)
        given = tokens(
            optimal_token_baseline, "dense_rewards", *names, zero_tail=zero_tail, single=single
        )
        return given(fields, {})

    return made


def estimator_cases() -> list[Case]:
    """Every estimator."""
    return [*group_estimators(), *token_estimators(), *token_baselines()]
