"""A run that leaves the vision tower as it is: what it moves, saves and exports."""

from __future__ import annotations

import json

import pytest

from rlflow.modelfiles.pictures.towers import model_part
from tests.runtime.pipelines.frozen import SHAPES
from tests.runtime.whole_checkpoints import load_checkpoint
from tests.runtime.whole_runs import FROZEN

pytestmark = pytest.mark.torch


def test_a_frozen_tower_is_neither_moved_nor_saved_and_exported_as_it_was(rlflow, train, tmp_path):
    import torch
    from safetensors.torch import load_file

    run = train(FROZEN, "split")
    saved = load_checkpoint(run / "checkpoints").components
    start = load_file(f"{SHAPES}/model.safetensors")
    trained = {name: tensor for name, tensor in start.items() if model_part(name) != "vision"}
    assert {model_part(name) for name in saved["actor"]} == {"language", "projector"}
    assert len(saved["actor"]) == len(trained) < len(start)
    moments = sum(tensor.numel() for tensor in saved["actor.optimizer"].values())
    assert moments == 2 * sum(tensor.numel() for tensor in trained.values())

    actions = json.loads((run / "plan.json").read_text())["actions"]
    (reshard,) = (action for action in actions if action["kind"] == "reshard")
    assert reshard["cost"]["moved"] == sum(tensor.nbytes for tensor in saved["actor"].values())

    assert 0 == rlflow("export", run, "-o", tmp_path / "model").code
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert start.keys() == found.keys()
    changed = {model_part(name) for name in start if not torch.equal(start[name], found[name])}
    assert changed == {"language", "projector"}
