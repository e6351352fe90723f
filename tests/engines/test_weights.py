"""Shards of weights and optimizer state, gradients that come and go, float32 masters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlflow.contract.values import Shard
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.optim.adamw import AT_ONCE, AdamWState
from rlflow.errors import RunError
from tests.engines.examples import copies, engine, one_step, rows, weighted

pytestmark = pytest.mark.torch


def load(path, dtype=torch.float32):
    return load_model(path, dtype=dtype, device="cpu")


def test_shards_are_whole_views_of_the_live_weights(model_dir):
    model = load(model_dir("qwen2"))

    shards = model.shards()

    assert model.named_tensors().keys() == shards.keys() == model.trained_names()
    for name, tensor in model.named_tensors().items():
        box = tuple((0, size) for size in tensor.shape)
        found = shards[name]
        assert isinstance(found, Shard)
        assert (tuple(tensor.shape), box) == (found.shape, found.box)
        assert tensor.data_ptr() == found.tensor.data_ptr()
    assert "lm_head.weight" not in shards


def test_an_empty_model_is_filled_through_its_shards(model_dir):
    model, other = load(model_dir("qwen2")), load(model_dir("qwen2"))
    model.sleep("discard")
    with pytest.raises(RunError, match="E506"):
        model.shards()
    with pytest.raises(RunError, match="E506"):
        model.loaded(3)
    model.wake()
    with torch.no_grad():
        for name, shard in model.shards().items():
            shard.tensor.copy_(other.named_tensors()[name])
    with pytest.raises(RunError, match="E506"):
        model.named_tensors()

    model.loaded(3)

    assert 3 == model.version
    mine = model.named_tensors()
    assert all(torch.equal(t, mine[name]) for name, t in other.named_tensors().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_is_restored_through_its_shards(dtype, model_dir):
    trained, batch = engine(model_dir("qwen2"), dtype=dtype), rows()
    one_step(trained, batch)
    other = engine(model_dir("qwen2"), dtype=dtype)
    pieces = trained.optimizer.shards()
    assert pieces.keys() == trained.optimizer.tensors().keys() == other.optimizer.trained_names()

    for source, target in ((trained.optimizer, other.optimizer), (trained.model, other.model)):
        with torch.no_grad():
            for name, shard in target.shards().items():
                shard.tensor.copy_(source.shards()[name].tensor)
    other.optimizer.steps = trained.optimizer.steps
    other.model.loaded(1)

    assert one_step(trained, batch) == one_step(other, batch)
    expected, found = copies(trained), copies(other)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_released_gradients_take_no_memory_and_come_back(model_dir):
    trained, twin = (engine(model_dir("qwen2"), dtype=torch.float32) for _ in range(2))
    batch = rows()
    for one in (trained, twin):
        one_step(one, batch)

    trained.release_gradients()

    assert all(p.grad is None for p in trained.model.module.parameters())
    assert {} == trained.optimizer.grads == trained.optimizer.sums
    assert one_step(twin, batch) == one_step(trained, batch)
    expected, found = copies(twin), copies(trained)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_gradients_of_bfloat16_weights_are_summed_in_float32(model_dir):
    batch = rows()
    trained = engine(model_dir("qwen2"), 12, dtype=torch.bfloat16)
    loss_fn, expected = weighted(batch), None
    for _, micro in trained.micro_batches(batch):
        alone = engine(model_dir("qwen2"), dtype=torch.bfloat16)
        loss_fn(alone.compute(micro, ("log_probs",), 1.0), micro)[0].backward()
        grads = [parameter.grad.float() for parameter in alone.model.module.parameters()]
        for total, more in zip(expected or (), grads, strict=False):
            total.add_(more)
        expected = expected or grads
    trained.optimizer.step = lambda scale: None

    trained.step(batch, loss_fn, outputs=("log_probs",), temperature=1.0, max_grad_norm=None)

    flat = trained.optimizer.flat
    (total,) = trained.optimizer.sums.values()
    assert torch.float32 == total.dtype
    names = [name for name, _ in trained.model.module.named_parameters()]
    for name, wanted in zip(names, expected, strict=True):
        assert torch.equal(wanted, flat.view(name, total)), name


def test_adding_lower_gradients_takes_little_memory():
    """A sum in place of a lower number makes a float32 copy of it, here of 32 MB at once."""
    count = 1 << 23
    total, grads = torch.ones(count), torch.ones(count, dtype=torch.bfloat16)
    held = SimpleNamespace(sums={grads.dtype: total}, grads={grads.dtype: grads})

    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        AdamWState.accumulate(held)

    events = profile.profiler.kineto_results.events()
    taken = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert max(taken) <= 4 * AT_ONCE < 4 * count
    assert float(total.min()) == float(total.max()) == 2
    assert not grads.any()


def test_bfloat16_weights_are_their_float32_masters_rounded(model_dir):
    trained, batch = engine(model_dir("qwen2"), dtype=torch.bfloat16, lr=1e-5), rows()
    before = copies(trained)

    for _ in range(4):
        one_step(trained, batch)

    after = copies(trained)
    names = trained.model.trained_names()
    for name in names:
        master = after[f"master.{name}"]
        assert torch.float32 == master.dtype == after[f"exp_avg.{name}"].dtype
        assert torch.equal(master.bfloat16(), after[name])
        assert not torch.equal(master, before[f"master.{name}"])
    # Steps this small are lost on most bfloat16 weights and kept by the masters.
    kept = [float((after[name] == before[name]).float().mean()) for name in names]
    assert max(kept) > 0.5


def test_bfloat16_steps_equal_adamw_on_the_float32_masters(model_dir):
    trained, batch = engine(model_dir("qwen2"), dtype=torch.bfloat16, lr=1e-3), rows()
    masters = {
        name: trained.optimizer.tensors()[f"master.{name}"].clone()
        for name in trained.model.trained_names()
    }
    groups = [
        {"params": [t for t in masters.values() if t.ndim >= 2], "weight_decay": 0.1},
        {"params": [t for t in masters.values() if t.ndim < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    for _ in range(3):
        one_step(trained, batch, max_grad_norm=None)
        (sums,) = trained.optimizer.sums.values()
        for name, tensor in masters.items():
            tensor.grad = trained.optimizer.flat.view(name, sums).clone()
        reference.step()

    found = trained.optimizer.tensors()
    for name, expected in masters.items():
        assert torch.allclose(expected, found[f"master.{name}"], rtol=1e-6, atol=1e-8), name
