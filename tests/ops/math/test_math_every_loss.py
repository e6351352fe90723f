"""What holds of every loss: any cut, padding, empty rows and garbage under the mask change nothing.

    rows 0..6 (lengths 5 1 0 3 5 2 4)  -->  parts, each padded to its own longest row
    sum of part losses == loss of the whole,  same for gradients and metrics

A backend averages gradients over ranks after it has multiplied losses by their number: that is
the same sum. Each formula is tried by hand, or by a plain loop, in the file of its module.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from rlflow.ops.corrections import ImportanceSampling, Rejection
from rlflow.ops.losses.distill import DistillLoss
from rlflow.ops.losses.losses import (
    POLICY_LOSSES,
    KLEstimator,
    PolicyLoss,
    SFTLoss,
    ValueLoss,
)
from rlflow.ops.math.aggregate import Totals, count
from rlflow.ops.math.losses.distillation import distill_objective
from rlflow.ops.math.losses.mismatch import step_sums
from rlflow.ops.math.losses.objective import (
    policy_objective,
    sft_objective,
    value_objective,
)
from tests.ops.math.distributions import combine

pytestmark = pytest.mark.torch

LENGTHS = torch.tensor([5, 1, 0, 3, 5, 2, 4])
ROWS, WIDTH, TOP = len(LENGTHS), 5, 3
MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
TOKEN = Rejection("k1", high=1.5)
ROW = Rejection("k3", over="row-mean", high=0.3)
POLICY: dict[str, dict[str, Any]] = {
    "ppo": {"clip": (0.2, 0.28)},
    "ppo dual kl entropy": {"dual_clip": 1.5, "kl_coef": 0.3, "kl": "k3+", "entropy_coef": 0.2},
    "ppo k3 rollout": {"kl_coef": 0.3, "old": "rollout"},
    "ppo current": {"old": "current", "entropy_coef": 0.2},
    "reinforce": {"kind": "reinforce"},
    "gpg": {"kind": "gpg"},
    "gpg near": {"kind": "gpg", "off_policy_limit": 0.05},
    "gspo": {"kind": "gspo", "clip": (0.3, 0.4)},
    "gspo token": {"kind": "gspo_token", "clip": 0.3, "dual_clip": 1.4},
    "luspo": {"kind": "luspo", "clip": 0.3},
    "sequence clip": {"kind": "sequence_clip", "clip": 0.6, "dual_clip": 1.7},
    "gmpo": {"kind": "gmpo", "entropy_coef": 0.2},
    "cispo": {"kind": "cispo", "ratio_max": 1.2, "ratio_min": 0.9},
    "sapo": {"kind": "sapo", "old": "rollout", "kl_coef": 0.1},
    "vespo": {"kind": "vespo"},
    "dppo tv": {"kind": "dppo_tv", "divergence": 0.2},
    "dppo kl": {"kind": "dppo_kl", "divergence": 0.1},
    "dro": {"kind": "dro", "beta": 0.3},
    "clip cov": {"kind": "clip_cov", "top_entropy": 0.5},
    "kl cov": {"kind": "kl_cov", "cov_coef": 0.4},
    "near and uncertain": {"off_policy_limit": 0.0, "off_policy_from": "old", "top_entropy": 0.5},
    "weighed": {"correction": ImportanceSampling(cap=1.5), "old": "recomputed"},
    "weighed rows": {"correction": ImportanceSampling(level="sequence", cap=1.5)},
    "rejected": {"rejection": TOKEN, "old": "recomputed"},
    "rejected rollout": {"rejection": ROW, "old": "rollout"},
    "kept": {"rejection": TOKEN.model_copy(update={"count": "kept"}), "kl_coef": 0.3},
    "kept rows": {
        "rejection": (
            Rejection("k3", over="row-mean", high=0.4, count="kept"),
            Rejection("k2", over="row-max", high=1.2, count="kept"),
        ),
    },
    "normalised": {"correction": ImportanceSampling(normalize=True)},
    "normalised rows": {
        "correction": ImportanceSampling(level="sequence", normalize=True, cap=1.3),
        "entropy_coef": 0.1,
    },
    "loglinear": {"old": "loglinear", "correction": ImportanceSampling(cap=1.1)},
    "unbiased": {"kl_coef": 0.4, "kl_unbiased": True, "old": "recomputed"},
    "all of it": {
        "correction": ImportanceSampling(mode="mask", cap=2.0, floor=0.5, normalize=True),
        "rejection": (ROW, TOKEN),
        "kl_coef": 0.2,
        "kl": "k2",
        "kl_unbiased": True,
        "entropy_coef": 0.05,
    },
}
# Not k1, which is no loss.
POLICY |= {f"kl {kind}": {"kl_coef": 0.3, "kl": kind} for kind in get_args(KLEstimator)[1:]}
OTHERS: dict[str, Any] = {
    "value": ValueLoss(clip=0.3),
    "value free": ValueLoss(clip=None),
    "sft": SFTLoss(),
    "distilled": DistillLoss(old="recomputed", clip=0.1),
    "distilled k3": DistillLoss(teacher_kl="k3", teacher_limit=0.1, kl_coef=0.3),
    "rewarded": DistillLoss("reward", add_advantages=True, teacher_coef=0.5, old="rollout"),
    "supervised": DistillLoss("supervised"),
    "supervised k2": DistillLoss("supervised", teacher_kl="k2", aggregate="seq-mean-token-mean"),
    "forward kl": DistillLoss("forward_kl"),
    "forward kl of all": DistillLoss("forward_kl", tail=True),
    "forward kl held": DistillLoss("forward_kl", log_prob_min=None, teacher_limit=0.4),
    "reverse kl": DistillLoss("reverse_kl"),
    "jsd": DistillLoss("jsd", jsd_beta=0.3, aggregate="seq-mean-token-mean"),
}
OBJECTIVES = {
    PolicyLoss: policy_objective,
    ValueLoss: value_objective,
    SFTLoss: sft_objective,
    DistillLoss: distill_objective,
}
SPLITS = {
    "rows": [[row] for row in range(ROWS)],
    "unequal": [[0], [1, 3, 4, 5, 6], [2]],
    "empty parts": [[], [6, 0, 2], [], [5, 4, 3, 1]],
    "backwards": [list(reversed(range(ROWS)))],
}
WHOLE = [list(range(ROWS))]


def modes_of(name: str) -> tuple[str, ...]:
    """The ways to average that a formula may have, the usual one first."""
    own = POLICY_LOSSES[POLICY[name].get("kind", "ppo_clip")].aggregate
    return (own,) if own else MODES


def spec_of(name: str, mode: str | None) -> Any:
    if name in OTHERS:
        return OTHERS[name]
    constant = {"constant": 5.0} if mode == "seq-mean-token-sum-norm" else {}
    old = {} if "kind" in POLICY[name] or "old" in POLICY[name] else {"old": "auto"}
    if {"rejection", "correction"} & POLICY[name].keys():
        old = {"old": POLICY[name].get("old", "recomputed")}
    return PolicyLoss(aggregate=mode, **{**POLICY[name], **old}, **constant)


EVERY = [(name, None) for name in OTHERS] + [(name, modes_of(name)[0]) for name in POLICY]
EVERY_MODE = EVERY + [(name, mode) for name in POLICY for mode in modes_of(name)[1:]]


def test_every_kind_has_a_row():
    assert POLICY_LOSSES.keys() == {given.get("kind", "ppo_clip") for given in POLICY.values()}


def fields() -> dict[str, Tensor]:
    """Everything that any loss reads: a hole in a row, and a row without a token."""
    generator = torch.Generator().manual_seed(7)

    def draw(*more: int) -> Tensor:
        return torch.randn(ROWS, WIDTH, *more, generator=generator, dtype=torch.float64)

    mask = torch.arange(WIDTH) < LENGTHS[:, None]
    mask[4, 1] = False
    made = {name: draw() / 2 for name in ("advantages", "entropy", "returns", "values")}
    for policy in ("", "old_", "rollout_", "ref_", "teacher_"):
        made[f"{policy}log_probs"] = draw() / 2 - 2.5
    made |= {"old_values": draw() / 2, "covariance": draw()}
    for name, share in (("chosen", 0.3), ("uncertain", 0.7)):
        made[name] = torch.rand(ROWS, WIDTH, generator=generator) < share
    for top, rest in (("log_probs_at", "rest_at"), ("top_log_probs", "top_rest")):
        whole = draw(2 * TOP).log_softmax(-1)
        made |= {top: whole[..., :TOP], rest: whole[..., TOP:].logsumexp(-1)}
    age = torch.randint(0, 4, (ROWS, WIDTH), generator=generator)
    return {**made, "response_mask": mask, "age": age}


def part_of(data: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    """A micro-batch, padded to its own longest row."""
    index = torch.tensor(rows, dtype=torch.int64)
    lasting = data["response_mask"][index].any(0).nonzero()
    width = int(lasting.max()) + 1 if len(lasting) else 0
    return {name: x[index, :width] for name, x in data.items()}


def step(spec: Any, data: dict[str, Tensor], split: list[list[int]], totals: Totals):
    """Loss, metrics and gradients of an optimizer step whose parts are `split`."""
    sums: dict[str, float] = {}
    for rows in split:
        part = part_of(data, rows)
        for name, value in step_sums(spec, lambda part=part: part).items():
            sums[name] = sums.get(name, 0.0) + value
    totals = Totals(tokens=totals.tokens, rows=totals.rows, sums=sums)
    leaves = {name: data[name].clone().requires_grad_() for name in spec.outputs()}
    losses, metrics = [], []
    for rows in split:
        outputs, batch = part_of({**data, **leaves}, rows), part_of(data, rows)
        batch["values"] = batch.pop("old_values")
        needed = {name: outputs[name] for name in leaves}
        loss, found = OBJECTIVES[type(spec)](spec, needed, batch, totals)
        loss.backward()
        losses.append(loss.detach())
        metrics.append(found)
    gradients = {f"d {name}": x.grad for name, x in leaves.items() if x.grad is not None}
    return {"loss": sum(losses), **combine(metrics), **gradients}


def same(expected: dict[str, Any], got: dict[str, Any], what: str) -> None:
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        told = f"{key}, {what}"
        torch.testing.assert_close(got[key], value, rtol=1e-10, atol=1e-12, msg=told)


@pytest.mark.rows(60)
@pytest.mark.parametrize(("name", "mode"), EVERY_MODE)
def test_the_parts_of_a_step_add_up_to_the_whole(name, mode):
    spec, data = spec_of(name, mode), fields()
    totals = count(data["response_mask"])
    whole = step(spec, data, WHOLE, totals)
    for what, split in SPLITS.items():
        same(whole, step(spec, data, split, totals), what)
    assert all(value.any() for key, value in whole.items() if key.startswith("d "))
    assert any(key.startswith("d ") for key in whole)


@pytest.mark.rows(20)
@pytest.mark.parametrize(("name", "mode"), EVERY)
def test_padding_empty_rows_and_garbage_under_the_mask_change_nothing(name, mode):
    spec, data, totals = spec_of(name, mode), fields(), Totals(tokens=19, rows=12)
    mask = data["response_mask"]

    def dirty(x: Tensor, fill: float) -> Tensor:
        kept = mask if x.dim() == 2 else mask[..., None]
        bad = fill if x.is_floating_point() else 0
        sides = (*(0, 0) * (x.dim() - 2), 3, 2, 1, 2)
        return torch.nn.functional.pad(x.masked_fill(~kept, bad), sides, value=bad)

    clean, longer = step(spec, data, WHOLE, totals), [list(range(ROWS + 3))]
    for fill in (math.nan, math.inf, -math.inf, 3e38):
        found = step(spec, {n: dirty(x, fill) for n, x in data.items()}, longer, totals)
        for key in [key for key in found if key.startswith("d ")]:
            kept = dirty(mask, fill)
            counts = kept if found[key].dim() == 2 else kept[..., None]
            assert not found[key].masked_fill(counts, 0).any(), (key, fill)
            found[key] = found[key][1:-2, 3:-2]
        same(clean, found, str(fill))


@pytest.mark.parametrize(("name", "mode"), EVERY)
def test_nothing_at_all_is_no_loss(name, mode):
    spec = spec_of(name, mode)
    empty = {key: x[:0] for key, x in fields().items()}
    found = step(spec, empty, [[]], count(empty["response_mask"]))
    assert {0.0} == {float(x) for key, x in found.items() if not key.startswith("d ")}
