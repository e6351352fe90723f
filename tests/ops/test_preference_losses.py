"""What a user says about losses of pairs, reward models and teachers: validation and needs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from rlflow.ops.distill import DistillLoss
from rlflow.ops.math.preference import TWO_SIDED
from rlflow.ops.preference import PREFERENCE_LOSSES, DPOLoss, RewardModelLoss

SPECS = [
    DPOLoss(),
    DPOLoss("ipo", beta=0.5, length="mean"),
    DPOLoss("simpo", beta=2.0, margin=0.5, sft_coef=0.1),
    DPOLoss("exo_pair", label_smoothing=1e-3),
    DPOLoss(divergence="alpha", alpha=0.7, ld_alpha=0.5),
    RewardModelLoss(),
    RewardModelLoss(margin_coef=1.0, center_coef=0.01),
    RewardModelLoss("logistic"),
    DistillLoss(),
    DistillLoss("reward", add_advantages=True, teacher_limit=5.0, kind="cispo"),
    DistillLoss(old="recomputed", clip=(0.1, 0.2), kl_coef=0.1),
    DistillLoss("supervised", teacher_kl="k2", aggregate="token-sum"),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.describe())
def test_a_loss_is_frozen_and_loads_from_what_it_saves(spec):
    with pytest.raises(ValidationError, match="frozen"):
        spec.constant = 2.0
    loaded = type(spec).model_validate_json(spec.model_dump_json())
    assert spec.describe() == loaded.describe()
    assert spec.model_dump() == loaded.model_dump()
    assert spec.needs() == loaded.needs()


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        (DPOLoss(), "DPOLoss()"),
        (DPOLoss("ipo", length="mean"), "DPOLoss(kind=ipo, length=mean)"),
        (RewardModelLoss("logistic"), "RewardModelLoss(kind=logistic)"),
        (DistillLoss(), "DistillLoss(policy_gradient)"),
        (DistillLoss("supervised", teacher_kl="k2"), "DistillLoss(supervised, teacher_kl=k2)"),
    ],
)
def test_the_printed_form(spec, line):
    assert line == spec.describe()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPOLoss("sigmod"), "did you mean 'sigmoid'"),
        (lambda: DPOLoss("hinge", label_smoothing=0.1), "hinge does not read it"),
        (lambda: DPOLoss("apo_zero", length="mean"), "apo_zero does not read it"),
        (lambda: DPOLoss("aot", divergence="js"), "aot does not read it"),
        (lambda: DPOLoss(tau=0.1), "sigmoid does not read it"),
        (lambda: DPOLoss(alpha=0.3), "only divergence='alpha' reads it"),
        (lambda: DPOLoss("exo_pair"), "needs label_smoothing above 0"),
        (lambda: DPOLoss("robust", label_smoothing=0.5), "less than 0.5"),
        (lambda: DPOLoss(beta=0.0), "greater than 0"),
        (lambda: DPOLoss(aggregate="token-sum"), "not over tokens"),
        (lambda: DPOLoss(constant=3.0), "not over tokens"),
        (lambda: RewardModelLoss("regression", center_coef=0.1), "compares no pairs"),
        (lambda: RewardModelLoss("regresion"), "regression"),
        (lambda: RewardModelLoss(aggregate="token-sum"), "not over tokens"),
        (lambda: DistillLoss("supervised", teacher_kl="k1"), "k1 cannot be a loss"),
        (lambda: DistillLoss("supervised", clip=0.1), "no policy loss"),
        (lambda: DistillLoss("supervised", teacher_coef=2.0), "no policy loss"),
        (lambda: DistillLoss("supervised", old="rollout"), "no policy loss"),
        (lambda: DistillLoss(kind="clip_cov"), "a teacher gives one a token"),
        (lambda: DistillLoss("forward"), "policy_gradient"),
    ],
)
def test_what_would_do_nothing_or_cannot_be_is_refused(make, message):
    with pytest.raises(ValidationError, match=message):
        make()


def test_every_option_of_a_kind_acts_and_all_kinds_have_a_body():
    for kind, found in PREFERENCE_LOSSES.items():
        needed = {"label_smoothing": 0.1} if kind == "exo_pair" else {}
        given = {"label_smoothing": 0.2, "length": "mean", "divergence": "js", "tau": 0.1}
        given["margin"] = 0.5
        for option in found.options:
            DPOLoss(kind, **{**needed, option: given[option]})
    assert set(TWO_SIDED) < set(PREFERENCE_LOSSES)


@pytest.mark.parametrize(
    ("spec", "needs", "outputs"),
    [
        (DPOLoss(), ("response_mask", "group", "pair", "chosen", "ref_log_probs"), ("log_probs",)),
        (DPOLoss("simpo"), ("response_mask", "group", "pair", "chosen"), ("log_probs",)),
        (RewardModelLoss(), ("group", "pair", "chosen"), ("values",)),
        (RewardModelLoss(margin_coef=1.0), ("group", "pair", "chosen", "pair_margin"), ("values",)),
        (RewardModelLoss("regression"), ("reward",), ("values",)),
        (DistillLoss(), ("response_mask", "teacher_log_probs"), ("log_probs",)),
        (
            DistillLoss("reward", add_advantages=True, kl_coef=0.1),
            (
                "response_mask",
                "advantages",
                "ref_log_probs",
                "teacher_log_probs",
                "rollout_log_probs",
            ),
            ("log_probs",),
        ),
        (DistillLoss("supervised"), ("response_mask", "teacher_log_probs"), ("log_probs",)),
    ],
    ids=lambda value: value.describe() if hasattr(value, "describe") else None,
)
def test_needs_and_outputs(spec, needs, outputs):
    assert needs == spec.needs()
    assert outputs == spec.outputs()


def test_estimates_and_limits_follow_the_form():
    forms = [DistillLoss(), DistillLoss("reward"), DistillLoss("supervised")]
    assert ["k1", "k1", "k3+"] == [loss.estimator for loss in forms]
    assert [10.0, None, 10.0] == [loss.limit for loss in forms]
    assert 3.0 == DistillLoss("reward", teacher_limit=3.0).limit
    assert None is DistillLoss(teacher_limit=None).limit


def test_samples_of_older_weights():
    assert DPOLoss().corrects("", own=True)
    assert RewardModelLoss().corrects("", own=True)
    assert "rollout" == DistillLoss().under_lag("current")
    assert DistillLoss().corrects("rollout", own=True)
    assert not DistillLoss("supervised").corrects("current", own=True)
    assert DistillLoss("supervised").corrects("current", own=False)
    (line,) = DistillLoss("supervised").corrections()
    assert 'rf.DistillLoss("policy_gradient", old="rollout")' == line
    assert line in DistillLoss().corrections()


def test_none_of_it_imports_torch():
    code = "import rlflow.ops.distill, rlflow.ops.pairs, sys; sys.exit('torch' in sys.modules)"
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode
