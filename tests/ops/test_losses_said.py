"""What a user says about losses and corrections: saved, printed, read back, refused."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

import rlflow as rf
from rlflow.ops.corrections import rules
from rlflow.ops.losses.distill import DistillLoss
from rlflow.ops.losses.losses import PolicyLoss, SFTLoss, ValueLoss
from rlflow.ops.losses.preference import PREFERENCE_LOSSES, DPOLoss, RewardModelLoss
from rlflow.ops.math.losses.preference import TWO_SIDED

POLICY = ("response_mask", "advantages")
TOP_K = ("top_log_probs", "top_ids", "top_rest")
FORMS = ("forward_kl", "reverse_kl", "jsd")
KEPT = rf.Rejection("k1", high=2, count="kept")
ALL = rf.Rejection("k3", high=2)
WEIGHED = PolicyLoss(old="loglinear", correction=rf.ImportanceSampling())
PRINTED = [
    (PolicyLoss(), "PolicyLoss(ppo_clip)"),
    (PolicyLoss(clip=0.2, kl_coef=0.1, kl="k3"), "PolicyLoss(ppo_clip, kl_coef=0.1)"),
    (PolicyLoss(clip=0.3), "PolicyLoss(ppo_clip, clip=0.3)"),
    (
        PolicyLoss(
            aggregate="seq-mean-token-sum-norm",
            constant=12,
            old="current",
            kl="k2",
            kl_coef=0.02,
            dual_clip=3,
            clip=(0.2, 0.28),
            entropy_coef=0.01,
        ),
        "PolicyLoss(ppo_clip, clip=(0.2, 0.28), dual_clip=3.0, kl_coef=0.02, kl=k2,"
        " entropy_coef=0.01, old=current, aggregate=seq-mean-token-sum-norm, constant=12.0)",
    ),
    (ValueLoss(), "ValueLoss()"),
    (ValueLoss(clip=None), "ValueLoss(clip=None)"),
    (SFTLoss(aggregate="token-sum"), "SFTLoss(aggregate=token-sum)"),
    (DPOLoss(), "DPOLoss()"),
    (DPOLoss("ipo", length="mean"), "DPOLoss(kind=ipo, length=mean)"),
    (RewardModelLoss("logistic"), "RewardModelLoss(kind=logistic)"),
    (DistillLoss(), "DistillLoss(policy_gradient)"),
    (DistillLoss("supervised", teacher_kl="k2"), "DistillLoss(supervised, teacher_kl=k2)"),
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
SAID = [
    PolicyLoss(),
    PolicyLoss("ppo_clip", kl_coef=0.02),
    PolicyLoss(clip=(0.2, 0.28), dual_clip=3.0, kl_coef=0.1, kl="k3+", entropy_coef=0.01),
    PolicyLoss(clip=math.inf, old="rollout"),
    PolicyLoss(aggregate="seq-mean-token-sum-norm", constant=12),
    ValueLoss(),
    ValueLoss(clip=None, aggregate="seq-mean-token-mean"),
    SFTLoss(),
    SFTLoss(aggregate="token-sum"),
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
    *(DistillLoss(form) for form in FORMS),
    DistillLoss("forward_kl", tail=True, aggregate="token-sum"),
    DistillLoss("forward_kl", log_prob_min=None),
    DistillLoss("jsd", jsd_beta=0.9, teacher_limit=3.0),
    PolicyLoss(kl_coef=0.2, kl="full"),
    DistillLoss("policy_gradient", kl_coef=0.2, kl="full"),
    PolicyLoss(kl_coef=rf.AdaptiveKL(0.1)),
    PolicyLoss(entropy_coef=rf.AdaptiveEntropy(0.2, init=0.1)),
    PolicyLoss(rejection=ALL),
    PolicyLoss(rejection=(ALL, rf.Rejection("k1", over="row-sum", high=3))),
    PolicyLoss(old="recomputed", rejection=KEPT),
    PolicyLoss(old="loglinear", correction=rf.ImportanceSampling()),
    PolicyLoss(kl_coef=0.1, kl="k2", kl_unbiased=True),
    *(spec for spec, _ in PRINTED),
]
NEEDS = [
    (PolicyLoss(), ("response_mask", "advantages"), ("log_probs",)),
    (
        PolicyLoss(kl_coef=0.1, entropy_coef=0.1, old="recomputed"),
        ("response_mask", "advantages", "old_log_probs", "ref_log_probs"),
        ("log_probs", "entropy"),
    ),
    (
        PolicyLoss(old="rollout"),
        ("response_mask", "advantages", "rollout_log_probs"),
        ("log_probs",),
    ),
    (PolicyLoss(old="current"), ("response_mask", "advantages"), ("log_probs",)),
    (ValueLoss(), ("response_mask", "returns", "values"), ("values",)),
    (ValueLoss(clip=None), ("response_mask", "returns"), ("values",)),
    (SFTLoss(), ("response_mask",), ("log_probs",)),
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
    (PolicyLoss(kl_coef=rf.AdaptiveKL(0.1)), (*POLICY, "ref_log_probs"), ("log_probs",)),
    (PolicyLoss(entropy_coef=rf.AdaptiveEntropy(0.2)), POLICY, ("log_probs", "entropy")),
    (PolicyLoss(rejection=ALL), (*POLICY, "rollout_log_probs"), ("log_probs",)),
    (
        PolicyLoss(old="recomputed", rejection=KEPT),
        (*POLICY, "old_log_probs", "rollout_log_probs"),
        ("log_probs",),
    ),
    (WEIGHED, (*POLICY, "rollout_log_probs", "version"), ("log_probs",)),
    (PolicyLoss(kl_coef=0.2, kl="full"), (*POLICY, *TOP_K), ("log_probs", "log_probs_at")),
    *(
        (DistillLoss(form), ("response_mask", *TOP_K), ("log_probs_at", "rest_at"))
        for form in FORMS
    ),
]
REFUSED = [
    (
        lambda: PolicyLoss("ppo-clip"),
        "no policy loss is called 'ppo-clip'.*did you mean 'ppo_clip'",
    ),
    (lambda: PolicyLoss("xyz"), "no policy loss is called 'xyz'.*ppo_clip"),
    (lambda: PolicyLoss(kl="k1", kl_coef=0.1), "k1 cannot be a loss.*k2 or k3\\+.*k3"),
    (lambda: PolicyLoss(kl="k4", kl_coef=0.1), "kl"),
    (lambda: PolicyLoss(kl="k2"), "kl would do nothing here: kl_coef is 0"),
    (lambda: PolicyLoss(kl="k3"), "kl would do nothing here: kl_coef is 0"),
    (lambda: PolicyLoss(kl="k2", kl_coef=0.0), "kl would do nothing here"),
    (lambda: PolicyLoss(constant=12), "constant would do nothing here.*seq-mean-token-sum-norm"),
    (lambda: PolicyLoss(aggregate="seq-mean-token-sum-norm"), "needs a constant"),
    (lambda: PolicyLoss(aggregate="seq-mean-token-sum-norm", constant=0), "greater than 0"),
    (lambda: PolicyLoss(aggregate="mean"), "token-mean"),
    (lambda: PolicyLoss(kl_coef=-0.1), "greater than or equal to 0"),
    (lambda: PolicyLoss(kl_coef=math.nan), "finite"),
    (lambda: PolicyLoss(kl_coef=math.inf), "finite"),
    (lambda: PolicyLoss(entropy_coef=-0.1), "greater than or equal to 0"),
    (lambda: PolicyLoss(entropy_coef=math.nan), "finite"),
    (lambda: PolicyLoss(dual_clip=1.0), "greater than 1"),
    (lambda: PolicyLoss(dual_clip=math.nan), "dual_clip"),
    (lambda: PolicyLoss(clip=0), "low side of clip.*freeze"),
    (lambda: PolicyLoss(clip=(0.2, -0.1)), "high side of clip"),
    (lambda: PolicyLoss(clip=math.nan), "a finite number in each place"),
    (lambda: PolicyLoss(clip=(0.1, 0.2, 0.3)), "clip"),
    (lambda: PolicyLoss(clip="wide"), "clip"),
    (lambda: PolicyLoss(old="previous"), "old"),
    (lambda: PolicyLoss(beta=0.1), "beta"),
    (lambda: PolicyLoss("gsop"), "no policy loss is called 'gsop'.*did you mean 'gspo'"),
    (lambda: PolicyLoss("clip-cov"), "did you mean 'clip_cov'"),
    (lambda: PolicyLoss("dro"), "dro needs beta"),
    (lambda: PolicyLoss("dro", beta=0), "greater than 0"),
    (
        lambda: PolicyLoss("gmpo", aggregate="token-mean"),
        "'token-mean' is not gmpo.*'seq-mean-token-mean'",
    ),
    (
        lambda: PolicyLoss("sequence_clip", aggregate="token-mean"),
        "is not sequence_clip.*'seq-mean-token-sum'",
    ),
    (
        lambda: PolicyLoss("luspo", aggregate="seq-mean-token-mean"),
        "is not luspo.*'seq-mean-token-sum'",
    ),
    (lambda: PolicyLoss("cispo", ratio_max=0.2), "greater than or equal to 1"),
    (lambda: PolicyLoss("cispo", ratio_min=1.2), "less than or equal to 1"),
    (lambda: PolicyLoss("sapo", tau=(1.0, 0.0)), "greater than 0"),
    (
        lambda: PolicyLoss("clip_cov", cov_range=(5.0, 1.0)),
        "no covariance lies between 5.0 and 1.0",
    ),
    (lambda: PolicyLoss("clip_cov", cov_share=0), "greater than 0"),
    (lambda: PolicyLoss("kl_cov", cov_share=1.0), "less than 1"),
    (lambda: PolicyLoss("ppo_clip", top_entropy=1.0), "less than 1"),
    (lambda: PolicyLoss("ppo_clip", top_entropy=0), "greater than 0"),
    (lambda: PolicyLoss("ppo_clip", off_policy_limit=-0.1), "greater than or equal to 0"),
    (
        lambda: PolicyLoss("ppo_clip", off_policy_from="old"),
        "would do nothing.*there is no off_policy_limit",
    ),
    (
        lambda: PolicyLoss("ppo_clip", off_policy_limit=0.1, off_policy_from="old", old="current"),
        "off_policy_limit would do nothing.*old='current'",
    ),
    (lambda: PolicyLoss("reinforce", old="recomputed"), "old would do nothing.*takes no ratio"),
    (lambda: PolicyLoss("gpg", old="rollout"), "old would do nothing.*takes no ratio"),
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
    (lambda: DistillLoss("jsd", jsd_beta=0.0), "greater than 0"),
    (lambda: DistillLoss("jsd", jsd_beta=1.0), "less than 1"),
    (lambda: DistillLoss("jsd", tail=True), "jsd does not read it"),
    (lambda: DistillLoss("reverse_kl", jsd_beta=0.3), "reverse_kl does not read it"),
    (lambda: DistillLoss("reverse_kl", teacher_kl="k3"), "no policy loss"),
    (lambda: DistillLoss("forward_kl", tail=True, log_prob_min=-5.0), "distributions"),
    (lambda: DistillLoss("forward_kl", log_prob_min=0.0), "less than 0"),
    (lambda: DistillLoss("forward_kl", clip=0.1), "no policy loss"),
    (lambda: DistillLoss("jsd", kl_coef=0.1), "no policy loss"),
    (lambda: DistillLoss("supervised", jsd_beta=0.3), "supervised"),
    (lambda: DistillLoss("reward", tail=True), "compares sampled tokens alone"),
    (lambda: DistillLoss("policy_gradient", teacher_kl="full"), "k1"),
    (lambda: PolicyLoss(kl="full"), "kl_coef is 0"),
    (lambda: PolicyLoss(kl_coef=0.1, kl="full", kl_unbiased=True), "no estimate"),
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
    (lambda: rf.ImportanceSampling(floor=1.5), "less than or equal to 1"),
    (lambda: rf.ImportanceSampling(mode="mask", cap=math.inf), "would drop nothing"),
    (lambda: PolicyLoss(rejection=()), "rejection=\\(\\) would do nothing"),
    (lambda: PolicyLoss(rejection=(KEPT, ALL), old="recomputed"), "the same count"),
    (lambda: PolicyLoss(rejection=KEPT), "needs old='recomputed'"),
    (lambda: PolicyLoss(rejection=KEPT, old="rollout"), "needs old='recomputed'"),
    (
        lambda: PolicyLoss(correction=rf.ImportanceSampling(normalize=True)),
        "needs old='recomputed'",
    ),
    (
        lambda: PolicyLoss(correction=rf.ImportanceSampling(normalize=True), old="current"),
        "needs old='recomputed'",
    ),
    (lambda: PolicyLoss(kl_unbiased=True), "kl_unbiased would do nothing here: kl_coef is 0"),
    (lambda: PolicyLoss(kl_unbiased=True, kl_coef=0.1, kl="k3+"), "use kl='k3'"),
    (lambda: PolicyLoss(correction=rf.ImportanceSampling(), old="rollout"), "the weight is 1"),
    (lambda: PolicyLoss(kl_coef=rf.AdaptiveEntropy(0.1)), "kl_coef"),
    (lambda: PolicyLoss(entropy_coef=rf.AdaptiveKL(0.1)), "entropy_coef"),
    (lambda: rf.ImportanceSampling(cap=0.5), "greater than or equal to 1"),
    (lambda: rf.ImportanceSampling(cap=math.nan), "finite"),
    (lambda: rf.ImportanceSampling(mode="mask", floor=0), "greater than 0"),
    (lambda: rf.ImportanceSampling(mode="mask", floor=1.5), "less than or equal to 1"),
    (lambda: rf.ImportanceSampling(mode="mask", floor=math.nan), "floor"),
    (lambda: rf.ImportanceSampling(mode="mask", cap=math.inf), "would drop nothing"),
    (lambda: rf.ImportanceSampling(mode="clamp"), "mode"),
    (lambda: rf.ImportanceSampling(level="geometric"), "level"),
    (lambda: rf.ImportanceSampling(threshold=2.0), "threshold"),
    (lambda: ValueLoss(clip=0.0), "clip"),
    (lambda: ValueLoss(clip=math.nan), "clip"),
    (lambda: ValueLoss(clip=math.inf), "clip"),
    (lambda: ValueLoss(clip=-0.1), "clip"),
    (lambda: ValueLoss(constant=3), "constant would do nothing"),
    (lambda: SFTLoss(constant=3), "constant would do nothing"),
]


@pytest.mark.parametrize("spec", SAID, ids=lambda spec: spec.describe())
def test_it_is_frozen_and_comes_back_from_what_it_saves_and_from_its_line(spec):
    name = next(iter(type(spec).model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(spec, name, getattr(spec, name))
    saved = type(spec).model_validate(spec.model_dump())
    loaded = type(spec).model_validate_json(spec.model_dump_json())
    line = getattr(spec, "line", None)
    pasted = eval(line(), {"rf": rf, "math": math}) if line else saved
    assert spec == saved == loaded == pasted
    assert spec.describe() == loaded.describe() == pasted.describe()
    assert spec.model_dump() == loaded.model_dump()


@pytest.mark.parametrize(("spec", "line"), PRINTED, ids=[line for _, line in PRINTED])
def test_the_printed_form_has_only_what_differs_from_the_defaults(spec, line):
    assert line == spec.describe()


@pytest.mark.parametrize(("spec", "needs", "outputs"), NEEDS)
def test_needs_and_outputs(spec, needs, outputs):
    assert needs == spec.needs()
    assert outputs == spec.outputs()


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_would_do_nothing_or_cannot_be_is_refused(make, message):
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        make()


def test_what_corrects_for_older_rows():
    assert not rf.PolicyLoss(old="loglinear").corrects("loglinear", own=True)
    assert WEIGHED.corrects("loglinear", own=True)
    assert "loglinear" == WEIGHED.under_lag("loglinear")
    assert not rf.PolicyLoss(old="recomputed", rejection=KEPT).corrects("recomputed", own=True)


def test_rules_of_a_rejection():
    assert () == rules(None)
    assert (ALL,) == rules(ALL) == rules((ALL,))


@pytest.mark.parametrize("form", FORMS)
def test_losses_of_distributions_take_no_ratio_and_no_limit(form):
    loss = DistillLoss(form)
    assert not loss.reads_old
    assert "current" == loss.under_lag("current")
    assert loss.corrects("current", own=True)
    assert loss.limit is None
    assert 2.0 == DistillLoss(form, teacher_limit=2.0).limit


def test_every_option_of_a_kind_acts_and_all_kinds_have_a_body():
    for kind, found in PREFERENCE_LOSSES.items():
        needed = {"label_smoothing": 0.1} if kind == "exo_pair" else {}
        given = {"label_smoothing": 0.2, "length": "mean", "divergence": "js", "tau": 0.1}
        given["margin"] = 0.5
        for option in found.options:
            DPOLoss(kind, **{**needed, option: given[option]})
    assert set(TWO_SIDED) < set(PREFERENCE_LOSSES)


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
