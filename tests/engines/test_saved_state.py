"""What of a worker a checkpoint holds: each trained number once; and forms of before are read."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from rlflow.engines.hf.optim.adamw import AdamWState
from rlflow.runtime.record.checkpoint import find_checkpoint, save_checkpoint
from rlflow.runtime.record.durable import exact_json, exact_value
from rlflow.runtime.record.manifest import MANIFEST
from rlflow.runtime.record.resuming import FRESH
from rlflow.runtime.record.shards.places import StoredFile, assign_writers
from rlflow.runtime.worker.saving import restore_components
from tests.engines.examples import one_step, rows
from tests.engines.sharded_states import held_by
from tests.engines.test_weights import engine

pytestmark = pytest.mark.torch


def everything(trained):
    return {**trained.model.named_tensors(), **trained.optimizer.tensors()}


def stepped(path, steps=2):
    trained, batch = engine(path, dtype=torch.bfloat16, lr=1e-4), rows()
    for _ in range(steps):
        one_step(trained, batch)
    return trained


def same(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def test_of_bfloat16_weights_the_float32_copies_are_stored_and_nothing_twice(model_dir):
    trained = stepped(model_dir("qwen2"))
    loaded, _ = held_by(trained)

    found = loaded.saved()

    assert trained.model.trained_names() == found["actor"].keys()
    count = sum(tensor.numel() for tensor in trained.model.named_tensors().values())
    held = [shard.tensor for part in found.values() for shard in part.values()]
    assert {torch.float32} == {tensor.dtype for tensor in held}
    assert 3 * count == sum(tensor.numel() for tensor in held)


def test_a_state_that_steps_on_the_host_is_copied_and_comes_back_resident(model_dir, tmp_path):
    """It is in host memory, and changed there by every step: it does not rest, asleep or not."""
    path, batch = model_dir("qwen2"), rows()
    kept = []
    for visiting in (False, True):
        trained = engine(path, dtype=torch.bfloat16, lr=1e-4)
        trained.optimizer = AdamWState(trained.model, trained.optimizer.spec, visiting=visiting)
        for _ in range(2):
            one_step(trained, batch)
        loaded, saver = held_by(trained)
        loaded.sleep("optimizer", "offload")
        assert visiting != bool(loaded.resting())
        saver.take(assign_writers({0: saver.held()})[0])
        loaded.wake("optimizer")
        one_step(trained, batch)
        where = tmp_path / str(visiting)
        where.mkdir()
        kept.append(saver.write(where))
    assert kept[0] == kept[1]


def test_a_checkpoint_of_the_form_before_is_read(model_dir, tmp_path):
    """A file a component in bfloat16, and float32 copies beside the moments."""
    path = model_dir("qwen2")
    trained = stepped(path)
    before = {
        "actor": trained.model.named_tensors(),
        "actor.optimizer": trained.optimizer.tensors(),
    }
    assert any(name.startswith("master.") for name in before["actor.optimizer"])
    made = save_checkpoint(tmp_path, 2, before, {}, {})
    rewrite_as_first_form(made)
    files = find_checkpoint(tmp_path).files

    for meta in ({"steps": 2}, {"steps": 0, FRESH: 1}):
        other = engine(path, dtype=torch.bfloat16, lr=1e-4)
        restore_components(held_by(other)[0], files, meta, 2)
        found = everything(other)
        if FRESH not in meta:
            assert same(everything(trained), found)
            continue
        for name, tensor in everything(trained).items():
            fresh = name.startswith("exp_avg")
            assert torch.equal(torch.zeros_like(tensor) if fresh else tensor, found[name])


def rewrite_as_first_form(made):
    """The manifest as version 1 had it: no word of shards."""
    body = exact_value(json.loads((made / MANIFEST).read_text()))
    del body["shards"], body["seal"]
    body["format"] = 1
    seal = hashlib.sha256(exact_json(body).encode()).hexdigest()
    (made / MANIFEST).write_text(exact_json({**body, "seal": seal}))


def test_a_part_that_wakes_and_trains_while_it_is_written_is_saved_as_it_was(model_dir, tmp_path):
    path = model_dir("qwen2")
    trained = stepped(path)
    loaded, saver = held_by(trained)
    expected = {name: tensor.clone() for name, tensor in everything(trained).items()}
    loaded.sleep("optimizer", "offload")
    orders = assign_writers({0: saver.held()})[0]
    saver.take(orders)
    assert [] == saver._buffers._memory, "masters sleep too, so nothing is copied"

    loaded.wake("optimizer")
    one_step(trained, rows())
    loaded.sleep("optimizer", "offload")
    saver.write(tmp_path)

    files = {n: (StoredFile(path=tmp_path / o.file, pieces={}),) for n, o in orders.items()}
    other = engine(path, dtype=torch.bfloat16, lr=1e-4)
    restore_components(held_by(other)[0], files, {"steps": 2}, 2)
    assert same(expected, everything(other))
