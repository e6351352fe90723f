"""The advantage estimators by name: what each reads, makes and takes as options.

An estimator joins the engine by one entry here and one body. The formulas are in
`rlflow.ops.math.advantages`; what may be said about their options is in
`rlflow.ops.estimator_options`. This file holds no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlflow.errors import Finding, Source
from rlflow.graph.fields import Field, Granularity, row, token
from rlflow.graph.op import Input
from rlflow.ops.controllers import AdaptiveKL

REWARD = Input(name="reward", dtype="float32", levels=("row",))
GROUP = Input(name="group", dtype="int64", levels=("row",))
MASK = Input(name="response_mask", dtype="bool", levels=("token",))
VALUES = Input(
    name="values",
    dtype="float32",
    levels=("token",),
    hint="values = ops.values(critic, samples)",
)
FINISHED = Input(name="finished", dtype="bool", levels=("row",))
BASELINE = Input(
    name="baseline",
    dtype="float32",
    levels=("row",),
    hint='greedy_reward.rename(baseline="reward")',
)
OLD = Input(
    name="old_log_probs",
    dtype="float32",
    levels=("token",),
    hint="old_log_probs = ops.log_probs(actor, samples)",
)
SUM_PI_SQUARED = Input(name="sum_pi_squared", dtype="float32", levels=("token",))
BEHAVIOUR = Input(name="rollout_log_probs", dtype="float32", levels=("token",))
REFERENCE = Input(
    name="ref_log_probs",
    dtype="float32",
    levels=("token",),
    hint="ref_log_probs = ops.log_probs(ref, samples)",
)
GIVEN_KL = Input(
    name="kl",
    dtype="float32",
    levels=("token",),
    hint="an @rf.op that returns rf.Token[float], named 'kl'",
)

REWARD_OPTIONS = {"reward_clip_range": None, "kl_coef": 0.0, "kl": "k1"}
"""What may be done to one reward before it is an advantage: held in a range, less a KL."""
BODIES = "rlflow.ops.bodies.advantage"
ROW = (row("advantages"),)
TOKEN = (token("advantages"), token("returns"))

Settings = Mapping[str, tuple[Any, ...]]

SCALED: Settings = {"scale": ("group", "batch")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """An advantage estimator: `options` maps each option to its default.

    `per` is how it may be cut where none of `batch_if` holds: an option and the values that
    make a statistic of the whole batch. `only_with` maps an option to the settings with which
    it does something; it does nothing unless one of them holds in full. `reads_if` maps an
    option to what is read where it is on.
    """

    name: str
    body: str
    inputs: tuple[Input, ...]
    outputs: tuple[Field, ...]
    per: Granularity
    options: Mapping[str, Any] = field(default_factory=dict)
    batch_if: Settings = field(default_factory=dict)
    only_with: Mapping[str, tuple[Settings, ...]] = field(default_factory=dict)
    reads_if: Mapping[str, tuple[Any, Input]] = field(default_factory=dict)
    source: str = ""


ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator
    for estimator in (
        Estimator(
            name="gae",
            body=f"{BODIES}:gae",
            inputs=(REWARD, VALUES, MASK),
            outputs=TOKEN,
            per="row",
            options={
                "gamma": 1.0,
                "lam": 1.0,
                "whiten": True,
                "bootstrap": False,
                **REWARD_OPTIONS,
            },
            batch_if={"whiten": (True,)},
            reads_if={"bootstrap": (True, FINISHED)},
            source="Schulman et al. 2015, arXiv 1506.02438, eq. 16",
        ),
        Estimator(
            name="grpo",
            body=f"{BODIES}:grpo",
            inputs=(REWARD, GROUP),
            outputs=ROW,
            per="group",
            options={
                "std_eps": 1e-6,
                "scale": "group",
                "single": "zero",
                "leave_one_out": False,
                **REWARD_OPTIONS,
            },
            batch_if={"scale": ("batch",)},
            only_with={"std_eps": (SCALED,)},
            source="Shao et al. 2024, arXiv 2402.03300, section 4.1.2",
        ),
        Estimator(
            name="dr_grpo",
            body=f"{BODIES}:dr_grpo",
            inputs=(REWARD, GROUP),
            outputs=ROW,
            per="group",
            options={"single": "zero", **REWARD_OPTIONS},
            source="Liu et al. 2025, arXiv 2503.20783, section 3.2",
        ),
        Estimator(
            name="rloo",
            body=f"{BODIES}:rloo",
            inputs=(REWARD, GROUP),
            outputs=ROW,
            per="group",
            options={"single": "zero", "whiten": False, "std_eps": 1e-4, **REWARD_OPTIONS},
            batch_if={"whiten": (True,)},
            only_with={"std_eps": ({"whiten": (True,)},)},
            source="Ahmadian et al. 2024, arXiv 2402.14740",
        ),
        Estimator(
            name="reinforce++",
            body=f"{BODIES}:reinforce_pp",
            inputs=(REWARD, MASK),
            outputs=TOKEN,
            per="row",
            options={"gamma": 1.0, "whiten": True, **REWARD_OPTIONS},
            batch_if={"whiten": (True,)},
            source="Hu et al. 2025, arXiv 2501.03262",
        ),
        Estimator(
            name="reinforce++-baseline",
            body=f"{BODIES}:reinforce_pp_baseline",
            inputs=(REWARD, GROUP, MASK),
            outputs=ROW,
            per="group",
            options={"single": "zero", "whiten": True, "over": "tokens", **REWARD_OPTIONS},
            batch_if={"whiten": (True,)},
            only_with={"over": ({"whiten": (True,)},)},
            source="Hu et al. 2025, arXiv 2501.03262",
        ),
        Estimator(
            name="remax",
            body=f"{BODIES}:remax",
            inputs=(REWARD, BASELINE, MASK),
            outputs=TOKEN,
            per="row",
            options={**REWARD_OPTIONS},
            source="Li et al. 2023, arXiv 2310.10505, algorithm 1",
        ),
        Estimator(
            name="opo",
            body=f"{BODIES}:opo",
            inputs=(REWARD, GROUP, MASK),
            outputs=ROW,
            per="group",
            options={"single": "zero", **REWARD_OPTIONS},
            source="Hao et al. 2025, arXiv 2505.23585",
        ),
        Estimator(
            name="gpg",
            body=f"{BODIES}:gpg",
            inputs=(REWARD, GROUP),
            outputs=ROW,
            per="group",
            options={
                "alpha": "degenerate",
                "scale": "none",
                "std_eps": 1e-6,
                "single": "zero",
                **REWARD_OPTIONS,
            },
            batch_if={"alpha": ("degenerate", "zero_reward"), "scale": ("batch",)},
            only_with={"std_eps": (SCALED,)},
            source="Chu et al. 2025, arXiv 2504.02546, section 3",
        ),
        Estimator(
            name="pass@k",
            body=f"{BODIES}:pass_at_k",
            inputs=(REWARD, GROUP),
            outputs=ROW,
            per="group",
            options={"std_eps": 1e-6, "scale": "group", **REWARD_OPTIONS},
            batch_if={"scale": ("batch",)},
            only_with={"std_eps": (SCALED,)},
            source="Tang et al. 2025, arXiv 2503.19595",
        ),
        Estimator(
            name="gdpo",
            body=f"{BODIES}:gdpo",
            inputs=(GROUP,),
            outputs=ROW,
            per="group",
            options={
                "rewards": None,
                "std_eps": 1e-6,
                "scale": "group",
                "single": "zero",
                "whiten": True,
                "over": "rows",
            },
            batch_if={"whiten": (True,), "scale": ("batch",)},
            only_with={
                "std_eps": (SCALED, {"whiten": (True,), "over": ("rows",)}),
                "over": ({"whiten": (True,)},),
            },
            reads_if={"over": ("tokens", MASK)},
            source="Liu et al. 2026, arXiv 2601.05242",
        ),
        Estimator(
            name="otb",
            body=f"{BODIES}:optimal_token_baseline",
            inputs=(REWARD, GROUP, MASK, OLD, SUM_PI_SQUARED),
            outputs=TOKEN,
            per="group",
            options={"zero_tail": True, "single": "zero", **REWARD_OPTIONS},
            source="verl 0.9.1, optimal token baseline",
        ),
    )
}


def find_estimator(name: str, where: Source | None) -> Estimator | Finding:
    """The estimator of that name, or the finding that says which there are."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    near = tuple(difflib.get_close_matches(name, ESTIMATORS, n=3, cutoff=0.6))
    return Finding(
        code="E116",
        what=f"there is no advantage estimator {name!r}",
        where=where,
        expected=", ".join(ESTIMATORS),
        near=near,
        fix="an estimator of your own is an @rf.op function named 'advantages'",
    )


