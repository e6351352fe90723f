"""The bodies of the estimators: their options, their metrics, and parts of a batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from rlflow.batch import flat, lengths, pad, ragged
from rlflow.ops.bodies import advantage
from rlflow.ops.estimator_options import RewardWeights
from rlflow.ops.math.advantages import group as formulas
from rlflow.ops.math.advantages import token as token_formulas
from rlflow.runtime.execute.stats import join_metrics
from tests.ops.parts import FEW, call_of, nearly, require_equal, samples, split_batches

pytestmark = pytest.mark.torch

BOTH = ("advantages", "returns")
WEIGHTS = RewardWeights(weights=(("reward", 1.0), ("other", -0.5)))


def with_more(batch):
    """The fields that only some estimators read, made of those there are."""
    batch["other"] = batch["reward"].square() - batch["row"]
    batch["baseline"] = batch["reward"] * 0.5
    batch["finished"] = batch["row"] % 2 == 0
    values = flat(batch["values"])
    batch["sum_pi_squared"] = ragged(values.sigmoid(), lengths(batch["values"]))
    batch["old_log_probs"] = ragged(-values.abs(), lengths(batch["values"]))
    return batch


def made_of(name, batch, **params):
    return getattr(advantage, name)(call_of(batch, params, wanted=BOTH))


def test_options_reach_the_formula():
    batch = with_more(samples([0, 0, 1, 2, 1, 0]))
    reward, group, other = batch["reward"], batch["group"], batch["other"]
    mask = pad(flat(batch["response_mask"]), lengths(batch["response_mask"]))
    rewards = torch.stack([reward, other], -1)
    for name, options, expected in (
        ("grpo", {"leave_one_out": True}, formulas.grpo(reward, group, leave_one_out=True)),
        ("dr_grpo", {"single": "reward"}, formulas.dr_grpo(reward, group, single="reward")),
        ("rloo", {"whiten": True, "std_eps": 0.5}, None),
        ("opo", {"single": "reward"}, formulas.opo(reward, group, mask, single="reward")),
        ("gpg", {"alpha": "none", "scale": "group", "std_eps": 0.5, "single": "reward"}, None),
        ("pass_at_k", {"scale": "batch", "std_eps": 0.5}, None),
        (
            "reinforce_pp_baseline",
            {"over": "rows", "single": "reward"},
            formulas.reinforce_pp_baseline(reward, group, mask, over="rows", single="reward"),
        ),
        (
            "gdpo",
            {"rewards": WEIGHTS, "over": "tokens", "single": "reward", "std_eps": 0.5},
            formulas.gdpo(
                rewards,
                group,
                mask,
                weights=[1.0, -0.5],
                over="tokens",
                single="reward",
                std_eps=0.5,
            ),
        ),
    ):
        plain = getattr(formulas, name)(reward, group, **options) if expected is None else expected
        assert torch.equal(plain, made_of(name, batch, **options).fields["advantages"]), name


def test_token_estimators_give_their_fields_the_lengths_of_the_mask():
    batch = with_more(samples([0, 0, 1, 1, 0]))
    mask = pad(flat(batch["response_mask"]), lengths(batch["response_mask"]))
    spread = token_formulas.token_rewards(batch["reward"], mask)
    expected = token_formulas.remax(spread, batch["baseline"], mask)
    made = made_of("remax", batch)
    for name, value in zip(BOTH, expected, strict=True):
        got = made.fields[name]
        assert lengths(got).tolist() == lengths(batch["response_mask"]).tolist()
        assert torch.equal(value, pad(flat(got), lengths(got)))


def test_a_row_alone_keeps_its_return_only_if_asked():
    batch = with_more(samples([0, 1]))
    batch["reward"] = torch.tensor([1.0, 2.0])
    batch["response_mask"] = ragged(
        torch.ones_like(flat(batch["response_mask"])), lengths(batch["response_mask"])
    )
    plain, kept = (
        made_of("optimal_token_baseline", batch, **options).fields
        for options in ({}, {"single": "reward"})
    )
    assert not flat(plain["advantages"]).any()
    assert torch.equal(flat(kept["returns"]), flat(kept["advantages"]))


def test_a_cut_row_is_continued_only_if_asked():
    batch = with_more(samples([0, 1, 2, 3]))
    batch["response_mask"] = ragged(
        torch.ones_like(flat(batch["response_mask"])), lengths(batch["response_mask"])
    )
    plain, cut = (
        made_of("gae", batch, whiten=False, bootstrap=asked).fields["returns"]
        for asked in (False, True)
    )
    rows = [torch.equal(one, two) for one, two in zip(plain.unbind(), cut.unbind(), strict=True)]
    assert batch["finished"].tolist() == rows


def test_shares_of_groups_are_logged():
    """Group 0 is level, 1 is not, 2 is alone; the third reward of group 0 differs in gdpo."""
    batch = with_more(samples([0, 1, 0, 2, 1, 0]))
    batch["reward"] = torch.tensor([1.0, 0, 1, 5, 3, 1])
    batch["other"] = torch.tensor([0.0, 0, 0, 0, 0, 1])
    for name in ("grpo", "dr_grpo", "rloo", "opo", "gpg", "pass_at_k", "optimal_token_baseline"):
        metrics = join_metrics([made_of(name, batch).metrics])
        assert (1 / 3, 1 / 3) == pytest.approx((metrics["single"], metrics["degenerate"])), name
    metrics = join_metrics([made_of("gdpo", batch, rewards=WEIGHTS).metrics])
    assert (1 / 3, 0.0) == pytest.approx((metrics["single"], metrics["degenerate"]))
    assert 4 / 6 == pytest.approx(join_metrics([made_of("grpo", batch).metrics])["zero"])
    assert "single" not in made_of("remax", batch).metrics


def test_a_kl_in_the_reward_hides_no_degenerate_group():
    batch = samples([0, 0])
    batch["reward"] = torch.ones(2)
    made = made_of("dr_grpo", batch, kl_coef=0.5)
    assert made.fields["advantages"].all()
    assert 1.0 == join_metrics([made.metrics])["degenerate"]


@pytest.mark.slow
@FEW
@given(split_batches())
def test_group_estimators_on_parts(case):
    batch, parts = case
    batch = with_more(batch)
    for body, params in (
        (advantage.grpo, {"leave_one_out": True}),
        (advantage.dr_grpo, {}),
        (advantage.opo, {"single": "reward"}),
        (advantage.gpg, {"alpha": "none", "scale": "group"}),
        (advantage.pass_at_k, {}),
        (advantage.reinforce_pp_baseline, {"whiten": False}),
        (advantage.gdpo, {"rewards": WEIGHTS, "whiten": False}),
    ):
        require_equal(body, call_of(batch, params), parts, close=nearly)


@pytest.mark.slow
@FEW
@given(split_batches())
def test_token_baselines_on_parts(case):
    batch, parts = case
    call = call_of(with_more(batch), {"kl_coef": 0.1}, wanted=BOTH)

    require_equal(advantage.optimal_token_baseline, call, parts, close=nearly)


@pytest.mark.slow
@FEW
@given(split_batches(whole_groups=False))
def test_row_estimators_on_parts(case):
    batch, parts = case
    params = {"whiten": False, "bootstrap": True}
    call = call_of(with_more(batch), params, wanted=BOTH)

    require_equal(advantage.gae, call, parts)
    require_equal(advantage.remax, call, parts)


@pytest.mark.parametrize("name", ["grpo", "opo", "gpg", "pass_at_k", "reinforce_pp_baseline"])
def test_a_part_without_a_row(name):
    made = made_of(name, with_more(samples([])))
    assert (0, 0) == (made.rows, len(made.fields["advantages"]))
