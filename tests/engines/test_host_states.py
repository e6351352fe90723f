"""An optimizer's state on the host: steps are those of a resident one to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlflow.engines.hf import host_states
from rlflow.engines.hf.host_states import KeptStates, pieces_of, rounded
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.train import TrainEngine
from rlflow.modelfiles.visits import PIECE_NUMBERS, visiting_bytes
from rlflow.runtime.rehearse.device import NoData
from rlflow.runtime.rehearse.live import BLOCK
from tests.conftest import TINY
from tests.engines import sharded_states as states
from tests.engines.examples import Spec, one_step, rows

pytestmark = pytest.mark.torch

# Numbers of a piece, so few that a tiny model takes many of them.
FEW = 1 << 12


def engine(dtype: torch.dtype, *, visiting: bool, moments: str = "float32") -> TrainEngine:
    model = load_model(str(TINY), dtype=dtype, device="cpu")
    return TrainEngine(model, Spec(moments=moments), micro_tokens=20, visiting=visiting)


def state(of: TrainEngine) -> dict[str, torch.Tensor]:
    assert of.optimizer is not None
    return {**of.model.named_tensors(), **of.optimizer.tensors()}


def same(one: TrainEngine, other: TrainEngine) -> bool:
    first, second = state(one), state(other)
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.rows(2)
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_a_resident_state(
    dtype: torch.dtype, moments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a sleep, and where a state goes on that was of the other kind."""
    monkeypatch.setattr(host_states, "PIECE_NUMBERS", FEW)
    resident, visiting = (engine(dtype, visiting=where, moments=moments) for where in (False, True))
    for _ in range(3):
        assert one_step(resident, rows()) == one_step(visiting, rows())
    assert same(resident, visiting)
    for each in (resident, visiting):
        each.sleep_optimizer()
        each.wake_optimizer()
    held = {name: tensor.clone() for name, tensor in state(resident).items()}
    for name, tensor in state(visiting).items():
        tensor.copy_(held[name])
    assert one_step(resident, rows()) == one_step(visiting, rows())
    assert same(resident, visiting)


def test_pieces_come_as_they_are_and_leave_as_they_were_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_states, "PIECE_NUMBERS", 4)
    held = KeptStates({"moment": torch.float32}, 10, torch.device("cpu"))
    held.buffers["moment"].copy_(torch.arange(10.0))
    seen: list[Any] = []
    for (start, stop), found in held.visits(pieces_of(0, 10), torch.float32):
        seen.append((start, stop))
        assert torch.equal(found["moment"], torch.arange(float(start), float(stop)))
        found["moment"].add_(100)
    assert seen == [(0, 4), (4, 8), (8, 10)]
    assert torch.equal(held.buffers["moment"], torch.arange(10.0) + 100)


def test_what_visits_is_counted_by_the_same_rule() -> None:
    """The plan's figure is what the slots take, for states smaller and larger than all slots.

    `meta` stands for the device.
    """
    for count in (1000, PIECE_NUMBERS, 2 * PIECE_NUMBERS, 100 * PIECE_NUMBERS):
        held = KeptStates({}, 0, torch.device("meta"))
        held.buffers = {
            "one": torch.zeros(()).expand(count),
            "other": torch.zeros(()).expand(count),
        }
        with NoData() as live:
            for _ in held.visits(pieces_of(0, count), torch.float32):
                pass
        assert 0 <= live.most - visiting_bytes(count, 8) < 6 * BLOCK
    assert visiting_bytes(100 * PIECE_NUMBERS, 8) == 3 * PIECE_NUMBERS * 8


def test_low_moments_take_half_and_step_nearly_alike() -> None:
    """Their weights move as those of wide moments do, to what bfloat16 tells apart."""
    wide, low = (engine(torch.float32, visiting=False, moments=m) for m in ("float32", "bfloat16"))
    assert wide.optimizer is not None
    assert low.optimizer is not None
    sizes = [sum(b.nbytes for b in e.optimizer.state_buffers()) for e in (wide, low)]
    assert sizes[0] == 2 * sizes[1]
    before = {name: tensor.clone() for name, tensor in wide.model.named_tensors().items()}
    for _ in range(3):
        one_step(wide, rows())
        one_step(low, rows())
    moved, apart = 0.0, 0.0
    for name, tensor in wide.model.named_tensors().items():
        moved += float((tensor - before[name]).square().sum())
        apart += float((tensor - low.model.named_tensors()[name]).square().sum())
    assert 0 < apart < 0.02**2 * moved


def test_rounding_is_to_a_neighbour_and_in_expectation_exact() -> None:
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(rounded(exact.float(), 3), exact)
    drawn = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    found = rounded(drawn, 7)
    assert torch.equal(found, rounded(drawn, 7))
    assert not torch.equal(found, rounded(drawn, 8))
    error = (found.float() - drawn) / drawn.abs()
    assert float(error.abs().max()) <= 2**-7
    assert abs(float(error.mean())) < 4 * float(error.std()) / 256
    one = torch.tensor([1 + 2**-9, -3.3, 1e-12])
    over = torch.stack([rounded(one, turn).float() for turn in range(4000)])
    assert torch.allclose(over.mean(0) / one, torch.ones(3), atol=4 * 2**-8 / 4000**0.5)


def test_a_second_moment_without_gradients_falls() -> None:
    """By a thousandth a turn, which is less than bfloat16 tells apart."""
    moment = torch.ones(4096, dtype=torch.bfloat16) * torch.linspace(1, 2, 4096).bfloat16()
    before = moment.float()
    for turn in range(300):
        assert torch.equal((moment.float() * 0.999).bfloat16(), moment)
        moment = rounded(moment.float() * 0.999, turn)
    assert float((moment.float() / before).mean()) == pytest.approx(0.999**300, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 2, 2)], ids=["fsdp", "both"])
def test_shards_of_a_visiting_state_are_stepped_alike(shape: Any, world: Any) -> None:
    ranks = world(shape[0] * shape[1] * shape[2])
    for spec in (Spec(), Spec(moments="bfloat16"), Spec(moments="int8"), Spec(momentum=0.9)):
        assert all(ranks.run(states.visiting_state_steps_alike, str(TINY), shape, FEW, spec))