def in_force(estimator: Estimator, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of the estimator with what was given, its default otherwise."""
    return {name: given.get(name, default) for name, default in estimator.options.items()}


def granularity(estimator: Estimator, given: Mapping[str, Any]) -> Granularity:
    """How the estimator may be cut: not at all where a coefficient follows the whole batch."""
    options = in_force(estimator, given)
    whole = any(options[name] in values for name, values in estimator.batch_if.items())
    whole = whole or isinstance(options.get("kl_coef"), AdaptiveKL)
    return "batch" if whole else estimator.per


def needed_inputs(estimator: Estimator, given: Mapping[str, Any]) -> tuple[Input, ...]:
    """What the estimator reads with these options: a KL in the reward reads log-probs too."""
    options = in_force(estimator, given)
    named = tuple(
        Input(
            name=name,
            dtype="float32",
            levels=("row",),
            hint=f'reward.rename({name}="reward")',
        )
        for name in options.get("rewards") or ()
    )
    extra = [wanted for name, (on, wanted) in estimator.reads_if.items() if options[name] == on]
    if options.get("kl_coef"):
        given_kl = options.get("kl") == "given"
        extra += [GIVEN_KL, MASK] if given_kl else [REFERENCE, BEHAVIOUR, MASK]
    inputs = (*named, *estimator.inputs)
    return inputs + tuple(wanted for wanted in extra if wanted not in inputs)
