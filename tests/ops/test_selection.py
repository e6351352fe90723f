"""Choices over all parts of a mini-batch, before its micro-batches."""

from __future__ import annotations

import pytest
import torch

import rlflow as rf
from rlflow.batch import flat, lengths, pad
from rlflow.ops.bodies.steps.selection import numbered, selected
from rlflow.ops.math.losses.covariance import covariance, kl_cov_chosen
from rlflow.ops.math.losses.off_policy import top_entropy
from tests.ops.parts import Trainee, call_of, in_parts, samples

pytestmark = pytest.mark.torch

GROUPS = [0, 0, 1, 2, 2, 2, 3, 4]
CLIP_COV = rf.PolicyLoss(
    "clip_cov", clip=3.0, cov_share=0.3, cov_range=(0.0, 9.0), old="recomputed"
)


def chosen(spec, batch, *, step=0, **call):
    """What is chosen of a batch, padded, field by field."""
    whole = call_of(numbered(spec, batch, torch.arange(len(batch))), model=Trainee(), **call)
    made = selected(whole, spec, whole.inputs, step)
    sizes = lengths(batch["response_tokens"])
    names = [name for name in ("chosen", "covariance", "uncertain") if name in made.keys()]  # noqa: SIM118
    return {name: pad(flat(made[name]), sizes) for name in names}


def padded(batch, name):
    return pad(flat(batch[name]), lengths(batch["response_tokens"]))


def test_what_is_chosen_is_chosen_among_all_tokens():
    batch = samples(GROUPS)
    spec = rf.PolicyLoss("kl_cov", cov_share=0.3, top_entropy=0.4, old="recomputed")
    made = chosen(spec, batch)
    mask, tokens = padded(batch, "response_mask"), padded(batch, "response_tokens").double()
    gains = padded(batch, "advantages").double()
    expected = kl_cov_chosen(tokens / -7, gains, mask, cov_share=0.3)
    assert torch.equal(expected, made["chosen"])
    torch.testing.assert_close(covariance(tokens / -7, gains, mask), made["covariance"])
    uncertain = top_entropy((tokens * 5) % 7, mask, share=0.4)
    assert torch.equal(uncertain & mask, made["uncertain"])
    assert made["chosen"].sum() == int(0.3 * mask.sum())


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[5, 3], [], [7, 0, 1], [2, 6, 4]]])
def test_every_part_marks_its_own_of_the_same_choice(parts):
    batch = numbered(CLIP_COV, samples(GROUPS), torch.arange(len(GROUPS)))
    whole = chosen(CLIP_COV, samples(GROUPS))["chosen"]
    call = call_of(batch, model=Trainee())

    def body(part):
        return selected(part, CLIP_COV, part.inputs, 0)

    for rows, made in zip(parts, in_parts(body, call, parts), strict=True):
        found = padded(made, "chosen")
        assert torch.equal(whole[rows, : found.shape[1]], found)
        assert not whole[rows, found.shape[1] :].any()


def test_the_draw_depends_on_the_step_and_on_nothing_global():
    batch = samples(GROUPS, seed=3)
    torch.manual_seed(1)
    first = chosen(CLIP_COV, batch)["chosen"]
    torch.manual_seed(2)
    assert torch.equal(first, chosen(CLIP_COV, batch)["chosen"])
    others = [chosen(CLIP_COV, batch, step=step)["chosen"] for step in range(1, 6)]
    assert {int(first.sum())} == {int(other.sum()) for other in others}
    assert not all(torch.equal(first, other) for other in others)
    assert first.any()


def test_losses_without_a_choice_make_no_forward():
    batch = samples(GROUPS)
    call = call_of(batch, model=None)
    for spec in (rf.PolicyLoss(), rf.SFTLoss(), rf.ValueLoss()):
        assert batch is numbered(spec, batch, torch.arange(len(batch)))
        assert batch is selected(call, spec, batch, 0)
