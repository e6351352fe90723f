"""Gradient checkpointing: the same gradients, fewer saved bytes."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

import rlflow as rf
from rlflow.engines.hf.forward import ahead
from rlflow.engines.hf.forward.packed import pack
from rlflow.engines.hf.forward.sequences import PlainSequences
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.recompute import decoder_layers, recompute_layers
from rlflow.engines.hf.train import TrainEngine
from rlflow.errors import RunError, UsageError
from tests.engines.examples import Spec, gradients, rows, sft, step_towards_one

pytestmark = pytest.mark.torch

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2"]
ADAPTERS = rf.LoRA(rank=2, targets=("q_proj", "down_proj"))


def engine(path, micro_tokens=None, **options):
    model = load_model(path, dtype=torch.float32, device="cpu", **options)
    return TrainEngine(model, Spec(), micro_tokens=micro_tokens)


def sizes_of_saved(action):
    """What an action returns, and the bytes that autograd keeps while it runs."""
    sizes = []

    def pack(tensor):
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = action()
    return made, sum(sizes)


@pytest.mark.rows(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("micro_tokens", [None, 25])
def test_gradients_are_those_of_the_plain_model_bit_for_bit(family, micro_tokens, model_dir):
    plain, *others = (
        gradients(engine(model_dir(family), micro_tokens, recompute=on), rows(), temperature=0.8)
        for on in (False, True, "selective", 1)
    )

    for saving in others:
        assert plain.keys() == saving.keys()
        assert all(torch.equal(plain[name], saving[name]) for name in plain)


def test_adapters_and_value_heads_train_the_same(model_dir):
    path = model_dir("llama")
    for options, output in (({"lora": ADAPTERS}, "log_probs"), ({"head": "value"}, "values")):
        made = [engine(path, recompute=on, **options) for on in (False, True)]
        for trained in made:
            step_towards_one(trained, output)

        plain, saving = (trained.model.named_tensors() for trained in made)
        assert all(torch.equal(plain[name], saving[name]) for name in plain)


def test_autograd_keeps_inputs_of_layers_only(model_dir):
    batch = rows()
    plain, saving = (engine(model_dir("qwen3"), recompute=on) for on in (False, True))

    expected, everything = sizes_of_saved(lambda: plain.compute(batch, ("log_probs",), 1.0))
    found, inputs = sizes_of_saved(lambda: saving.compute(batch, ("log_probs",), 1.0))

    assert torch.equal(expected["log_probs"], found["log_probs"])
    assert inputs < 0.3 * everything


def test_the_first_layers_keep_their_inputs_and_the_others_all(model_dir):
    batch, kept = rows(), []
    for on in (False, True, 1):
        trained = engine(model_dir("qwen3"), recompute=on)
        kept.append(sizes_of_saved(lambda t=trained: t.compute(batch, ("log_probs",), 1.0))[1])

    assert kept[2] == (kept[0] + kept[1]) / 2  # One layer of two.


@pytest.mark.parametrize("dense", [True, False], ids=["masks", "sequences"])
def test_attention_computes_once_where_what_it_made_is_kept(dense, model_dir, monkeypatch):
    """In the masks of a CPU and in the sequences of an accelerator alike."""
    monkeypatch.setattr(ahead, "pack", partial(pack, dense=dense))
    batch, calls, found, grads = rows(), [], {}, {}
    for owner, name in ((torch, "baddbmm"), (PlainSequences, "forward")):
        computed = getattr(owner, name)

        def counted(*args, computed=computed, **options):
            calls.append(None)
            return computed(*args, **options)

        monkeypatch.setattr(owner, name, counted)
    for on in (False, True, "selective"):
        trained = engine(model_dir("llama"), recompute=on)
        calls.clear()
        loss, _ = sft(trained.compute(batch, ("log_probs",), 1.0), batch)
        forward = len(calls)
        loss.backward()
        found[on] = forward, len(calls) - forward
        grads[on] = [parameter.grad for parameter in trained.model.module.parameters()]

    once, backward = found[False]
    assert once
    assert found == {
        False: (once, backward),
        True: (once, once + backward),
        "selective": found[False],
    }
    for on in (True, "selective"):
        assert all(torch.equal(*pair) for pair in zip(grads[False], grads[on], strict=True))


def test_backward_may_run_in_another_thread(model_dir):
    batch = rows()
    found = []
    for on in (False, True, "selective"):
        trained = engine(model_dir("qwen2"), recompute=on)
        loss, _ = sft(trained.compute(batch, ("log_probs",), 1.0), batch)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        found.append([parameter.grad for parameter in trained.model.module.parameters()])

    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


def test_two_packed_batches_in_flight_keep_their_own_attention(model_dir):
    first, second = rows(seed=1), rows(prompt_sizes=(9, 2), seed=2)
    found = []
    for on in (False, True, "selective"):
        trained = engine(model_dir("qwen2"), recompute=on)
        losses = [sft(trained.compute(b, ("log_probs",), 1.0), b)[0] for b in (first, second)]
        sum(losses).backward()
        found.append([parameter.grad for parameter in trained.model.module.parameters()])

    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


def test_a_module_called_directly_is_still_refused(model_dir):
    module = engine(model_dir("qwen2"), recompute=True).model.module

    with pytest.raises(RunError, match="E512"):
        module(input_ids=torch.tensor([[1, 2]]))


def test_every_decoder_layer_is_found_in_order(model_dir):
    for family, names in (
        ("qwen2", ["model.layers.0", "model.layers.1"]),
        ("gpt2", ["transformer.h.0", "transformer.h.1"]),
    ):
        assert names == list(decoder_layers(engine(model_dir(family)).model.module))


def test_a_model_without_layers_is_refused():
    with pytest.raises(UsageError, match=r"E515.*Sequential"):
        recompute_layers(torch.nn.Sequential(torch.nn.Linear(2, 2)))
