"""Plans of models whose moments are in 8 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

import rlflow as rf
from rlflow.modelfiles.coded import CODING_BYTES
from rlflow.modelfiles.visits import PIECE_NUMBERS
from rlflow.scheduler.costs.state import coded_numbers
from rlflow.scheduler.models.shapes import known_shape
from rlflow.scheduler.verify.verify import verify
from tests.scheduler.test_muon_plans import ADAM, MATRICES, moments, planned

CODED = rf.AdamW(lr=1e-6, moments="int8")
# Of Qwen2.5-7B also the embedding and the head.
NUMBERS = MATRICES + 2 * 152_064 * 3584


def test_what_is_coded_of_a_model() -> None:
    """Rows of 18944 that 8 ranks cut are of 2368 numbers, 37 blocks of 64."""
    shape = known_shape("qwen2.5-7b")
    assert coded_numbers(shape, 1) == (NUMBERS, NUMBERS // 256)
    down = 28 * 3584 * 18944
    queries = 2 * 28 * 3584 * 3584  # Of 448 numbers on each rank, 7 blocks of 64; both count.
    more = (down + queries) * 3 // 256
    assert coded_numbers(shape, 8) == (NUMBERS, NUMBERS // 256 + more)


@pytest.mark.parametrize("on", [{"fsdp": 4}, {"fsdp": 4, "offload": "optimizer"}])
def test_moments_take_a_quarter_and_their_scales(on: dict[str, object]) -> None:
    one, other = (moments(planned(optimizer, **on)) for optimizer in (ADAM, CODED))
    place = 1 if "offload" in on else 0
    saved = (one[place] or 0) - (other[place] or 0)
    assert saved == 6 * NUMBERS // 4 - 8 * (NUMBERS // 256) // 4
    assert one[1 - place] == other[1 - place] == 0
    assert (other[place] or 0) < 0.27 * (one[place] or 0)


def test_coding_takes_time_and_a_piece() -> None:
    one, other = (planned(optimizer, fsdp=4).action("actor.update") for optimizer in (ADAM, CODED))
    more = (other.cost.seconds or 0) - (one.cost.seconds or 0)
    assert 0.01 < more < 0.2
    assert (other.cost.transient or 0) >= PIECE_NUMBERS * CODING_BYTES
    saved = [planned(optimizer, fsdp=4).saved[0].size for optimizer in (ADAM, CODED)]
    assert saved[0] - saved[1] == 6 * NUMBERS // 4 - 8 * (NUMBERS // 256) // 4


def test_the_verifier_knows_how_much_may_be_missing() -> None:
    plan = planned(CODED, fsdp=4)
    assert not verify(plan, "notes")
    name = plan.trained_instance("actor").optimizer
    size = plan.part(name).size or 0
    for wrong in (4 * size, size - 1, size // 2):
        parts = tuple(replace(p, size=wrong) if p.name == name else p for p in plan.parts)
        saved = tuple(replace(s, size=s.size - size + wrong) for s in plan.saved)
        changed = replace(plan, parts=parts, saved=saved)
        assert any(name in found for found in verify(changed, "notes"))


def test_adapters_are_refused() -> None:
    assert "moments=int8" in CODED.describe()
    with pytest.raises(ValidationError, match=r"too short.*leave out moments"):
        rf.Model("actor", "x", optimizer=CODED, lora=rf.LoRA())
