"""AdamW with moments in 8 bits: what coding loses, and what steps make of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.optim.coded import Recoded, code_values, coded, decoded
from rlflow.engines.hf.train import TrainEngine
from rlflow.modelfiles.coded import BLOCK, block_of
from tests.conftest import TINY
from tests.engines import sharded_checks as checks
from tests.engines.examples import Spec, one_step, rows

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
# Half of the widest gap between neighbouring values: of the top decade.
WIDEST = {True: 0.9 / 64 / 2, False: 0.9 / 128 / 2}


def drawn(count: int, *, signed: bool) -> Tensor:
    """Numbers over ten decades."""
    source = torch.Generator().manual_seed(5)
    decades = 4 * torch.rand(count, generator=source) - 5
    made = torch.randn(count, generator=source) * 10**decades
    return made if signed else made.square()


@pytest.mark.parametrize("signed", [True, False])
def test_a_number_is_coded_to_the_nearest_value(signed: bool) -> None:
    values = code_values(signed=signed, device=CPU)
    assert len(set(values.tolist())) == 256
    assert (float(values[0]) < -0.99) is signed
    assert float(values[-1]) == 1.0
    assert 0.0 in values
    numbers = drawn(64 * BLOCK, signed=signed)
    codes, scales = coded(numbers, BLOCK, signed=signed)
    assert torch.equal(scales, numbers.view(-1, BLOCK).abs().amax(1))
    nearest = (numbers.view(-1, BLOCK, 1) / scales[:, None, None] - values).abs().amin(-1)
    found = decoded(codes, scales, BLOCK, signed=signed)
    error = (found - numbers).abs().view(-1, BLOCK) / scales[:, None]
    small = 1e-7 if signed else 3.3e-7
    assert float((error - nearest).max()) < small, "what is above 0 stays above 0"
    assert float(error.max()) <= WIDEST[signed] * 1.001
    large = numbers.view(-1, BLOCK).abs() > 0.01 * scales[:, None]
    relative = (error * scales[:, None] / numbers.view(-1, BLOCK).abs())[large]
    assert float(relative.max()) < 0.15
    again = coded(numbers, BLOCK, signed=signed)
    assert torch.equal(codes, again[0])


def test_zeros_stay_and_second_moments_above_zero_do_not_become_it() -> None:
    """A step divides by their root: one that had become 0 would throw its weight away."""
    numbers = torch.zeros(BLOCK)
    for signed in (True, False):
        assert not decoded(*coded(numbers, BLOCK, signed=signed), BLOCK, signed=signed).any()
    numbers[:2] = torch.tensor([1.0, 1e-20])
    found = decoded(*coded(numbers, BLOCK, signed=False), BLOCK, signed=False)
    assert float(found[0]) == 1.0
    assert 0 < float(found[1]) < 1e-6
    assert not found[2:].any()


@pytest.mark.parametrize(
    ("shape", "parts", "block"),
    [
        ((64, 64), 1, 64),
        ((3584, 18944), 1, 256),
        ((3584, 18944), 8, 64),
        ((64, 128), 8, 16),
        ((896, 4864), 1, 256),
        ((63, 64), 1, 0),
        ((8192,), 1, 0),
        ((4096, 7), 1, 0),
        ((256, 300), 7, 0),
    ],
)
def test_blocks_divide_the_parts_of_rows(shape: Any, parts: int, block: int) -> None:
    assert block_of(shape, parts) == block


class OnDisk:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, box: Any) -> Tensor:
        return self.tensor[box]


@pytest.mark.parametrize(("before", "now"), [(64, 16), (16, 64)])
def test_blocks_of_another_size_are_coded_anew(before: int, now: int) -> None:
    numbers = drawn(8 * 128, signed=True).view(8, 128)
    codes, scales = coded(numbers.view(-1), before, signed=True)
    pair = OnDisk(codes.view(8, 128)), OnDisk(scales.view(8, -1))
    wide = decoded(codes, scales, before, signed=True)
    expected = coded(wide, now, signed=True)
    rows = slice(2, 5)
    for number, (at_once, whole) in enumerate(((slice(0, 128), 128), (slice(64, 128), 128))):
        found = Recoded(pair, now, scales=False, signed=True)
        assert tuple(found.get_shape()) == (8, whole)
        assert torch.equal(found[rows, at_once], expected[0].view(8, 128)[rows, at_once]), number
        part = slice(at_once.start // now, at_once.stop // now)
        found = Recoded(pair, now, scales=True, signed=True)
        assert tuple(found.get_shape()) == (8, 128 // now)
        assert torch.equal(found[rows, part], expected[1].view(8, -1)[rows, part])


def engine(moments: str) -> TrainEngine:
    model = load_model(str(TINY), dtype=torch.float32, device="cpu")
    return TrainEngine(model, Spec(lr=3e-3, moments=moments, weight_decay=0.0), micro_tokens=None)


@pytest.mark.slow
def test_it_learns_as_wide_moments_do() -> None:
    losses: dict[str, list[float]] = {}
    for moments in ("float32", "int8"):
        each, batch = engine(moments), rows(n=2)
        losses[moments] = [one_step(each, batch).metrics["loss"] for _ in range(12)]
    wide, low = losses["float32"], losses["int8"]
    assert wide[0] == low[0]
    assert wide[-1] < 0.6 * wide[0]
    assert all(abs(a - b) < 0.03 * wide[0] for a, b in zip(wide, low, strict=True))
    assert wide[-1] != low[-1]


def test_matrices_are_coded_and_nothing_else() -> None:
    kinds = engine("int8").optimizer.by_kind()
    coded_of = {name for name, tensor in kinds["exp_avg"].items() if tensor.dtype == torch.uint8}
    assert coded_of == set(kinds["exp_avg_scales"]) == set(kinds["exp_avg_sq_scales"])
    assert all(kinds["exp_avg"][name].numel() >= 4096 for name in coded_of)
    assert "model.layers.0.mlp.up_proj.weight" in coded_of
    for name in coded_of:
        assert kinds["exp_avg_scales"][name].numel() * 64 <= kinds["exp_avg"][name].numel()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 1, 2), (1, 2, 2)], ids=["fsdp", "tp", "both"])
def test_ranks_step_as_one_does(shape: Any, world: Any) -> None:
    """To the bit but for codes at whose border a gradient's last bit lies."""
    ranks = world(shape[0] * shape[1] * shape[2])
    options = {"spec": Spec(moments="int8"), "limit": 1e-8}
    assert all(ranks.run(checks.with_short_blocks, str(TINY), shape, options))
