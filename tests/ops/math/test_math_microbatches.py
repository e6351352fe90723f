"""Any cut of a batch gives the loss, the metrics and the gradient of the whole batch.

    rows 0..6 (lengths 5 1 0 3 5 2 4)  -->  parts, each padded to its own longest row
    sum of part losses == loss of the whole,  same for gradients and metrics

Wrong variants (a local normaliser, an average of parts) must fail the very same check.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlflow.ops.losses import POLICY_LOSSES, PolicyLoss, SFTLoss, ValueLoss
from rlflow.ops.math.aggregate import Totals, count
from rlflow.ops.math.objective import combine, policy_objective, sft_objective, value_objective

pytestmark = pytest.mark.torch

LENGTHS = torch.tensor([5, 1, 0, 3, 5, 2, 4])
ROWS, WIDTH = len(LENGTHS), 5
MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
LOSSES = {
    "ppo": (PolicyLoss, {"clip": (0.2, 0.28)}),
    "ppo dual kl entropy": (
        PolicyLoss,
        {"dual_clip": 1.5, "kl_coef": 0.3, "kl": "k3+", "entropy_coef": 0.2},
    ),
    "ppo k3 rollout": (PolicyLoss, {"kl_coef": 0.3, "old": "rollout"}),
    "ppo current": (PolicyLoss, {"old": "current", "entropy_coef": 0.2}),
    "reinforce": (PolicyLoss, {"kind": "reinforce"}),
    "gpg near": (PolicyLoss, {"kind": "gpg", "off_policy_limit": 0.05}),
    "gspo": (PolicyLoss, {"kind": "gspo", "clip": (0.3, 0.4)}),
    "gspo token": (PolicyLoss, {"kind": "gspo_token", "clip": 0.3, "dual_clip": 1.4}),
    "luspo": (PolicyLoss, {"kind": "luspo", "clip": 0.3}),
    "sequence clip": (PolicyLoss, {"kind": "sequence_clip", "clip": 0.6, "dual_clip": 1.7}),
    "gmpo": (PolicyLoss, {"kind": "gmpo", "entropy_coef": 0.2}),
    "cispo": (PolicyLoss, {"kind": "cispo", "ratio_max": 1.2, "ratio_min": 0.9}),
    "sapo": (PolicyLoss, {"kind": "sapo", "old": "rollout", "kl_coef": 0.1}),
    "vespo": (PolicyLoss, {"kind": "vespo"}),
    "dppo tv": (PolicyLoss, {"kind": "dppo_tv", "divergence": 0.2}),
    "dppo kl": (PolicyLoss, {"kind": "dppo_kl", "divergence": 0.1}),
    "dro": (PolicyLoss, {"kind": "dro", "beta": 0.3}),
    "clip cov": (PolicyLoss, {"kind": "clip_cov", "top_entropy": 0.5}),
    "kl cov": (PolicyLoss, {"kind": "kl_cov", "cov_coef": 0.4}),
    "ppo near and uncertain": (
        PolicyLoss,
        {"off_policy_limit": 0.0, "off_policy_from": "old", "top_entropy": 0.5},
    ),
    "value": (ValueLoss, {"clip": 0.3}),
    "value free": (ValueLoss, {"clip": None}),
    "sft": (SFTLoss, {}),
}
OBJECTIVE = {
    PolicyLoss: policy_objective,
    ValueLoss: value_objective,
    SFTLoss: sft_objective,
}
SPLITS = {
    "one": [range(ROWS)],
    "rows": [[row] for row in range(ROWS)],
    "unequal": [[0], [1, 3, 4, 5, 6], [2]],
    "empty parts": [[], [6, 0, 2], [], [5, 4, 3, 1]],
    "backwards": [range(ROWS - 1, -1, -1)],
}


def own_mode(name: str, mode: str) -> str:
    """The mode, or the one that the formula of a kind has."""
    kind = POLICY_LOSSES[LOSSES[name][1].get("kind", "ppo_clip")]
    return kind.aggregate or mode


PAIRS = [(name, mode) for name in LOSSES for mode in MODES if mode == own_mode(name, mode)]
every_loss_and_mode = pytest.mark.parametrize(("name", "mode"), PAIRS)


def spec_of(name: str, mode: str):
    kind, options = LOSSES[name]
    mode = own_mode(name, mode)
    constant = {"constant": 5.0} if mode == "seq-mean-token-sum-norm" else {}
    return kind(aggregate=mode, **options, **constant)


def fields() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    names = ("log_probs", "entropy", "values", "advantages", "old_log_probs")
    names = (*names, "rollout_log_probs", "ref_log_probs", "returns", "old_values")
    draw = {
        name: 0.5 * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        for name in names
    }
    mask = torch.arange(WIDTH) < LENGTHS[:, None]
    mask[4, 1] = False
    draw["covariance"] = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    for name, share in (("chosen", 0.3), ("uncertain", 0.7)):
        draw[name] = torch.rand(ROWS, WIDTH, generator=generator) < share
    for name in ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs"):
        draw[name] = draw[name] - 2.5
    return {**draw, "response_mask": mask}


def run(objective, spec, leaves, data, rows, totals) -> tuple[Tensor, dict[str, Tensor]]:
    """One micro-batch of `rows`, padded to its own longest row."""
    index = torch.tensor(list(rows), dtype=torch.int64)
    width = int(LENGTHS[index].max()) if len(index) else 0
    part = {name: x[index, :width] for name, x in data.items() if name not in leaves}
    part["values"] = part.pop("old_values")
    return objective(spec, {n: x[index, :width] for n, x in leaves.items()}, part, totals)


def check_split(objective, spec, split) -> None:
    """The parts of `split` add up to the whole batch: loss, metrics and gradients, to 1e-10."""
    data = fields()
    totals = count(data["response_mask"])
    results = []
    for cut in ([range(ROWS)], split):
        leaves = {name: data[name].clone().requires_grad_() for name in spec.outputs()}
        parts = [run(objective, spec, leaves, data, rows, totals) for rows in cut]
        for loss, _ in parts:
            loss.backward()
        total = sum(loss.detach() for loss, _ in parts)
        gradients = {f"d {name}": leaf.grad for name, leaf in leaves.items()}
        results.append({"loss": total, **combine([m for _, m in parts]), **gradients})
    whole, summed = results
    assert whole.keys() == summed.keys()
    for name, expected in whole.items():
        torch.testing.assert_close(summed[name], expected, rtol=1e-10, atol=1e-12, msg=name)
    assert all(whole[f"d {name}"].any() for name in spec.outputs())


@every_loss_and_mode
@pytest.mark.parametrize("split", SPLITS)
def test_the_parts_add_up_to_the_whole(name, mode, split):
    spec = spec_of(name, mode)
    check_split(OBJECTIVE[type(spec)], spec, SPLITS[split])


@every_loss_and_mode
@settings(deadline=None, max_examples=3, derandomize=True)
@given(parts=st.lists(st.integers(0, 4), min_size=ROWS, max_size=ROWS))
def test_any_cut_adds_up_to_the_whole(name, mode, parts):
    split = [[row for row in range(ROWS) if parts[row] == part] for part in range(5)]
    spec = spec_of(name, mode)
    check_split(OBJECTIVE[type(spec)], spec, split)


@every_loss_and_mode
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_averaging_over_ranks_is_undone_by_their_number(name, mode, ranks, micro):
    """What a data-parallel backend does: mean over ranks of gradients of D times the loss.

    Of 16 parts nine have no row, and with 4 ranks two of them have none at all.
    """
    spec, data = spec_of(name, mode), fields()
    objective, totals = OBJECTIVE[type(spec)], count(data["response_mask"])
    whole = {n: data[n].clone().requires_grad_() for n in spec.outputs()}
    run(objective, spec, whole, data, range(ROWS), totals)[0].backward()
    averaged = {n: torch.zeros_like(data[n]) for n in spec.outputs()}
    for rank in range(ranks):
        leaves = {n: data[n].clone().requires_grad_() for n in spec.outputs()}
        for part in range(micro):
            rows = range(rank * micro + part, ROWS, ranks * micro)
            (ranks * run(objective, spec, leaves, data, rows, totals)[0]).backward()
        for n, leaf in leaves.items():
            averaged[n] += leaf.grad / ranks
    for n, leaf in whole.items():
        torch.testing.assert_close(averaged[n], leaf.grad, rtol=1e-10, atol=1e-12)


@every_loss_and_mode
def test_padding_and_empty_rows_change_nothing_at_fixed_totals(name, mode):
    spec, data = spec_of(name, mode), fields()
    objective, totals = OBJECTIVE[type(spec)], Totals(tokens=19, rows=12)

    def pad(x: Tensor) -> Tensor:
        fill = False if x.dtype is torch.bool else float("nan")
        return torch.nn.functional.pad(x, (3, 2, 1, 2), value=fill)

    outcome = []
    for wide in (False, True):
        leaves = {n: data[n].clone().requires_grad_() for n in spec.outputs()}
        batch = {n: x for n, x in data.items() if n not in leaves}
        batch["values"] = batch.pop("old_values")
        if wide:
            batch = {n: pad(x) for n, x in batch.items()}
        outputs = {n: pad(x) if wide else x for n, x in leaves.items()}
        loss, metrics = objective(spec, outputs, batch, totals)
        loss.backward()
        outcome.append([loss.detach(), *metrics.values(), *(x.grad for x in leaves.values())])
    for narrow, padded in zip(*outcome, strict=True):
        torch.testing.assert_close(padded, narrow, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("name", "mode"), [pair for pair in PAIRS if pair[1] != "token-sum"])
def test_a_local_normaliser_is_caught(name, mode):
    """The classic bug: every part divides by its own count, and the parts are averaged."""
    spec = spec_of(name, mode)
    right = OBJECTIVE[type(spec)]

    def local(spec, outputs, batch, totals):
        parts = 1 if len(batch["response_mask"]) == ROWS else 3
        loss, metrics = right(spec, outputs, batch, count(batch["response_mask"]))
        return loss / parts, metrics

    with pytest.raises(AssertionError):
        check_split(local, spec, SPLITS["unequal"])


@pytest.mark.parametrize("name", LOSSES)
def test_counting_only_the_rows_with_tokens_is_caught(name):
    """B of the non-empty rows differs from part to part with where the empty row lands."""
    spec = spec_of(name, "seq-mean-token-mean")
    right = OBJECTIVE[type(spec)]

    def local_rows(spec, outputs, batch, totals):
        filled = float(batch["response_mask"].any(-1).sum())
        share = filled / 6 if filled else 1.0
        return right(spec, outputs, batch, Totals(tokens=totals.tokens, rows=filled * share))

    with pytest.raises(AssertionError):
        check_split(local_rows, spec, SPLITS["unequal"])


@pytest.mark.parametrize("name", LOSSES)
def test_a_metric_averaged_over_parts_is_caught(name):
    spec = spec_of(name, "token-mean")
    right = OBJECTIVE[type(spec)]

    def local_metrics(spec, outputs, batch, totals):
        loss, _ = right(spec, outputs, batch, totals)
        _, metrics = right(spec, outputs, batch, count(batch["response_mask"]))
        parts = 1 if len(batch["response_mask"]) == ROWS else 3
        return loss, {n: v if n.endswith("_max") else v / parts for n, v in metrics.items()}

    with pytest.raises(AssertionError):
        check_split(local_metrics, spec, SPLITS["unequal"])
