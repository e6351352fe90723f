"""What a user says about a loss: validation, needs, printed form, saving and loading."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from rlflow.ops.losses import losses
from rlflow.ops.losses.losses import LossKind, PolicyLoss, SFTLoss, ValueLoss


def test_defaults():
    loss = PolicyLoss()
    assert "ppo_clip" == loss.kind
    assert (0.2, 0.2) == loss.clip
    assert None is loss.dual_clip
    assert 0.0 == loss.kl_coef == loss.entropy_coef
    assert ("k3", "auto", "token-mean") == (loss.kl, loss.old, loss.aggregate)
    assert 0.2 == ValueLoss().clip


def test_the_kind_may_come_first_and_one_clip_means_both_sides():
    assert PolicyLoss("ppo_clip", clip=0.3) == PolicyLoss(kind="ppo_clip", clip=(0.3, 0.3))


def test_what_is_saved_holds_every_option_that_acts():
    saved = PolicyLoss(kl_coef=0.1).model_dump()
    options = {"clip", "dual_clip", "kl_coef", "kl", "entropy_coef", "old", "correction"}
    options |= {"top_entropy", "off_policy_limit", "kl_unbiased", "rejection", "response_metrics"}
    assert {"kind", "aggregate", *options} == saved.keys()
    assert "kl" not in PolicyLoss().model_dump()


def test_a_kind_refuses_the_options_of_others(monkeypatch):
    plain = LossKind(body="builtins:abs", options=frozenset())
    monkeypatch.setitem(losses.POLICY_LOSSES, "plain", plain)
    assert "PolicyLoss(plain)" == PolicyLoss("plain").describe()
    with pytest.raises(ValidationError, match="clip would do nothing here: plain does not read"):
        PolicyLoss("plain", clip=0.2)


def test_every_kind_reads_options_that_exist():
    for kind in losses.POLICY_LOSSES.values():
        assert kind.required <= kind.options
        assert kind.options <= kind.reads <= set(losses.KIND_OPTIONS)
        assert kind.own_defaults.keys() <= PolicyLoss.model_fields.keys()
    read = frozenset().union(*(kind.reads for kind in losses.POLICY_LOSSES.values()))
    assert read == set(losses.KIND_OPTIONS) <= PolicyLoss.model_fields.keys()


def test_a_loss_without_a_kind_of_its_own_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        losses.Loss()


@pytest.mark.torch
@pytest.mark.parametrize("spec", [PolicyLoss, ValueLoss, SFTLoss])
def test_the_body_is_there(spec):
    import pkgutil

    assert callable(pkgutil.resolve_name(spec.body))


@pytest.mark.torch
def test_the_body_of_every_kind_is_there():
    import pkgutil

    for kind in losses.POLICY_LOSSES.values():
        selection = () if kind.selection is None else (kind.selection.body,)
        for body in (kind.body, kind.clipped, *selection, losses.TOP_ENTROPY.body):
            assert body is None or callable(pkgutil.resolve_name(body))
