"""Losses of whole distributions: what they read and refuse, and the bodies around them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

import rlflow as rf
from rlflow.ops.distill import DistillLoss
from rlflow.ops.losses import PolicyLoss

TOP_K = ("top_log_probs", "top_ids", "top_rest")
FORMS = ("forward_kl", "reverse_kl", "jsd")


@pytest.mark.parametrize("form", FORMS)
def test_they_read_the_likeliest_tokens_alone(form):
    loss = DistillLoss(form)
    assert ("response_mask", *TOP_K) == loss.needs()
    assert ("log_probs_at", "rest_at") == loss.outputs()
    assert not loss.reads_old
    assert "current" == loss.under_lag("current")
    assert loss.corrects("current", own=True)
    assert loss.limit is None
    assert 2.0 == DistillLoss(form, teacher_limit=2.0).limit


@pytest.mark.parametrize(
    ("make", "message"),
    [
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
    ],
)
def test_what_would_do_nothing_or_cannot_be_is_refused(make, message):
    with pytest.raises(ValidationError, match=message):
        make()


@pytest.mark.parametrize(
    "loss",
    [
        *(DistillLoss(form) for form in FORMS),
        DistillLoss("forward_kl", tail=True, aggregate="token-sum"),
        DistillLoss("forward_kl", log_prob_min=None),
        DistillLoss("jsd", jsd_beta=0.9, teacher_limit=3.0),
        PolicyLoss(kl_coef=0.2, kl="full"),
        DistillLoss("policy_gradient", kl_coef=0.2, kl="full"),
    ],
    ids=PolicyLoss.describe,
)
def test_saved_and_pasted_it_is_the_same(loss):
    assert loss == type(loss).model_validate_json(loss.model_dump_json())
    assert loss == eval(loss.line(), {"rf": rf})


@pytest.mark.parametrize("loss", [PolicyLoss(kl_coef=0.2, kl="full"), PolicyLoss(kl_coef=0.2)])
def test_a_full_kl_reads_distributions_in_the_place_of_log_probs(loss):
    full = "full" == loss.kl
    assert full == loss.full_kl
    assert full == ("log_probs_at" in loss.outputs())
    assert ("response_mask", "advantages", *(TOP_K if full else ("ref_log_probs",))) == loss.needs()
