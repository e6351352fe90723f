"""What autograd saves of layers on the host: the same gradients, two layers on the device."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from pathlib import Path

import pytest
import torch

import rlflow as rf
from rlflow.engines.hf.layerwise import activations
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.train import TrainEngine
from rlflow.modelfiles import hosted
from tests.engines.examples import Spec, gradients, rows, sft, step_towards_one

pytestmark = pytest.mark.torch

ADAPTERS = rf.LoRA(rank=2, targets=("q_proj", "down_proj"))
WAYS = [pytest.param(False, id="all"), pytest.param(True, id="inputs")]


@pytest.fixture
def deep(model_dir, tmp_path):
    """A qwen2 of five layers, with random weights."""
    config = json.loads((Path(model_dir("qwen2")) / "config.json").read_text())
    config |= {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def engine(path, micro_tokens=None, *, hosts=True, **options):
    model = load_model(path, dtype=torch.float32, device="cpu", hosts_activations=hosts, **options)
    return TrainEngine(model, Spec(), micro_tokens=micro_tokens)


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


@pytest.fixture(autouse=True)
def everything_leaves(monkeypatch):
    """Rows of a few tokens are worth a copy, and take several pieces."""
    monkeypatch.setattr(activations, "LEAST_BYTES", 0)
    monkeypatch.setattr(activations, "PIECE_BYTES", 5000)


@pytest.mark.rows(2)
@pytest.mark.parametrize("recompute", WAYS)
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_gradients_are_those_of_the_plain_model_bit_for_bit(family, recompute, model_dir):
    plain, hosting = (
        gradients(
            engine(model_dir(family), 25, hosts=on, recompute=recompute), rows(), temperature=0.8
        )
        for on in (False, True)
    )
    assert same(plain, hosting)


def test_what_attention_made_may_stay(model_dir):
    plain, hosting = (
        gradients(engine(model_dir("llama"), hosts=on, recompute="selective"), rows())
        for on in (False, True)
    )
    assert same(plain, hosting)


@pytest.mark.rows(1)
@pytest.mark.parametrize("recompute", WAYS)
def test_adapters_and_value_heads_train_the_same(recompute, deep):
    for options, output in (({"lora": ADAPTERS}, "log_probs"), ({"head": "value"}, "values")):
        made = [
            engine(deep, hosts=on, recompute=recompute, init="random", **options)
            for on in (False, True)
        ]
        for trained in made:
            step_towards_one(trained, output)
        assert same(*(trained.model.named_tensors() for trained in made))


@pytest.mark.rows(1)
@pytest.mark.parametrize("recompute", WAYS)
def test_two_layers_are_on_the_device_at_once(recompute, deep, monkeypatch):
    """In the forward the one that leaves and the one that computes, in the backward that and the
    next; weights, and what is of all layers, never leave.
    """
    live, most, keys = [], [], set()
    made = activations.HostedStorage.__init__

    def counted(self, present):
        made(self, present)
        live.append(weakref.ref(self))
        keys.add(activations.storage_key(present))

    def alive():
        return [stored for stored in map(weakref.ref.__call__, live) if stored is not None]

    def on_device():
        return sum(stored.size for stored in alive() if stored.present is not None)

    monkeypatch.setattr(activations.HostedStorage, "__init__", counted)
    trained = engine(deep, recompute=recompute, init="random")

    def measure(layer, inputs, output):
        most.append(on_device())
        inputs[0].register_hook(lambda _: most.append(on_device()))

    for layer in trained.model.module.model.layers:
        layer.register_forward_hook(measure)
    loss, _ = sft(trained.compute(rows(), ("log_probs",), 1.0), rows())
    each = sum(stored.size for stored in alive()) // 5
    host = trained.model.activations.pieces
    kept = on_device()
    loss.backward()
    gc.collect()

    assert len(most) == 10
    assert max(most) <= 2.3 * each
    assert kept <= 1.3 * each
    assert keys.isdisjoint(map(activations.storage_key, trained.model.module.parameters()))
    assert on_device() == 0
    assert 3.8 * each <= host.num_bytes() <= 4 * each + 5000


def test_memory_of_the_host_is_used_again(deep):
    trained = engine(deep, 25, init="random")
    gradients(trained, rows())
    host = trained.model.activations.pieces
    taken = host.num_bytes()
    assert taken
    gradients(trained, rows())
    assert host.num_bytes() == taken
    with torch.no_grad():
        trained.forward(rows(), outputs=("log_probs",), temperature=1.0)
    assert host.num_bytes() == taken
    assert len(host._free) * 5000 == taken


@pytest.mark.parametrize("recompute", WAYS)
def test_two_packed_batches_in_flight_keep_their_own(recompute, deep):
    """Their backward passes may run in another thread."""
    first, second = rows(seed=1), rows(prompt_sizes=(9, 2), seed=2)
    found = []
    for on in (False, True):
        trained = engine(deep, hosts=on, recompute=recompute, init="random")
        losses = [sft(trained.compute(b, ("log_probs",), 1.0), b)[0] for b in (first, second)]
        thread = threading.Thread(target=sum(losses).backward)
        thread.start()
        thread.join()
        found.append([parameter.grad for parameter in trained.model.module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_graph_that_is_kept_is_read_again(deep):
    trained = engine(deep, init="random")
    weight = trained.model.module.model.layers[0].mlp.up_proj.weight
    loss, _ = sft(trained.compute(rows(), ("log_probs",), 1.0), rows())
    (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (again,) = torch.autograd.grad(loss, weight)
    assert torch.equal(first, again)


def test_a_plan_counts_by_the_same_rule():
    assert [hosted.layers_on_host(n) for n in (1, 2, 28)] == [0, 1, 27]
    assert [hosted.layers_on_device(n) for n in (1, 2, 28)] == [1, 2, 2]
    assert [hosted.in_pieces(n) for n in (0, 1, 32 << 20)] == [0, 32 << 20, 32 << 20]
