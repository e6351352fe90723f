"""Micro-batches that are packed one ahead, by a thread beside the one that computes."""

from __future__ import annotations

import threading

import pytest
import torch

from rlflow.batch import flat, ragged_rows
from rlflow.engines.hf.forward import ahead
from rlflow.engines.hf.forward.ahead import PackingAhead, tensors_within
from rlflow.engines.hf.generate.waits import HostWaits
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.train import TrainEngine
from rlflow.errors import RunError
from tests.engines.examples import Spec, rows
from tests.engines.test_device_waits import on_meta

pytestmark = pytest.mark.torch


def engine(path, **more):
    model = load_model(path, dtype=torch.float32, device="cpu")
    return TrainEngine(model, Spec(lr=1e-2), micro_tokens=24, **more)


def weighted(outputs, micro):
    weight = torch.sin(flat(micro["response_tokens"]).float())
    return (outputs["log_probs"] * weight).sum() / 50, {"rows": torch.tensor(float(len(micro)))}


def stepped(path, **more):
    trained = engine(path, **more)
    batch = rows(n=4)
    for _ in range(3):
        done = trained.step(
            batch, weighted, outputs=("log_probs",), temperature=0.9, max_grad_norm=1.0
        )
    scores = trained.forward(batch, outputs=("log_probs", "entropy"), temperature=0.9)
    return trained.model.named_tensors(), done, scores


@pytest.fixture
def packers(monkeypatch):
    """The threads that have packed, in their order, and a lock that says when one has."""
    seen, changed, real = [], threading.Condition(), ahead.pack

    def noted(*args, **more):
        with changed:
            seen.append(threading.current_thread().name)
            changed.notify_all()
        return real(*args, **more)

    monkeypatch.setattr(ahead, "pack", noted)
    return seen, changed


def test_steps_and_forwards_are_the_same_to_the_bit(model_dir):
    first, second = (stepped(model_dir("qwen2"), ahead=value) for value in (False, True))
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])
    assert first[1] == second[1]
    assert all(torch.equal(first[2][name], second[2][name]) for name in first[2])


def test_the_next_is_packed_while_the_present_one_computes(model_dir, packers):
    """The loss of the first micro-batch waits for the second to be packed, and no further."""
    seen, changed = packers
    trained = engine(model_dir("qwen2"), ahead=True)
    counts = []

    def loss(outputs, micro):
        with changed:
            assert changed.wait_for(lambda: len(seen) > min(len(counts) + 1, cuts - 1), timeout=20)
            counts.append(len(seen))
        return weighted(outputs, micro)

    batch = rows(n=4)
    cuts = len(list(trained.micro_batches(batch)))
    assert cuts > 2
    trained.step(batch, loss, outputs=("log_probs",), temperature=1.0, max_grad_norm=None)
    assert [min(number + 2, cuts) for number in range(cuts)] == counts
    assert all(name.startswith("packing") for name in seen)


def test_a_cpu_packs_when_it_is_asked(model_dir, packers):
    seen, _ = packers
    trained = engine(model_dir("qwen2"))
    trained.forward(rows(n=4), outputs=("log_probs",), temperature=1.0)
    assert {threading.current_thread().name} == set(seen)


def test_what_cannot_be_packed_is_said_where_it_is_due(model_dir):
    trained = engine(model_dir("qwen2"), ahead=True)
    batch = rows(n=4)
    batch["prompt_tokens"] = ragged_rows([[1, 2]] * (len(batch) - 1) + [[]], torch.int64)
    with pytest.raises(RunError, match="has no tokens"):
        trained.forward(batch, outputs=("log_probs",), temperature=1.0)
    threads = [t for t in threading.enumerate() if t.name.startswith("packing")]
    assert not any(thread.is_alive() for thread in threads)


def test_the_computing_thread_waits_for_nothing(model_dir, monkeypatch):
    """On the meta device, as on an accelerator: no number is asked for, and no row is packed."""
    trained = on_meta(model_dir("qwen2"), True, monkeypatch)
    trained.micro_tokens, trained.packing = 24, PackingAhead(trained.model.device, beside=True)
    waited = []
    for _, micro in trained.packing.over(trained.micro_batches(rows(n=4))):
        with HostWaits() as waits:
            found = trained.compute(micro, ("log_probs", "entropy"), 1.0)
            found["log_probs"].sum().backward()
        assert "meta" == found["entropy"].device.type
        waited.append(waits.count)
    assert len(waited) > 2
    assert {0} == set(waited)


def test_all_tensors_of_packed_rows_are_known(model_dir):
    trained = engine(model_dir("mistral"), ahead=True)
    batch = rows(n=2)
    packed = trained.packing.rows(batch)
    found = {id(tensor) for tensor in tensors_within(packed)}
    layout = packed.layout
    assert {id(layout.tokens), id(layout.positions), id(layout.targets)} <= found
    assert {id(block.mask) for block in layout.blocks} <= found
    assert id(packed.responses) in found
