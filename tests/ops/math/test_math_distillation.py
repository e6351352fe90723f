"""Divergences of a student from a teacher: by loops, at their limits, and under the mask."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rlflow.ops.losses.distill import DistillLoss
from rlflow.ops.math.aggregate import aggregate, count
from rlflow.ops.math.losses.distillation import (
    distill_objective,
    teacher_advantages,
    teacher_kl,
)
from tests.ops.math.distributions import generalized_jsd, top_k_forward_kl

pytestmark = pytest.mark.torch

ROWS, TOKENS, VOCABULARY = 3, 4, 6
MASK = torch.tensor(
    [[True, True, False, True], [False, False, False, False], [True, False, True, True]]
)


def logits(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, TOKENS, VOCABULARY, generator=generator, dtype=torch.float64)


def softmax(row, temperature):
    exponents = [math.exp(x / temperature) for x in row]
    return [x / sum(exponents) for x in exponents]


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def plain_jsd(student, teacher, beta, temperature):
    """One token in plain Python."""
    s, t = softmax(student, temperature), softmax(teacher, temperature)
    if beta == 0:
        return kl(t, s)
    if beta == 1:
        return kl(s, t)
    m = [beta * b + (1 - beta) * a for a, b in zip(s, t, strict=True)]
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_divergence_is_a_loop_over_the_vocabulary(beta, temperature):
    student, teacher = logits(0), logits(1)

    made = generalized_jsd(student, teacher, MASK, beta=beta, temperature=temperature)

    for row in range(ROWS):
        for token in range(TOKENS):
            expected = 0.0
            if MASK[row, token]:
                pair = student[row, token].tolist(), teacher[row, token].tolist()
                expected = plain_jsd(*pair, beta, temperature)
            assert expected == pytest.approx(made[row, token].item(), abs=1e-12)


def test_two_tokens_by_hand():
    student = torch.tensor([[[0.0, 0.0]]], dtype=torch.float64)
    teacher = torch.tensor([[[math.log(3.0), 0.0]]], dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    # s = (1/2, 1/2), t = (3/4, 1/4), m = (5/8, 3/8)
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    reverse = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    middle = 0.5 * (0.75 * math.log(6 / 5) + 0.25 * math.log(2 / 3)) + 0.5 * (
        0.5 * math.log(4 / 5) + 0.5 * math.log(4 / 3)
    )
    for beta, expected in ((0.0, forward), (1.0, reverse), (0.5, middle)):
        assert expected == pytest.approx(generalized_jsd(student, teacher, mask, beta=beta).item())


@pytest.mark.parametrize(("end", "towards"), [(0.0, 1e-6), (1.0, 1 - 1e-6)])
def test_the_ends_are_the_limits_of_the_scaled_divergence(end, towards):
    student, teacher = logits(0), logits(1)
    near = generalized_jsd(student, teacher, MASK, beta=towards) / min(towards, 1 - towards)
    at = generalized_jsd(student, teacher, MASK, beta=end)
    torch.testing.assert_close(near, at, rtol=1e-4, atol=1e-6)


@given(st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.integers(0, 50))
def test_it_is_never_negative_and_zero_for_equals(beta, seed):
    student, teacher = logits(seed), logits(seed + 1)
    assert generalized_jsd(student, teacher, MASK, beta=beta).min() >= 0
    same = generalized_jsd(student, student + 3.0, MASK, beta=beta)
    assert same.abs().max() < 1e-12


def test_swapping_student_and_teacher_swaps_the_weights():
    student, teacher = logits(0), logits(1)
    one = generalized_jsd(student, teacher, MASK, beta=0.3)
    torch.testing.assert_close(one, generalized_jsd(teacher, student, MASK, beta=0.7))


def test_only_the_student_has_a_gradient_and_it_is_right():
    teacher = logits(1).requires_grad_()
    for beta in (0.0, 0.4, 1.0):
        student = logits(0).requires_grad_()
        assert torch.autograd.gradcheck(
            lambda x, beta=beta: generalized_jsd(x, teacher, MASK, beta=beta, temperature=0.7),
            (student,),
        )
    assert teacher.grad is None


def planted(x):
    """The same with NaN and infinities where the mask is false."""
    bad = torch.tensor([math.nan, math.inf, -math.inf], dtype=x.dtype)
    filler = bad[torch.arange(x.numel()) % 3].view_as(x)
    mask = MASK if x.dim() == 2 else MASK[..., None]
    return torch.where(mask, x, filler)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_tokens_that_both_exclude_add_nothing(beta):
    student, teacher = logits(0), logits(1)
    wide = torch.full((ROWS, TOKENS, 1), -math.inf, dtype=torch.float64)
    leaf = torch.cat([student, wide], -1).requires_grad_()
    made = generalized_jsd(leaf, torch.cat([teacher, wide], -1), MASK, beta=beta)
    made.sum().backward()
    torch.testing.assert_close(made, generalized_jsd(student, teacher, MASK, beta=beta))
    assert leaf.grad.isfinite().all()


def test_the_normaliser_is_that_of_the_whole_step():
    """The parts of a batch add up to the whole: value and gradient, to 1e-10."""
    totals, results = count(MASK), []
    for parts in ([range(ROWS)], [[2], [0, 1]]):
        student = logits(0).requires_grad_()
        loss = torch.zeros((), dtype=torch.float64)
        for rows in parts:
            value = generalized_jsd(student[list(rows)], logits(1)[list(rows)], MASK[list(rows)])
            loss = loss + aggregate(value, MASK[list(rows)], totals, mode="token-mean")
        loss.backward()
        results.append((loss.detach(), student.grad))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def test_the_teachers_likeliest_tokens_by_a_loop():
    student, teacher = logits(0), logits(1)
    top = teacher.log_softmax(-1).topk(2)
    made = top_k_forward_kl(student, top.values, top.indices, MASK, log_prob_min=-1.5)
    own = student.log_softmax(-1)
    for row in range(ROWS):
        for token in range(TOKENS):
            expected = 0.0
            for log_p, place in zip(top.values[row, token], top.indices[row, token], strict=True):
                p, q = max(log_p.item(), -1.5), max(own[row, token, place].item(), -1.5)
                expected += math.exp(p) * (p - q)
            expected = max(expected, 0.0) if MASK[row, token] else 0.0
            assert expected == pytest.approx(made[row, token].item(), abs=1e-12)


def test_all_tokens_are_the_forward_kl():
    student, teacher = logits(0), logits(1)
    top = teacher.log_softmax(-1).topk(VOCABULARY)
    made = top_k_forward_kl(student, top.values, top.indices, MASK, log_prob_min=None)
    torch.testing.assert_close(made, generalized_jsd(student, teacher, MASK, beta=0.0))


def test_the_top_is_held_from_below_and_above():
    student = torch.tensor([[[0.0, 0.0, 0.0]]], dtype=torch.float64).requires_grad_()
    mask = torch.ones(1, 1, dtype=torch.bool)
    tokens = torch.tensor([[[0]]])
    # 0.1 (log 0.1 - log 1/3) is negative
    less = top_k_forward_kl(student, torch.tensor([[[math.log(0.1)]]]), tokens, mask)
    more = top_k_forward_kl(student, torch.zeros(1, 1, 1), tokens, mask, limit=0.5)
    (less + more).sum().backward()
    assert (0.0, 0.5) == (less.item(), more.item())
    assert 0 == student.grad.abs().sum()


STUDENT = [[-1.0, -2.0, math.nan, -0.5]]
TEACHER = [[-0.5, -30.0, -1.0, -0.5]]
SEEN = torch.tensor([[True, True, False, True]])


def test_an_advantage_is_how_much_likelier_the_teacher_finds_a_token():
    made = teacher_advantages(torch.tensor(STUDENT), torch.tensor(TEACHER), SEEN)
    assert [[0.5, -28.0, 0.0, 0.0]] == made.tolist()
    held = teacher_advantages(
        torch.tensor(STUDENT),
        torch.tensor(TEACHER),
        SEEN,
        coef=0.5,
        limit=10.0,
        advantages=torch.tensor([2.0]),
    )
    assert [[2.25, -3.0, 0.0, 2.0]] == held.tolist()


def test_an_estimate_beyond_its_limit_has_no_gradient():
    leaf = torch.tensor(STUDENT, requires_grad=True)
    value = teacher_kl(leaf, torch.tensor(TEACHER), SEEN, kind="k2", limit=10.0)
    value.sum().backward()
    assert [[0.125, 10.0, 0.0, 0.0]] == value.tolist()
    assert [[-0.5, 0.0, 0.0, 0.0]] == leaf.grad.tolist()


# --- the loss of a student ------------------------------------------------------------------


def one_token(spec, **fields):
    leaf = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    given = {name: torch.tensor([[x]], dtype=torch.float64) for name, x in fields.items()}
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, metrics = distill_objective(
        spec, {"log_probs": leaf}, {**given, "response_mask": mask}, count(mask)
    )
    loss.backward()
    return loss.item(), leaf.grad.item(), metrics


def test_the_forms_of_one_token_by_hand():
    """log p -1, teacher -3, at the rollout -2; k1 is 2 now and 1 then, k3 e^-2 + 1."""
    now = one_token(DistillLoss(old="current"), teacher_log_probs=-3.0)
    assert (2.0, 2.0) == pytest.approx(now[:2])  # -A rho and its slope, A = -2
    assert 2.0 == pytest.approx(now[2]["teacher_kl"].item())
    then = one_token(
        DistillLoss("reward", old="current", add_advantages=True),
        teacher_log_probs=-3.0,
        rollout_log_probs=-2.0,
        advantages=4.0,
    )
    assert (-3.0, -3.0) == pytest.approx(then[:2])  # A = 4 - 1
    value, slope, _ = one_token(DistillLoss("supervised"), teacher_log_probs=-3.0)
    assert (math.exp(-2) + 1, 2.0) == pytest.approx((value, slope))
    value, slope, _ = one_token(DistillLoss("supervised", teacher_kl="k3"), teacher_log_probs=-3.0)
    assert (math.exp(-2) + 1, 1 - math.exp(-2)) == pytest.approx((value, slope))
    far = one_token(DistillLoss(old="current"), teacher_log_probs=-30.0)
    assert (10.0, 10.0) == pytest.approx(far[:2])
