"""What a user says about a loss: validation, needs, printed form, saving and loading."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from pydantic import ValidationError

from rlflow.ops import losses
from rlflow.ops.losses import LossKind, PolicyLoss, SFTLoss, ValueLoss

SPECS = [
    PolicyLoss(),
    PolicyLoss("ppo_clip", kl_coef=0.02),
    PolicyLoss(clip=(0.2, 0.28), dual_clip=3.0, kl_coef=0.1, kl="k3+", entropy_coef=0.01),
    PolicyLoss(clip=math.inf, old="rollout"),
    PolicyLoss(aggregate="seq-mean-token-sum-norm", constant=12),
    ValueLoss(),
    ValueLoss(clip=None, aggregate="seq-mean-token-mean"),
    SFTLoss(),
    SFTLoss(aggregate="token-sum"),
]


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


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.describe())
def test_a_loss_is_frozen_and_loads_from_what_it_saves(spec):
    with pytest.raises(ValidationError, match="frozen"):
        spec.aggregate = "token-sum"
    assert spec == type(spec).model_validate(spec.model_dump())
    loaded = type(spec).model_validate_json(spec.model_dump_json())
    assert spec.describe() == loaded.describe()
    assert spec.model_dump() == loaded.model_dump()


def test_what_is_saved_holds_every_option_that_acts():
    saved = PolicyLoss(kl_coef=0.1).model_dump()
    options = {"clip", "dual_clip", "kl_coef", "kl", "entropy_coef", "old", "correction"}
    options |= {"top_entropy", "off_policy_limit", "kl_unbiased", "rejection"}
    assert {"kind", "aggregate", *options} == saved.keys()
    assert "kl" not in PolicyLoss().model_dump()


@pytest.mark.parametrize(
    ("spec", "line"),
    [
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
    ],
)
def test_the_printed_form_has_only_what_differs_from_the_defaults(spec, line):
    assert line == spec.describe()


@pytest.mark.parametrize(
    ("spec", "needs", "outputs"),
    [
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
    ],
)
def test_needs_and_outputs(spec, needs, outputs):
    assert needs == spec.needs()
    assert outputs == spec.outputs()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "ppo-clip"}, "no policy loss is called 'ppo-clip'.*did you mean 'ppo_clip'"),
        ({"kind": "xyz"}, "no policy loss is called 'xyz'.*ppo_clip"),
        ({"kl": "k1", "kl_coef": 0.1}, "k1 cannot be a loss.*k2 or k3\\+.*k3"),
        ({"kl": "k4", "kl_coef": 0.1}, "kl"),
        ({"kl": "k2"}, "kl would do nothing here: kl_coef is 0"),
        ({"kl": "k3"}, "kl would do nothing here: kl_coef is 0"),
        ({"kl": "k2", "kl_coef": 0.0}, "kl would do nothing here"),
        ({"constant": 12}, "constant would do nothing here.*seq-mean-token-sum-norm"),
        ({"aggregate": "seq-mean-token-sum-norm"}, "needs a constant"),
        ({"aggregate": "seq-mean-token-sum-norm", "constant": 0}, "greater than 0"),
        ({"aggregate": "mean"}, "token-mean"),
        ({"kl_coef": -0.1}, "greater than or equal to 0"),
        ({"kl_coef": math.nan}, "finite"),
        ({"kl_coef": math.inf}, "finite"),
        ({"entropy_coef": -0.1}, "greater than or equal to 0"),
        ({"entropy_coef": math.nan}, "finite"),
        ({"dual_clip": 1.0}, "greater than 1"),
        ({"dual_clip": math.nan}, "dual_clip"),
        ({"clip": 0}, "low side of clip.*freeze"),
        ({"clip": (0.2, -0.1)}, "high side of clip"),
        ({"clip": math.nan}, "low side of clip"),
        ({"clip": (0.1, 0.2, 0.3)}, "clip"),
        ({"clip": "wide"}, "clip"),
        ({"old": "previous"}, "old"),
        ({"beta": 0.1}, "beta"),
    ],
)
def test_a_wrong_policy_loss_is_refused_with_its_reason(options, message):
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        PolicyLoss(**options)


@pytest.mark.parametrize("clip", [0.0, -0.1, math.nan, math.inf])
def test_a_wrong_value_clip_is_refused(clip):
    with pytest.raises(ValidationError, match="clip"):
        ValueLoss(clip=clip)


@pytest.mark.parametrize("loss", [ValueLoss, SFTLoss])
def test_every_loss_refuses_an_idle_constant(loss):
    with pytest.raises(ValidationError, match="constant would do nothing"):
        loss(constant=3)


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


def test_declaring_a_loss_imports_no_torch():
    code = "import sys, rlflow.ops.losses as m; m.PolicyLoss(); sys.exit('torch' in sys.modules)"
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode


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
