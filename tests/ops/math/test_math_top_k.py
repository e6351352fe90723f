"""Divergences over a teacher's likeliest tokens: by loops, up to the whole vocabulary, in parts."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rlflow.engines.hf.forward.vocabulary import Chosen, likeliest
from rlflow.ops.losses.distill import DistillLoss
from rlflow.ops.losses.losses import PolicyLoss
from rlflow.ops.math.aggregate import Totals, count
from rlflow.ops.math.kl import full_kl
from rlflow.ops.math.losses.distillation import (
    distill_objective,
    forward_kl_at,
    top_k_jsd,
)
from rlflow.ops.math.losses.objective import policy_objective
from tests.ops.math.distributions import generalized_jsd, top_k_forward_kl

pytestmark = pytest.mark.torch

ROWS, TOKENS, VOCABULARY = 3, 4, 6
MASK = torch.tensor(
    [[True, True, False, True], [False, False, False, False], [True, False, True, True]]
)


def logits(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, TOKENS, VOCABULARY, generator=generator, dtype=torch.float64).to(dtype)


def sides(student, teacher, k, temperature=1.0):
    """What the engine makes of both sides' logits: the student's, then the teacher's, and ids."""
    flat = teacher.reshape(-1, VOCABULARY)
    top, ids, rest = likeliest(flat, temperature, k)
    at, own_rest = Chosen.apply(student.reshape(-1, VOCABULARY), ids, temperature, True)
    wide, narrow = (ROWS, TOKENS, k), (ROWS, TOKENS)
    return at.view(wide), own_rest.view(narrow), top.view(wide), rest.view(narrow), ids.view(wide)


BETAS = [0.0, 0.2, 0.5, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", BETAS)
def test_the_whole_vocabulary_is_gkd(beta, dtype):
    """k = vocabulary: value and gradient are those of the pure function on full logits."""
    teacher, made = 3 * logits(1, dtype), []
    for whole in (True, False):
        student = (3 * logits(0, dtype)).requires_grad_()
        if whole:
            value = generalized_jsd(student, teacher, MASK, beta=beta, temperature=0.7)
        else:
            value = top_k_jsd(*sides(student, teacher, VOCABULARY, 0.7)[:4], MASK, beta=beta)
        (value * torch.arange(1, TOKENS + 1)).sum().backward()
        made.append((value.detach(), student.grad))
    for expected, found in zip(*made, strict=True):
        limit = (1e-6 if dtype == torch.float32 else 1e-12) * max(1.0, float(expected.abs().max()))
        assert (expected - found).abs().max() < limit


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [1, 3])
def test_the_others_are_one_outcome(beta, k):
    """By a loop: the same divergence of two distributions of k + 1 outcomes."""
    student, teacher = logits(0), logits(1)
    made = top_k_jsd(*sides(student, teacher, k)[:4], MASK, beta=beta)
    for row in range(ROWS):
        for place in range(TOKENS):
            t, order = teacher[row, place].softmax(-1).sort(descending=True)
            s = student[row, place].softmax(-1)[order]
            t, s = ([*p[:k].tolist(), float(p[k:].sum())] for p in (t, s))
            m = [beta * b + (1 - beta) * a for a, b in zip(s, t, strict=True)]
            kl = lambda p, q: sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))  # noqa: E731
            expected = beta * kl(t, m) + (1 - beta) * kl(s, m)
            expected = {0.0: kl(t, s), 1.0: kl(s, t)}.get(beta, expected)
            expected = expected if MASK[row, place] else 0.0
            assert expected == pytest.approx(made[row, place].item(), abs=1e-12)


@given(st.sampled_from(BETAS), st.integers(0, 40))
def test_more_tokens_tell_more_and_never_more_than_all(beta, seed):
    student, teacher = 2 * logits(seed), 2 * logits(seed + 1)
    all_of_them = generalized_jsd(student, teacher, MASK, beta=beta)
    before = torch.zeros_like(all_of_them)
    for k in range(1, VOCABULARY + 1):
        value = top_k_jsd(*sides(student, teacher, k)[:4], MASK, beta=beta)
        assert (value >= before - 1e-12).all()
        before = value
    torch.testing.assert_close(all_of_them, before)


def test_the_forward_kl_at_ids_is_that_of_logits():
    student, teacher = logits(0), logits(1)
    at, _, top, _, ids = sides(student, teacher, 2)
    options = {"log_prob_min": -1.5, "limit": 0.3}
    expected = top_k_forward_kl(student, top, ids, MASK, **options)
    torch.testing.assert_close(expected, forward_kl_at(at, top, MASK, **options))


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_a_value_at_the_limit_has_no_gradient(beta):
    student = (5 * logits(0)).requires_grad_()
    both = sides(student, 5 * logits(1), 2)[:4]
    free, held = (top_k_jsd(*both, MASK, beta=beta, limit=limit) for limit in (None, 0.05))
    torch.testing.assert_close(free.clamp(max=0.05), held)
    held.sum().backward()
    over = (free > 0.05)[..., None].expand_as(student)
    assert over.any()
    assert 0 == student.grad[over].abs().sum()


def test_the_metrics_by_hand():
    """The teacher's top token has 3/4, the student's probability of it is 1/2."""
    half = torch.tensor([[[0.5]]], dtype=torch.float64).log()
    top = torch.tensor([[[0.75]]], dtype=torch.float64).log()
    outputs = {"log_probs_at": half, "rest_at": half[..., 0]}
    batch = {
        "response_mask": torch.ones(1, 1, dtype=torch.bool),
        "top_log_probs": top,
        "top_rest": torch.tensor([[0.25]], dtype=torch.float64).log(),
    }
    totals = Totals(tokens=1.0, rows=1.0)
    loss, metrics = distill_objective(DistillLoss("forward_kl", tail=True), outputs, batch, totals)
    assert 0.75 * math.log(1.5) + 0.25 * math.log(0.5) == pytest.approx(loss.item())
    reverse = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    assert reverse == pytest.approx(metrics["teacher_kl"].item())
    assert 0.75 == pytest.approx(metrics["top_mass"].item())
    assert 0.75 * math.log(1.5) == pytest.approx(
        distill_objective(DistillLoss("forward_kl"), outputs, batch, totals)[0].item()
    )


def test_a_policy_loss_with_the_kl_of_the_whole_vocabulary():
    """`kl="full"` adds `kl_coef` times the mean of the exact KL, and its gradient."""
    made = []
    for whole in (True, False):
        student = logits(0).requires_grad_()
        at, _, top, rest, _ = sides(student, logits(1), VOCABULARY)
        outputs = {"log_probs": student.log_softmax(-1)[..., 0], "log_probs_at": at}
        advantages = torch.tensor([0.5, 0.0, -1.0], dtype=torch.float64)
        batch = {"response_mask": MASK, "advantages": advantages}
        batch |= {} if whole else {"top_log_probs": top, "top_rest": rest}
        coef = {} if whole else {"kl_coef": 0.3, "kl": "full"}
        loss, metrics = policy_objective(PolicyLoss(**coef), outputs, batch, count(MASK))
        if whole:
            both = (each.log_softmax(-1) for each in (student, logits(1)))
            kl = full_kl(*both, MASK).sum() / MASK.sum()
            loss = loss + 0.3 * kl
            metrics["kl"] = kl.detach()
        loss.backward()
        made.append((loss.detach(), metrics["kl"], student.grad))
    for expected, found in zip(*made, strict=True):
        torch.testing.assert_close(expected, found)
