"""An optimizer's state on the host: steps are those of a resident one to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlflow.engines.hf import host_states
from rlflow.engines.hf.host_states import HostStates, pieces_of
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


def engine(dtype: torch.dtype, *, visiting: bool) -> TrainEngine:
    model = load_model(str(TINY), dtype=dtype, device="cpu")
    return TrainEngine(model, Spec(), micro_tokens=20, visiting=visiting)


def state(of: TrainEngine) -> dict[str, torch.Tensor]:
    assert of.optimizer is not None
    return {**of.model.named_tensors(), **of.optimizer.tensors()}


def same(one: TrainEngine, other: TrainEngine) -> bool:
    first, second = state(one), state(other)
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_a_resident_state(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a sleep, and where a state goes on that was of the other kind."""
    monkeypatch.setattr(host_states, "PIECE_NUMBERS", FEW)
    resident, visiting = engine(dtype, visiting=False), engine(dtype, visiting=True)
    for _ in range(3):
        assert one_step(resident, rows()) == one_step(visiting, rows())
    assert same(resident, visiting)
    visiting.sleep_optimizer()
    visiting.wake_optimizer()
    held = {name: tensor.clone() for name, tensor in state(resident).items()}
    for name, tensor in state(visiting).items():
        tensor.copy_(held[name])
    assert one_step(resident, rows()) == one_step(visiting, rows())
    assert same(resident, visiting)


def test_pieces_come_as_they_are_and_leave_as_they_were_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_states, "PIECE_NUMBERS", 4)
    held = HostStates(("moment",), 10, torch.float32, torch.device("cpu"))
    held.buffers["moment"].copy_(torch.arange(10.0))
    seen: list[Any] = []
    for (start, stop), found in held.visits(pieces_of(0, 10)):
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
        held = HostStates((), 0, torch.float32, torch.device("meta"))
        held.buffers = {
            "one": torch.zeros(()).expand(count),
            "other": torch.zeros(()).expand(count),
        }
        with NoData() as live:
            for _ in held.visits(pieces_of(0, count)):
                pass
        assert 0 <= live.most - visiting_bytes(count, 8) < 6 * BLOCK
    assert visiting_bytes(100 * PIECE_NUMBERS, 8) == 3 * PIECE_NUMBERS * 8


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 2, 2)], ids=["fsdp", "both"])
def test_shards_of_a_visiting_state_are_stepped_alike(shape: Any, world: Any) -> None:
    ranks = world(shape[0] * shape[1] * shape[2])
    assert all(ranks.run(states.visiting_state_steps_alike, str(TINY), shape, FEW))
