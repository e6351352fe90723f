"""The kinds of policy loss as a user says them: defaults, needs, what is refused, printed forms."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

import rlflow as rf
from rlflow import ops
from rlflow.errors import GraphError
from rlflow.graph.graph import Graph
from rlflow.ops.losses.losses import KIND_OPTIONS, POLICY_LOSSES, PolicyLoss

REQUIRED = {"dro": {"beta": 0.1}}
VALUES = {
    "clip": (0.1, 0.25),
    "dual_clip": 2.5,
    "ratio_max": 3.0,
    "ratio_min": 0.5,
    "tau": (1.5, 2.0),
    "level": "sequence",
    "divergence": (0.1, 0.2),
    "beta": 0.3,
    "gamma_positive": (1.5, 2.5),
    "gamma_negative": (2.5, 1.5),
    "cov_share": 0.01,
    "cov_range": (0.5, 4.0),
    "cov_coef": 0.2,
}
KINDS = sorted(POLICY_LOSSES)


def test_every_option_is_tried():
    assert set(KIND_OPTIONS) == VALUES.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_takes_the_options_it_reads_and_no_other(kind):
    reads, needed = POLICY_LOSSES[kind].reads, REQUIRED.get(kind, {})
    for option, value in VALUES.items():
        given = {**needed, option: value}
        if option in reads:
            assert value == getattr(PolicyLoss(kind, **given), option)
        else:
            with pytest.raises(ValidationError, match=f"{option} would do nothing.*{kind} does"):
                PolicyLoss(kind, **given)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_loads_from_what_it_saves_and_from_its_line(kind):
    reads = POLICY_LOSSES[kind].reads
    specs = [
        PolicyLoss(kind, **REQUIRED.get(kind, {})),
        PolicyLoss(
            kind,
            top_entropy=0.2,
            off_policy_limit=0.01,
            **{name: value for name, value in VALUES.items() if name in reads},
        ),
    ]
    for spec in specs:
        assert spec == PolicyLoss.model_validate(spec.model_dump())
        assert spec == PolicyLoss.model_validate_json(spec.model_dump_json())
        again = eval(spec.line(), {"rf": rf, "math": math})
        assert spec == again
        assert spec.describe() == again.describe()
    assert specs[0].describe().startswith(f"PolicyLoss({kind}")


@pytest.mark.parametrize(
    ("kind", "defaults"),
    [
        ("ppo_clip", {"clip": (0.2, 0.2), "aggregate": "token-mean"}),
        ("gspo", {"clip": (3e-4, 4e-4), "aggregate": "seq-mean-token-mean"}),
        ("gspo_token", {"clip": (3e-4, 4e-4), "aggregate": "seq-mean-token-mean"}),
        ("luspo", {"clip": (2e-3, 2.5e-3), "aggregate": "seq-mean-token-sum"}),
        ("sequence_clip", {"clip": (0.2, 0.2), "aggregate": "seq-mean-token-sum"}),
        ("gmpo", {"clip": (0.4, 0.4), "aggregate": "seq-mean-token-mean"}),
        ("sapo", {"tau": (1.0, 1.05), "aggregate": "seq-mean-token-mean"}),
        ("cispo", {"ratio_max": 5.0, "ratio_min": None, "aggregate": "token-mean"}),
        ("dppo_tv", {"divergence": (0.15, 0.15), "ratio_max": 20.0}),
        ("dppo_kl", {"divergence": (0.05, 0.05), "ratio_max": 20.0}),
        ("vespo", {"gamma_positive": (2.0, 3.0), "gamma_negative": (3.0, 2.0)}),
        ("clip_cov", {"clip": (0.2, 0.2), "cov_share": 2e-4, "cov_range": (1.0, 5.0)}),
        ("kl_cov", {"cov_share": 2e-4, "cov_coef": 1.0}),
        ("reinforce", {"aggregate": "seq-mean-token-sum"}),
        ("gpg", {"aggregate": "token-mean"}),
    ],
)
def test_defaults_are_those_of_the_papers_and_are_not_printed(kind, defaults):
    spec = PolicyLoss(kind)
    assert defaults == {name: getattr(spec, name) for name in defaults}
    assert f"PolicyLoss({kind})" == spec.describe()
    assert f'rf.PolicyLoss("{kind}")' == spec.line()
    assert spec == PolicyLoss(kind, **defaults)


def test_what_differs_from_the_default_of_the_kind_is_printed():
    assert "PolicyLoss(gspo, clip=0.2)" == PolicyLoss("gspo", clip=0.2).describe()
    spec = PolicyLoss("sapo", tau=2, aggregate="token-mean")
    assert "PolicyLoss(sapo, tau=2.0, aggregate=token-mean)" == spec.describe()


def test_an_aggregate_that_the_formula_has_may_be_said():
    assert PolicyLoss("luspo") == PolicyLoss("luspo", aggregate="seq-mean-token-sum")


def test_the_old_policy_is_read_by_ratios_and_by_what_compares_with_it():
    assert PolicyLoss("sapo").reads_old
    assert not PolicyLoss("reinforce").reads_old
    assert not PolicyLoss("gpg", off_policy_limit=0.1).reads_old
    assert PolicyLoss("gpg", off_policy_limit=0.1, off_policy_from="old").reads_old
    assert PolicyLoss("gpg", correction=rf.ImportanceSampling(), old="recomputed").reads_old


@pytest.mark.parametrize("kind", KINDS)
def test_only_kinds_with_a_ratio_correct_by_it(kind):
    spec = PolicyLoss(kind, **REQUIRED.get(kind, {}))
    assert (kind not in {"reinforce", "gpg"}) is spec.corrects("rollout", own=True)
    assert not spec.corrects("current", own=True)
    assert all(line.startswith("rf.PolicyLoss(") for line in spec.corrections())


def test_needs_and_selections():
    assert "rollout_log_probs" in PolicyLoss(off_policy_limit=0.1).needs()
    assert (
        "rollout_log_probs" not in PolicyLoss(off_policy_limit=0.1, off_policy_from="old").needs()
    )
    assert () == PolicyLoss().selections()
    both = PolicyLoss("clip_cov", top_entropy=0.2).selections()
    assert [("log_probs",), ("entropy",)] == [one.outputs for one in both]
    assert ("log_probs",) == PolicyLoss("clip_cov", top_entropy=0.2).outputs()


# --- against the graph ----------------------------------------------------------------------


class Config(rf.Config):
    """No settings."""


def exact(response: str, answer: str) -> float:
    return float(response == answer)


def graph(loss, *, estimator="grpo", old=False, temperature=None, of=None, **steps) -> Graph:
    def pipeline(cfg: Config) -> None:
        actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-4))
        ref = rf.Model("ref", "models/tiny")
        prompts = ops.prompts(rf.data.arithmetic(), batch=8)
        samples = ops.rollout(actor, prompts, n=4, max_new_tokens=4, temperature=0.7)
        given = [ops.log_probs(actor, samples, temperature=of)] if old else []
        if loss.kl_coef:
            given.append(ops.log_probs(ref, samples, temperature=temperature))
        advantage = ops.advantage(estimator, samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, *given, loss=loss, **steps)

    return rf.pipeline()(pipeline).trace()


def reads(made: Graph) -> set[str]:
    return {bound.name for bound in made.node("actor.update").inputs}


def test_a_kind_without_a_ratio_reads_no_old_log_probs():
    made = graph(PolicyLoss("reinforce"), old=True, epochs=2)
    assert "old_log_probs" not in reads(made)
    (declined,) = made.node("actor.update").declined
    assert "reinforce takes no ratio" in declined.why
    assert "current" == made.node("actor.update").param("old")


def test_several_steps_make_a_ratio_read_the_old_policy():
    assert "rollout" == graph(PolicyLoss("sapo"), epochs=2).node("actor.update").param("old")
    assert "old_log_probs" in reads(graph(PolicyLoss("sapo"), old=True, epochs=2))


def test_what_a_mask_of_responses_compares_with_has_to_be_there():
    assert "rollout_log_probs" in reads(graph(PolicyLoss("gpg", off_policy_limit=0.1)))
    spec = PolicyLoss("gpg", off_policy_limit=0.1, off_policy_from="old", old="recomputed")
    with pytest.raises(GraphError, match=r"'actor\.update' has no input 'old_log_probs'"):
        graph(spec)


@pytest.mark.parametrize("kind", ["gspo", "luspo", "sequence_clip", "gmpo"])
def test_losses_of_responses_take_one_advantage_a_row(kind):
    graph(PolicyLoss(kind))
    with pytest.raises(GraphError, match=r"(?s)E104.*cannot read 'advantages'.*level rf\.Row"):
        graph(PolicyLoss(kind), estimator="reinforce++")
    graph(PolicyLoss("gspo_token"), estimator="reinforce++")


@pytest.mark.parametrize(
    ("loss", "options", "field"),
    [
        (PolicyLoss(kl_coef=0.1), {"temperature": 1.0}, "ref_log_probs"),
        (PolicyLoss(), {"old": True, "of": 1.0}, "old_log_probs"),
    ],
)
def test_log_probs_of_another_temperature_are_refused(loss, options, field):
    with pytest.raises(GraphError, match=rf"(?s)E244.*{field}.*at temperature 1, its own at 0\.7"):
        graph(loss, **options)
    same = {k: 0.7 if v == 1.0 and k != "old" else v for k, v in options.items()}
    assert field in reads(graph(loss, **same))


def test_log_probs_of_another_temperature_may_be_there_unread():
    graph(PolicyLoss("gpg"), old=True, of=1.0)
