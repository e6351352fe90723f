"""Corrections, rejections and adaptive coefficients as a user says them."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from pydantic import ValidationError

import rlflow as rf
from rlflow.ops.corrections import rules

SPECS = [
    (rf.AdaptiveKL(0.1), "AdaptiveKL(target=0.1)"),
    (
        rf.AdaptiveKL(6.0, horizon=100, init=0.2, per="sequence"),
        "AdaptiveKL(target=6.0, horizon=100.0, init=0.2, per=sequence)",
    ),
    (rf.AdaptiveEntropy(0.2, step=0.01), "AdaptiveEntropy(target=0.2, step=0.01)"),
    (rf.Rejection("k3", high=0.5), "Rejection(statistic=k3, high=0.5)"),
    (
        rf.Rejection("k1", over="row-mean", high=2.0, low=0.7, count="kept"),
        "Rejection(statistic=k1, over=row-mean, high=2.0, low=0.7, count=kept)",
    ),
    (rf.ImportanceSampling(cap=math.inf), "ImportanceSampling(cap=inf)"),
    (rf.ImportanceSampling(normalize=True), "ImportanceSampling(normalize=True)"),
]


@pytest.mark.parametrize(("spec", "text"), SPECS, ids=[text for _, text in SPECS])
def test_a_spec_is_frozen_prints_loads_and_is_made_by_its_line(spec, text):
    assert text == spec.describe()
    assert spec == eval(spec.line(), {"rf": rf, "math": math})
    assert spec == type(spec).model_validate_json(spec.model_dump_json())
    name = next(iter(type(spec).model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(spec, name, getattr(spec, name))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rf.AdaptiveKL(0), "greater than 0"),
        (lambda: rf.AdaptiveKL(0.1, horizon=0), "greater than 0"),
        (lambda: rf.AdaptiveKL(0.1, horizon=-5), "greater than 0"),
        (lambda: rf.AdaptiveKL(0.1, init=0), "greater than 0"),
        (lambda: rf.AdaptiveKL(math.nan), "target"),
        (lambda: rf.AdaptiveKL(0.1, per="row"), "per"),
        (lambda: rf.AdaptiveKL(0.1, step=1), "step"),
        (lambda: rf.AdaptiveEntropy(0), "greater than 0"),
        (lambda: rf.AdaptiveEntropy(0.2, step=0), "greater than 0"),
        (lambda: rf.AdaptiveEntropy(0.2, init=2.0), "init has to lie in that range"),
        (lambda: rf.AdaptiveEntropy(0.2, init=0.5, low=0.5, high=0.5), "needs a width"),
        (lambda: rf.Rejection("k4", high=1), "statistic"),
        (lambda: rf.Rejection("k1"), "high"),
        (lambda: rf.Rejection("k1", high=1.0), "has to be above 1"),
        (lambda: rf.Rejection("k1", high=2.0, low=1.5), "less than 1"),
        (lambda: rf.Rejection("k1", high=2.0, over="row-max"), "k2 or k3 with over='row-max'"),
        (lambda: rf.Rejection("k3", high=2.0, low=0.5), "low would do nothing"),
        (lambda: rf.Rejection("k3", high=math.inf), "finite"),
        (lambda: rf.Rejection("k2", high=0), "greater than 0"),
        (lambda: rf.Rejection("k2", high=1, over="row"), "over"),
        (lambda: rf.ImportanceSampling(floor=0.5), "floor would do nothing"),
        (lambda: rf.ImportanceSampling(mode="mask", cap=math.inf), "would drop nothing"),
    ],
)
def test_what_cannot_be_meant_is_refused(make, message):
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        make()


KEPT = rf.Rejection("k1", high=2, count="kept")
ALL = rf.Rejection("k3", high=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rejection": ()}, "rejection=\\(\\) would do nothing"),
        ({"rejection": (KEPT, ALL), "old": "recomputed"}, "the same count"),
        ({"rejection": KEPT}, "needs old='recomputed'"),
        ({"rejection": KEPT, "old": "rollout"}, "needs old='recomputed'"),
        ({"correction": rf.ImportanceSampling(normalize=True)}, "needs old='recomputed'"),
        (
            {"correction": rf.ImportanceSampling(normalize=True), "old": "current"},
            "needs old='recomputed'",
        ),
        ({"kl_unbiased": True}, "kl_unbiased would do nothing here: kl_coef is 0"),
        ({"kl_unbiased": True, "kl_coef": 0.1, "kl": "k3+"}, "use kl='k3'"),
        ({"correction": rf.ImportanceSampling(), "old": "rollout"}, "the weight is 1"),
        ({"kl_coef": rf.AdaptiveEntropy(0.1)}, "kl_coef"),
        ({"entropy_coef": rf.AdaptiveKL(0.1)}, "entropy_coef"),
    ],
)
def test_options_of_a_loss_that_do_not_fit_together(options, message):
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        rf.PolicyLoss(**options)


LOSSES = [
    rf.PolicyLoss(kl_coef=rf.AdaptiveKL(0.1)),
    rf.PolicyLoss(entropy_coef=rf.AdaptiveEntropy(0.2, init=0.1)),
    rf.PolicyLoss(rejection=ALL),
    rf.PolicyLoss(rejection=(ALL, rf.Rejection("k1", over="row-sum", high=3))),
    rf.PolicyLoss(old="recomputed", rejection=KEPT),
    rf.PolicyLoss(old="loglinear", correction=rf.ImportanceSampling()),
    rf.PolicyLoss(kl_coef=0.1, kl="k2", kl_unbiased=True),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.describe())
def test_a_loss_with_groups_of_options_prints_loads_and_is_made_by_its_line(loss):
    assert loss == eval(loss.line(), {"rf": rf, "math": math})
    assert loss == rf.PolicyLoss.model_validate_json(loss.model_dump_json())
    assert loss == rf.PolicyLoss.model_validate(loss.model_dump())


@pytest.mark.parametrize(
    ("loss", "needs", "outputs"),
    [
        (LOSSES[0], ("ref_log_probs",), ("log_probs",)),
        (LOSSES[1], (), ("log_probs", "entropy")),
        (LOSSES[2], ("rollout_log_probs",), ("log_probs",)),
        (LOSSES[4], ("old_log_probs", "rollout_log_probs"), ("log_probs",)),
        (LOSSES[5], ("rollout_log_probs", "version"), ("log_probs",)),
    ],
)
def test_needs_and_outputs(loss, needs, outputs):
    assert ("response_mask", "advantages", *needs) == loss.needs()
    assert outputs == loss.outputs()


def test_what_corrects_for_older_rows():
    assert not rf.PolicyLoss(old="loglinear").corrects("loglinear", own=True)
    assert LOSSES[5].corrects("loglinear", own=True)
    assert "loglinear" == LOSSES[5].under_lag("loglinear")
    assert not LOSSES[4].corrects("recomputed", own=True)


def test_rules_of_a_rejection():
    assert () == rules(None)
    assert (ALL,) == rules(ALL) == rules((ALL,))


def test_saying_it_imports_no_torch():
    code = "import sys, rlflow as rf; rf.AdaptiveKL(0.1); assert 'torch' not in sys.modules"
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode
