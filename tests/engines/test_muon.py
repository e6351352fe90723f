"""Muon: orthogonal updates of the matrices of layers, whole and over ranks; AdamW beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.engines.hf import host_states
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.optim import muon
from rlflow.engines.hf.optim.newton_schulz import orthogonal
from rlflow.engines.hf.train import TrainEngine
from rlflow.errors import UsageError
from rlflow.modelfiles.orthogonal import (
    COEFFICIENTS,
    STEPS,
    is_layer_matrix,
    orthogonal_bytes,
    orthogonal_flops,
)
from rlflow.runtime.rehearse.device import NoData
from rlflow.runtime.rehearse.live import BLOCK
from tests.conftest import TINY
from tests.engines import sharded_checks as checks
from tests.engines.examples import Spec, one_step, rows

pytestmark = pytest.mark.torch

MUON = Spec(lr=1e-2, momentum=0.9, weight_decay=0.1)


def engine(dtype: torch.dtype = torch.float32, *, visiting: bool = False) -> TrainEngine:
    model = load_model(str(TINY), dtype=dtype, device="cpu")
    return TrainEngine(model, MUON, micro_tokens=20, visiting=visiting)


def draw(of: TrainEngine, drawn: torch.Generator) -> None:
    """Gradients that nothing computed."""
    assert of.optimizer is not None
    of.optimizer.zero_grad()
    for total in of.optimizer.sums.values():
        total.copy_(torch.randn(len(total), generator=drawn) / 10)


@pytest.mark.parametrize("shape", [(24, 70), (70, 24), (40, 40)], ids=["wide", "tall", "square"])
def test_singular_values_go_through_the_quintic_and_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        values = a * values + b * values**3 + c * values**5

    found = orthogonal(matrix)

    assert torch.allclose(left @ torch.diag(values) @ right, found, atol=1e-12)
    assert 0.3 < float(values.min())
    assert float(values.max()) < 1.2
    assert torch.equal(orthogonal(torch.zeros(shape)), torch.zeros(shape))
    assert torch.allclose(orthogonal(1000 * matrix), found, atol=1e-12)


def test_what_it_takes_is_what_is_counted() -> None:
    """On a device without data, as bfloat16; the products by their shapes."""
    from torch.utils.flop_counter import FlopCounterMode

    for shape in ((512, 2048), (2048, 512), (1024, 1024)):
        matrix = torch.empty(shape, device="meta")
        with NoData() as live:
            orthogonal(matrix)
        counted = matrix.nbytes + orthogonal_bytes([shape], 2, gathered=False)
        assert abs(live.most - counted) < 8 * BLOCK
        with FlopCounterMode(display=False) as flops:
            orthogonal(torch.zeros(shape))
        assert flops.get_total_flops() == orthogonal_flops(*shape)


@pytest.mark.slow
def test_steps_are_those_of_torchs_own_muon_and_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which computes in bfloat16 everywhere, so this does too; the rest is AdamW's to the bit."""
    ours = engine()
    assert ours.optimizer is not None
    monkeypatch.setattr(muon, "orthogonal", lambda m: orthogonal(m, torch.bfloat16))
    theirs = {n: torch.nn.Parameter(t.clone()) for n, t in ours.model.named_tensors().items()}
    matrices = [n for n, p in theirs.items() if p.ndim == 2 and ".layers." in n]
    others = [n for n, p in theirs.items() if n not in matrices]
    how: Any = {"lr": 1e-2, "weight_decay": 0.1}
    plain = [
        torch.optim.Muon(
            [theirs[n] for n in matrices], momentum=0.9, adjust_lr_fn="match_rms_adamw", **how
        ),
        torch.optim.AdamW(
            [{"params": [theirs[n] for n in others if theirs[n].ndim >= 2]},
             {"params": [theirs[n] for n in others if theirs[n].ndim < 2], "weight_decay": 0.0}],
            betas=MUON.betas, fused=True, **how,
        ),
    ]  # fmt: skip
    drawn = torch.Generator().manual_seed(3)
    for _ in range(3):
        draw(ours, drawn)
        for name, parameter in theirs.items():
            parameter.grad = ours.optimizer.flat.parameters[name].grad.clone() * 0.5
        ours.optimizer.step(0.5)
        for each in plain:
            each.step()

    found = ours.model.named_tensors()
    assert matrices
    assert all(torch.equal(theirs[n], found[n]) for n in others)
    for name in matrices:
        assert torch.allclose(theirs[name], found[name], rtol=0, atol=2e-5), name


def test_updates_are_as_large_as_adamws() -> None:
    """Their root mean square is about 0.2 of the rate, for matrices of any shape."""
    ours = engine()
    assert ours.optimizer is not None
    before = {name: tensor.clone() for name, tensor in ours.model.named_tensors().items()}
    draw(ours, torch.Generator().manual_seed(3))
    ours.optimizer.step(1.0)
    for group in ours.optimizer.groups:
        for name in group.shapes if group.matrices else ():
            moved = ours.model.named_tensors()[name] - before[name] * (1 - 1e-2 * 0.1)
            assert float(moved.square().mean().sqrt()) == pytest.approx(0.2 * 1e-2, rel=0.2)


def test_only_matrices_of_layers_have_one_moment() -> None:
    kinds = {kind: set(tensors) for kind, tensors in engine().optimizer.by_kind().items()}
    assert kinds["momentum"].isdisjoint(kinds["exp_avg"])
    assert kinds["exp_avg"] == kinds["exp_avg_sq"]
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= kinds["exp_avg"]
    assert "model.layers.0.self_attn.q_proj.bias" in kinds["exp_avg"]
    assert "model.layers.1.mlp.down_proj.weight" in kinds["momentum"]
    assert not is_layer_matrix("value_head.weight", (1, 64))
    with pytest.raises(UsageError) as refused:
        muon.refuse_stacks("m", {"model.layers.0.mlp.experts.down_proj": (8, 64, 32)})
    assert refused.value.findings[0].code == "E527"


@pytest.mark.rows(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_a_resident_state(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With states on the host, and after a sleep, to the bit."""
    monkeypatch.setattr(host_states, "PIECE_NUMBERS", 1 << 12)
    resident, visiting = engine(dtype), engine(dtype, visiting=True)
    for number in range(3):
        assert one_step(resident, rows()) == one_step(visiting, rows())
        if number == 1:
            resident.sleep_optimizer()
            assert (
                resident.optimizer.saved_moments().keys()
                == visiting.optimizer.saved_moments().keys()
            )
            resident.wake_optimizer()
    assert same(held(resident), held(visiting))
    assert not visiting.optimizer.state_buffers()
    if dtype == torch.bfloat16:
        masters = visiting.optimizer.saved_masters()
        weights = visiting.model.named_tensors()
        assert all(torch.equal(s.tensor.bfloat16(), weights[n]) for n, s in masters.items())
        assert len(masters) == len(weights)


def held(of: TrainEngine) -> dict[str, Tensor]:
    assert of.optimizer is not None
    return {**of.model.named_tensors(), **of.optimizer.tensors()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


SHAPES = {
    "fsdp": (1, 2, 1),
    "tp": (1, 1, 2),
    "both": pytest.param((1, 2, 2), marks=pytest.mark.slow),
    "three": pytest.param((1, 3, 1), marks=pytest.mark.slow),
    "replicas": pytest.param((2, 1, 1), marks=[pytest.mark.slow, pytest.mark.extra]),
    "all": pytest.param((2, 1, 2), marks=[pytest.mark.slow, pytest.mark.extra]),
}


@pytest.mark.rows(1)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_ranks_step_as_one_does(shape: Any, world: Any, model_dir: Any) -> None:
    """Every matrix whole on one of them, of both ways of cutting; shares may be uneven."""
    ranks = world(shape[0] * shape[1] * shape[2])
    assert all(ranks.run(checks.with_options, model_dir("qwen2"), shape, {"spec": MUON}))
