"""Rehearsals of models that see: pictures as large as a plan counts with pass their towers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlflow.cli.commands import Target
from rlflow.cli.rehearsal.command import rehearse_target, require_agreement
from rlflow.modelfiles.pictures.sights import Sight
from rlflow.runtime.rehearse.device import NoData, without_data
from rlflow.runtime.rehearse.pictures import PicturesAtLongest
from tests.runtime.seeing_sizes import PUBLISHED, write_published

pytestmark = pytest.mark.torch

PIPELINES = Path(__file__).resolve().parents[2] / "pipelines"
GRPO = """
import rlflow as rf
from rlflow import ops


def length(response: str) -> float:
    return float(len(response))


WHERE = rf.Placement(pools={{"all": {devices}}}, assign={{"*": rf.on("all", {on})}})


@rf.pipeline(placements={{"all": WHERE}})
def grpo(cfg: rf.Config):
    actor = rf.Model("actor", "{path}", dtype="bfloat16", init="random", {model})
    data = rf.data.huggingface("any/pictures", columns=["prompt"], images="image")
    samples = ops.rollout(actor, ops.prompts(data, batch={rows}), n=4, max_new_tokens={tokens})
    advantage = ops.advantage("grpo", samples, ops.reward(length, samples))
    ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))
"""
ADAM = "optimizer=rf.AdamW(lr=1e-6)"
WHOLE_ONCE = "reshard_after_forward=True"


def test_small_values_are_known_where_they_follow_from_the_host() -> None:
    """Sizes, masks and bounds of pictures; what is computed of weights stays without values."""
    with NoData() as live, without_data(live, 1):
        grid = torch.tensor([[1, 4, 6], [1, 2, 2]], device="meta")
        bounds = torch.nn.functional.pad((grid[:, 1] * grid[:, 2]).cumsum(0), (1, 0))
        assert bounds.device.type == "meta"
        assert bounds.tolist() == [0, 24, 28]
        assert torch.repeat_interleave(grid[:, 0], grid[:, 2]).shape == (8,)
        mask = torch.zeros(5, dtype=torch.bool, device="meta")
        mask[torch.tensor([1, 3], device="meta")] = True
        hidden = torch.empty(5, 7, device="meta")
        assert hidden[mask].shape == (2, 7)
        mask[2:] = hidden[2:, 0] > 0
        assert mask.tolist() == [False] * 5
        assert torch.zeros(1 << 34, device="meta").sum().item() == 0


@pytest.mark.parametrize("masked", [False, True])
def test_a_tower_keeps_no_scores(masked: bool) -> None:
    """Of 2048 patches 33.6 MB a product, which kernels of CUDA devices never make."""
    with NoData() as live, without_data(live, 1):
        shape = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
        q, k, v = (torch.empty(1, 4, 2048, 72, **shape) for _ in range(3))
        mask = torch.ones(2048, 2048, dtype=torch.bool, device="meta") if masked else None
        made = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        made.sum().backward()
        assert q.grad is not None
        assert (made.shape, q.grad.shape) == (q.shape, q.shape)
        # Beside the mask as numbers, which heads share: inputs, output and gradients, filled up.
        assert live.most < 12e6 + 13e6 * masked


@pytest.mark.parametrize(
    ("sight", "count", "most", "shapes", "tokens"),
    [
        ({"sees": "grid", "side": 28, "merge": 2}, 1, 324, [[1, 36, 36]], 324),
        ({"sees": "grid", "side": 28, "merge": 2}, 2, 40, [[1, 8, 10]] * 2, 40),
        # A row of 18 tokens has one more at its end.
        ({"sees": "rows", "side": 28}, 1, 342, [[1, 504, 504]], 324),
        ({"sees": "soft", "side": 896, "each": 256}, 2, 512, [[1, 896, 896]] * 2, 512),
        ({"sees": "tiles", "side": 448, "each": 256}, 1, 3328, [[13, 448, 448]], 3328),
    ],
    ids=["grid", "grids", "rows", "soft", "tiles"],
)
def test_pictures_have_the_tokens_of_the_plan(sight, count, most, shapes, tokens) -> None:
    seen = PicturesAtLongest(sight=Sight(token=9, numbers=12, **sight), count=count, most=most)
    assert (shapes, tokens) == (seen.shapes.tolist(), seen.tokens)
    row = seen.standing_in(torch.full((1, most + 2), 9), prompts=True)[0]
    assert [1, tokens] == [row[1].eq(9).sum(), row.eq(9).sum()]


@pytest.mark.rows(1)
def test_a_plan_with_pictures_is_rehearsed() -> None:
    plan, (found,) = rehearse_target(
        Target(pipeline=str(PIPELINES / "vlm_grpo.py"), devices="h100:1")
    )
    update = next(action for action in found.actions if action.action == "actor.update")
    assert dict(update.planned_of)["activations of the tower"]
    assert abs(update.difference) < 0.05


ALONE = [(kind, 1, "", ADAM) for kind in PUBLISHED]
QWEN = "qwen2_5_vl"


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize(
    ("kind", "devices", "on", "model"),
    [
        *ALONE,
        (QWEN, 2, WHOLE_ONCE, ADAM),
        (QWEN, 2, "tp=2", ADAM),
        (QWEN, 2, "cp=2", ADAM),
        (QWEN, 2, WHOLE_ONCE, "optimizer=rf.Muon(lr=1e-3)"),
    ],
)
def test_plans_of_models_that_see_are_within_five_percent(
    kind: str, devices: int, on: str, model: str, tmp_path: Path
) -> None:
    path = write_published(tmp_path / kind, kind)
    file = tmp_path / "grpo.py"
    rows, tokens = (8, 1024) if devices > 1 else (2, 512)
    how = {"devices": devices, "on": on, "model": model, "rows": rows, "tokens": tokens}
    file.write_text(GRPO.format(path=path, **how))
    _, found = rehearse_target(Target(pipeline=str(file), devices=f"h200:{devices}"))
    require_agreement(found)
