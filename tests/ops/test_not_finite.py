"""A number that is not finite is refused, spoils its step, or is counted: never learned around."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.batch import flat, lengths, ragged
from rlflow.errors import RunError
from rlflow.ops.bodies import advantage, finite, pair, update
from rlflow.ops.bodies.loops import loops
from rlflow.ops.bodies.loops.curriculum import track
from rlflow.ops.corrections import ImportanceSampling, Rejection
from rlflow.ops.estimator_options import RewardWeights
from rlflow.ops.loops.curriculum import PassRates
from rlflow.ops.losses.distill import DistillLoss
from rlflow.ops.losses.losses import POLICY_LOSSES, PolicyLoss, SFTLoss, ValueLoss
from rlflow.ops.math.advantages import group as formulas
from rlflow.ops.math.aggregate import Totals
from rlflow.ops.math.groups import degenerate
from rlflow.ops.math.importance import importance_ratio, importance_weight
from rlflow.ops.math.kl import full_kl, token_kl
from rlflow.ops.math.losses.objective import resolved
from rlflow.ops.math.losses.off_policy import top_entropy
from rlflow.ops.math.losses.rejection import kept
from tests.budget import examples
from tests.ops.parts import call_of, samples
from tests.ops.test_advantage_bodies import with_more

pytestmark = pytest.mark.torch

BAD = st.sampled_from([math.nan, math.inf, -math.inf])
NEEDED = {"dro": {"beta": 0.5}}
LOSSES = [
    *(PolicyLoss(kind, **NEEDED.get(kind, {})) for kind in sorted(POLICY_LOSSES)),
    PolicyLoss(old="recomputed", kl_coef=0.1, kl_unbiased=True, entropy_coef=0.01),
    PolicyLoss(old="recomputed", correction=ImportanceSampling(mode="mask", cap=2.0)),
    PolicyLoss(old="recomputed", rejection=Rejection("k3", high=0.1, over="row-max")),
    PolicyLoss(old="loglinear", off_policy_limit=0.1),
    PolicyLoss(top_entropy=0.5),
    *(DistillLoss(form) for form in ("policy_gradient", "reward", "supervised")),
    SFTLoss(),
    ValueLoss(),
]


def numbers(seed: int, rows: int = 3, tokens: int = 4) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return -torch.rand(rows, tokens, generator=made, dtype=torch.float64) - 0.1


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(sorted(POLICY_LOSSES)), st.data())
def test_no_token_loss_makes_a_number_of_what_is_none(kind, data):
    spec = POLICY_LOSSES[kind]
    loss = PolicyLoss(kind, **NEEDED.get(kind, {}))
    given_ = [numbers(seed) for seed in (1, 2, 3)]
    given_[2] = given_[2] + 0.5
    where, bad = data.draw(st.integers(0, 2)), data.draw(BAD)
    row, token = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 3))
    given_[where][row, token] = bad
    mask = torch.ones(3, 4, dtype=torch.bool)
    options = {name: getattr(loss, name) for name in spec.options}
    if spec.selection is not None:
        options["chosen"] = data.draw(st.booleans()) & mask
    made, ratio = resolved(spec.body)(*given_, mask, **options)
    counted = spec.clipped and resolved(spec.clipped)(ratio, *given_, mask, **options)[row, token]
    unread = where == 1 and not spec.ratio
    assert unread or counted or not made[row].isfinite().all()


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(LOSSES), st.data())
def test_a_forward_that_is_not_finite_spoils_the_step_and_masked_tokens_never_do(spec, data):
    batch = samples([0, 0, 1, 1])
    sizes = lengths(batch["response_mask"])
    count = int(sizes.sum())
    mask = flat(batch["response_mask"]).clone()
    mask[0], mask[1] = True, False
    batch["response_mask"] = ragged(mask, sizes)
    for name, dtype in (("age", torch.int64), ("uncertain", torch.bool), ("chosen", torch.bool)):
        batch[name] = ragged(torch.ones(count, dtype=dtype), sizes)
    batch["teacher_log_probs"] = batch["ref_log_probs"]
    batch["covariance"] = batch["advantages"]
    if isinstance(spec, PolicyLoss) and spec.of_kind.advantages == "row":
        batch["advantages"] = batch["reward"]
    function = update.loss_function(spec, Totals(tokens=float(mask.sum()), rows=4.0))
    outputs = {
        name: torch.linspace(-2.0, -0.1, count, requires_grad=True) for name in spec.outputs()
    }
    name = data.draw(st.sampled_from(sorted(outputs)))

    def with_bad(place: int) -> torch.Tensor:
        at = torch.arange(count) == place
        changed = {**outputs, name: torch.where(at, data.draw(BAD), outputs[name])}
        return function(changed, batch)[0]

    whole = function(outputs, batch)[0]
    assert whole.isfinite()
    assert not with_bad(0).isfinite()
    assert torch.equal(whole, with_bad(1))


@settings(max_examples=examples(100), deadline=None)
@given(st.data(), BAD)
def test_a_field_that_is_not_finite_is_named_with_its_row_and_token(data, bad):
    batch = with_more(samples([0, 0, 1, 2, 2]))
    fields = [n for n in batch.keys() if batch[n].is_floating_point()]  # noqa: SIM118
    name = data.draw(st.sampled_from(sorted(fields)))
    ragged_field = name not in ("reward", "other", "baseline")
    values = (flat(batch[name]) if ragged_field else batch[name]).clone()
    place = data.draw(st.integers(0, len(values) - 1))
    values[place] = bad
    sizes = lengths(batch["response_mask"])
    batch[name] = ragged(values, sizes) if ragged_field else values
    counted = not ragged_field or bool(flat(batch["response_mask"])[place])
    call = call_of(batch)
    if not counted:
        assert finite.finite_inputs(call) is batch
        return
    with pytest.raises(RunError) as caught:
        finite.finite_inputs(call)
    (found,) = caught.value.findings
    row = int((sizes.cumsum(0) <= place).sum()) if ragged_field else place
    assert "E651" == found.code
    assert f"made: {name} is not finite in iteration 3" == found.what
    assert f"{bad} in row {row}" in found.got
    assert not ragged_field or f", token {place - int(sizes[:row].sum())};" in found.got


WEIGHTS = RewardWeights(weights=(("reward", 1.0), ("other", 1.0)))
BODIES = {
    **{
        name: (getattr(advantage, name), {})
        for name in (
            "gae",
            "reinforce_pp",
            "remax",
            "optimal_token_baseline",
            "grpo",
            "dr_grpo",
            "rloo",
            "opo",
            "gpg",
            "pass_at_k",
            "reinforce_pp_baseline",
        )
    },
    "gdpo": (advantage.gdpo, {"rewards": WEIGHTS}),
    "pair": (pair.pair, {}),
    "informative": (loops.informative, {}),
    "track": (track, {"weights": PassRates("group", threshold=1.0)}),
    "update": (update.update, {"loss": SFTLoss()}),
}


@pytest.mark.parametrize("name", BODIES)
def test_every_body_that_learns_refuses_a_reward_that_is_none(name):
    body, params = BODIES[name]
    batch = with_more(samples([0, 0, 1, 1]))
    batch["reward"] = torch.tensor([0.0, 1.0, math.inf, 0.5])
    with pytest.raises(RunError, match="E651"):
        body(call_of(batch, params, model=object()))


def test_rows_that_are_not_valid_need_no_reward():
    batch = samples([0, 0])
    batch["reward"], batch["valid"] = torch.tensor([1.0, math.nan]), torch.tensor([True, False])
    assert finite.finite_inputs(call_of(batch)) is batch


@given(BAD, st.sampled_from([2, 3]), st.booleans())
def test_a_group_with_such_a_reward_teaches_nothing_that_looks_like_a_number(bad, size, all_of_it):
    reward = torch.tensor([0.0, 1.0, 0.5, *([bad] * size)])
    if not all_of_it:
        reward[-1] = 0.25
    group, mask = torch.tensor([0] * 3 + [1] * size), torch.ones(3 + size, 2, dtype=torch.bool)
    for name in ("grpo", "dr_grpo", "rloo", "gpg", "pass_at_k"):
        assert not getattr(formulas, name)(reward, group)[3].isfinite(), name
    for name in ("opo", "reinforce_pp_baseline"):
        assert not getattr(formulas, name)(reward, group, mask)[3].isfinite(), name
    assert not formulas.gdpo(torch.stack([reward, reward], 1), group)[3].isfinite()
    assert not degenerate(reward, group).any()
    assert formulas.dr_grpo(reward, group)[:3].isfinite().all()


@given(BAD, st.sampled_from(["token", "sequence"]))
def test_weights_and_rejections_count_what_is_no_number(bad, level):
    proximal, behaviour = numbers(1), numbers(2)
    behaviour[1, 2] = bad
    mask = torch.ones(3, 4, dtype=torch.bool)
    ratio = importance_ratio(proximal, behaviour, mask, level=level)
    assert not ratio[1, 2].isfinite()
    assert not importance_weight(ratio, mode="truncate", cap=2.0)[1, 2].isfinite()
    masked = importance_weight(ratio, mode="mask", cap=9.0)
    assert 0.0 == masked[1, 2]
    assert bool((masked != ratio)[1, 2])
    for statistic, over in (("k1", "token"), ("k2", "row-sum"), ("k3", "row-max")):
        left = kept(proximal, behaviour, mask, statistic=statistic, over=over, high=9.0)
        assert not left[1, 2]


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "k1+", "k2+", "k3+"])
def test_an_infinite_divergence_is_not_held(kind):
    own, ref = numbers(1), numbers(2)
    ref[0, 0] = -math.inf
    mask = torch.ones(3, 4, dtype=torch.bool)
    assert not token_kl(own, ref, mask, kind=kind)[0, 0].isfinite()


def test_a_nan_within_a_distribution_is_no_impossible_token():
    own = torch.tensor([[[-math.inf, 0.0], [math.nan, 0.0]]])
    found = full_kl(own, torch.zeros(1, 2, 2), torch.ones(1, 2, dtype=torch.bool))
    assert 0.0 == found[0, 0]
    assert found[0, 1].isnan()


def test_one_entropy_that_is_none_drops_no_other():
    entropy = torch.tensor([[1.0, math.nan, 3.0, 2.0, math.inf]])
    chosen = top_entropy(entropy, torch.ones(1, 5, dtype=torch.bool), share=0.5)
    assert [[False, False, True, True, False]] == chosen.tolist()


@pytest.mark.parametrize("kind", ["gspo", "gspo_token", "luspo", "sequence_clip", "gmpo"])
@pytest.mark.parametrize("apart", [29.5, -29.5])
def test_beyond_the_hold_of_a_response_there_is_no_gradient(kind, apart):
    old = torch.full((1, 3), -40.0, dtype=torch.float64)
    log_probs = (old + apart).requires_grad_()
    mask, loss = torch.ones(1, 3, dtype=torch.bool), PolicyLoss(kind, clip=math.inf)
    options = {"clip": loss.clip}
    for gain in (1.0, -1.0):
        body = resolved(POLICY_LOSSES[kind].body)
        made = body(log_probs, old, torch.tensor([gain]).double(), mask, **options)[0]
        (gradient,) = torch.autograd.grad(made.sum(), log_probs)
        assert [0.0, 0.0, 0.0] == gradient[0].tolist()


def test_sure_tokens_and_rounding_make_no_nan_of_the_binary_kl():
    """A log-prob of 1e-7, above 0 by rounding, had a NaN for its KL, and passed."""
    outside = resolved(POLICY_LOSSES["dppo_kl"].clipped)
    new, old = torch.tensor([[1e-7, -0.01, 0.0]]), torch.tensor([[-3.0, 1e-7, -math.inf]])
    mask, gain = torch.ones(1, 3, dtype=torch.bool), torch.tensor([1.0])
    options = {"divergence": (0.05, 0.05), "ratio_max": 20.0}
    found = outside(torch.ones(1, 3), new, old, gain, mask, **options)
    assert [[True, False, True]] == found.tolist()
