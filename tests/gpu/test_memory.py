"""Part B: what sleeps gives its memory to other processes, as the driver counts it.

On a CPU the objects of the same names are asked, which is all that a CPU can tell.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.train import TrainEngine
from rlflow.runtime.worker.device_memory import device_memory
from tests.engines.examples import Spec
from tests.gpu.conftest import HALF_BILLION, TINY
from tests.gpu.test_compute import OUTPUTS, batch_of, weighted

pytestmark = pytest.mark.torch

# What lies in segments that small tensors share, and what the driver rounds.
SLACK = 64 << 20


@pytest.fixture
def trained(model_of: Any, device: Any, big: bool) -> Any:
    size = HALF_BILLION if big else TINY
    model = load_model(model_of(size), dtype=torch.bfloat16, device=device, init="random", seed=3)
    engine = TrainEngine(model, Spec(), micro_tokens=None)
    batch = batch_of(size.vocabulary, groups=2, n=2, prompt=8, response=12)
    engine.step(batch, weighted, outputs=OUTPUTS, temperature=0.8, max_grad_norm=None)
    return engine


def free(device: Any) -> int:
    memory = device_memory(str(device))
    memory.give_back()
    return memory.free()


def alive(engine: Any) -> int:
    """Bytes on the device of a model's buffers, its optimizer's and its gradients."""
    optimizer = engine.optimizer
    kept = [*engine.model.trained.buffers.values(), *engine.model.frozen.buffers.values()]
    kept += [*optimizer.state_buffers(), *optimizer.grads.values(), *optimizer.sums.values()]
    storages = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in kept}
    storages.pop(0, None)
    return sum(storages.values())


def test_each_part_that_sleeps_frees_its_bytes(trained: Any, device: Any, big: bool) -> None:
    model = trained.model
    weights, state = model.num_bytes(), sum(b.nbytes for b in trained.optimizer.state_buffers())
    before, first = alive(trained), free(device)

    trained.release_gradients()
    gradients = before - alive(trained)
    assert gradients >= model.trained.num_bytes()
    trained.sleep_optimizer()
    assert before - gradients - state == alive(trained)
    model.sleep("offload")
    assert 0 == alive(trained)
    if big:
        assert abs(free(device) - first - weights - state - gradients) < SLACK

    model.wake()
    trained.wake_optimizer()
    assert weights + state == alive(trained)
    if big:
        assert abs(first + gradients - free(device)) < SLACK


def test_discarded_weights_leave_nothing_on_the_host(trained: Any, device: Any) -> None:
    model = trained.model
    model.sleep("discard")
    assert not model._host
    first = free(device)
    model.wake()
    assert "empty" == model.state
    assert free(device) <= first


def test_a_device_holds_one_copy_of_the_weights_while_it_loads(model_of: Any, gpu: Any) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(gpu)
    start = torch.cuda.memory_allocated(gpu)
    model = load_model(
        model_of(HALF_BILLION), dtype=torch.bfloat16, device=gpu, init="random", seed=3
    )
    peak = torch.cuda.max_memory_allocated(gpu) - start
    assert peak < 1.5 * model.num_bytes()


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(Spec(), id="float32"),
        pytest.param(Spec(moments="bfloat16"), id="bfloat16"),
        pytest.param(Spec(moments="int8"), id="int8"),
        pytest.param(Spec(momentum=0.95), id="muon"),
    ],
)
def test_a_state_on_the_host_steps_alike_and_leaves_the_device_to_others(
    spec: Spec, model_of: Any, device: Any, big: bool
) -> None:
    """On a GPU copies run on streams of their own: weights and states are the same to the bit.

    Gradients are drawn: those of a backward pass add up in any order there.
    """
    size = HALF_BILLION if big else TINY
    found, taken = [], []
    for visiting in (False, True):
        model = load_model(
            model_of(size), dtype=torch.bfloat16, device=device, init="random", seed=3
        )
        engine = TrainEngine(model, spec, micro_tokens=None, visiting=visiting)
        assert engine.optimizer is not None
        drawn = torch.Generator().manual_seed(5)
        for _ in range(3):
            engine.optimizer.zero_grad()
            for total in engine.optimizer.sums.values():
                total.copy_(torch.randn(len(total), generator=drawn))
            engine.optimizer.step(0.5)
        tensors = {**model.named_tensors(), **engine.optimizer.tensors()}
        found.append({name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()})
        taken.append(alive(engine))
        state = sum(b.nbytes for b in engine.optimizer.state_buffers())
        assert bool(state) is not visiting
        taken[-1] -= state
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert taken[0] == taken[1]
