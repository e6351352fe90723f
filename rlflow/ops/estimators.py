"""The advantage estimators by name: what each reads, makes and takes as options.

An estimator joins the engine by one entry here and one body. The formulas are in
`rlflow.ops.math.advantages`; this file holds no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlflow.errors import Finding, Source
from rlflow.graph.fields import Field, Granularity, row, token
from rlflow.graph.op import Input

REWARD = Input(name="reward", dtype="float32", levels=("row",))
GROUP = Input(name="group", dtype="int64", levels=("row",))
MASK = Input(name="response_mask", dtype="bool", levels=("token",))
VALUES = Input(
    name="values",
    dtype="float32",
    levels=("token",),
    hint="values = ops.values(critic, samples)",
)
BEHAVIOUR = Input(name="rollout_log_probs", dtype="float32", levels=("token",))
REFERENCE = Input(
    name="ref_log_probs",
    dtype="float32",
    levels=("token",),
    hint="ref_log_probs = ops.log_probs(ref, samples)",
)

KL_OPTIONS = {"kl_coef": 0.0, "kl": "k1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """An advantage estimator: `options` maps each option to its default."""

    name: str
    body: str
    inputs: tuple[Input, ...]
    outputs: tuple[Field, ...]
    per: Granularity
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator
    for estimator in (
        Estimator(
            name="gae",
            body="rlflow.ops.bodies.advantage:gae",
            inputs=(REWARD, VALUES, MASK),
            outputs=(token("advantages"), token("returns")),
            per="batch",
            options={"gamma": 1.0, "lam": 1.0, "whiten": True, **KL_OPTIONS},
            source="Schulman et al. 2015, arXiv 1506.02438, eq. 16",
        ),
        Estimator(
            name="grpo",
            body="rlflow.ops.bodies.advantage:grpo",
            inputs=(REWARD, GROUP),
            outputs=(row("advantages"),),
            per="group",
            options={"std_eps": 1e-6, "scale": "group", "single": "zero", **KL_OPTIONS},
            source="Shao et al. 2024, arXiv 2402.03300, section 4.1.2",
        ),
        Estimator(
            name="rloo",
            body="rlflow.ops.bodies.advantage:rloo",
            inputs=(REWARD, GROUP),
            outputs=(row("advantages"),),
            per="group",
            options={"single": "zero", **KL_OPTIONS},
            source="Ahmadian et al. 2024, arXiv 2402.14740",
        ),
        Estimator(
            name="reinforce++",
            body="rlflow.ops.bodies.advantage:reinforce_pp",
            inputs=(REWARD, MASK),
            outputs=(token("advantages"), token("returns")),
            per="batch",
            options={"gamma": 1.0, "whiten": True, **KL_OPTIONS},
            source="Hu et al. 2025, arXiv 2501.03262",
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


def wrong_options(
    estimator: Estimator, given: Mapping[str, Any], where: Source | None
) -> list[Finding]:
    """A finding for every option the estimator does not have or that would do nothing."""
    findings = []
    for name in given:
        if name not in estimator.options:
            findings.append(
                Finding(
                    code="E117",
                    what=f"estimator {estimator.name!r} has no option {name!r}",
                    where=where,
                    expected=", ".join(estimator.options),
                    near=tuple(difflib.get_close_matches(name, estimator.options, n=3)),
                )
            )
    if "kl" in given and not given.get("kl_coef"):
        findings.append(
            Finding(
                code="E117",
                what="option kl= does nothing while kl_coef is 0",
                where=where,
                fix=f"kl_coef=0.05, kl={given['kl']!r}",
            )
        )
    if (
        estimator.options.get("scale") == "group"
        and given.get("scale") == "none"
        and ("std_eps" in given)
    ):
        findings.append(
            Finding(
                code="E117",
                what="option std_eps= does nothing with scale='none'",
                where=where,
                fix="remove std_eps=",
            )
        )
    return findings


def needed_inputs(estimator: Estimator, options: Mapping[str, Any]) -> tuple[Input, ...]:
    """What the estimator reads with these options: a KL in the reward reads log-probs too."""
    if not options.get("kl_coef"):
        return estimator.inputs
    extra = (REFERENCE, BEHAVIOUR, MASK)
    return estimator.inputs + tuple(wanted for wanted in extra if wanted not in estimator.inputs)
