"""Frozen models whose layers live on the host: the same outputs, few bytes on the device."""

from __future__ import annotations

import pytest
import torch

import rlflow as rf
from rlflow.contract.values import SampleKey, Sampling
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.models import TorchModel
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.engines.hf.train import TrainEngine
from rlflow.engines.hf.writing import save_model
from rlflow.errors import RunError, UsageError
from tests.engines.examples import Spec, rows, trained_tensors

pytestmark = pytest.mark.torch

FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gpt2"]


def load(path, offload="layers", dtype=torch.float32, **more):
    return load_model(path, dtype=dtype, device="cpu", offload=offload, **more)


def scores(model, output="log_probs", micro_tokens=None):
    trained = TrainEngine(model, None, micro_tokens=micro_tokens)
    return trained.forward(rows(), outputs=(output,), temperature=1.0)[output]


def generated(model):
    batch = rows()
    key = SampleKey(seed=1, iteration=2, stream="s")
    made = TorchRollout(model).generate(
        batch["prompt_tokens"], Sampling(max_new_tokens=6), key, torch.arange(len(batch))
    )
    return made.response_tokens.values(), made.log_probs.values()


def device_bytes(module):
    """Bytes of the storages that parameters have at this moment."""
    storages = {p.untyped_storage()._cdata: p.untyped_storage() for p in module.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.rows(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_those_of_a_resident_model_bit_for_bit(family, dtype, model_dir):
    resident = load(model_dir(family), None, dtype)
    visiting = load(model_dir(family), dtype=dtype)

    assert torch.equal(scores(resident), scores(visiting))
    assert torch.equal(scores(resident, micro_tokens=20), scores(visiting, micro_tokens=20))
    for expected, found in zip(generated(resident), generated(visiting), strict=True):
        assert torch.equal(expected, found)


def test_values_are_those_of_a_resident_model(model_dir):
    resident, visiting = (load(model_dir("qwen2"), o, head="value") for o in (None, "layers"))
    for model in (resident, visiting):
        tensors = model.named_tensors()
        tensors["value_head.weight"].copy_(torch.sin(torch.arange(32.0))[None])

    assert torch.equal(scores(resident, "values"), scores(visiting, "values"))
    assert 0 < scores(visiting, "values").abs().max()


def test_one_layer_at_a_time_has_device_memory(model_dir):
    model = load(model_dir("llama"))
    outside = device_bytes(model.module)
    layers = [sum(p.numel() for p in layer.parameters()) * 4 for layer in model.module.model.layers]
    embeddings = 2 * model.module.lm_head.weight.nbytes
    assert embeddings <= outside < embeddings + 1024

    within = []
    for layer in model.module.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: within.append(device_bytes(model.module)))
    scores(model)
    generated(model)

    assert len(within) > 2 * len(layers)
    assert max(within) <= outside + max(layers) + 1024
    assert min(within) > outside
    assert outside == device_bytes(model.module)


def test_shards_are_the_host_copies_in_full(model_dir):
    resident, visiting = (load(model_dir("qwen2"), o) for o in (None, "layers"))

    shards = visiting.shards()

    assert resident.shards().keys() == shards.keys() == visiting.trained_names()
    assert all(torch.equal(t, shards[n].tensor) for n, t in resident.named_tensors().items())
    assert resident.num_bytes() == visiting.num_bytes()
    with torch.no_grad():
        shards["model.layers.1.mlp.up_proj.weight"].tensor.zero_()
        resident.shards()["model.layers.1.mlp.up_proj.weight"].tensor.zero_()
    assert torch.equal(scores(resident), scores(visiting))


@pytest.mark.parametrize("mode", ["offload", "discard"])
def test_it_sleeps_wakes_and_takes_new_weights(mode, model_dir):
    model, other = load(model_dir("qwen2")), load(model_dir("qwen2"), None)
    with torch.no_grad():
        for tensor in other.named_tensors().values():
            tensor.mul_(0.9)
    expected = scores(model)

    model.sleep(mode)
    assert 0 == device_bytes(model.module)
    with pytest.raises(RunError, match="asleep"):
        scores(model)
    model.wake()
    if mode == "offload":
        assert torch.equal(expected, scores(model))
    else:
        with pytest.raises(RunError, match="no weights"):
            scores(model)
    model.load_tensors(other.named_tensors(), 4)

    assert torch.equal(scores(other), scores(model))
    assert 4 == model.version


def test_a_failure_within_a_layer_leaves_nothing_behind(model_dir):
    model = load(model_dir("qwen2"))
    outside, expected = device_bytes(model.module), scores(model)

    def fail(*_):
        raise ZeroDivisionError

    handle = model.module.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        scores(model)
    handle.remove()

    assert outside == device_bytes(model.module)
    assert torch.equal(expected, scores(model))


def test_a_trained_model_refuses(model_dir):
    with pytest.raises(UsageError, match="E517"):
        TrainEngine(load(model_dir("qwen2")), Spec(), micro_tokens=None)


def test_a_model_with_adapters_keeps_them_on_the_device(model_dir):
    spec = rf.LoRA(rank=2, targets=("q_proj", "up_proj"))
    resident, visiting = (load(model_dir("qwen2"), o, lora=spec) for o in (None, "layers"))
    torch.manual_seed(0)
    changed = {name: torch.randn_like(t) for name, t in trained_tensors(resident).items()}
    for model in (resident, visiting):
        model.load_tensors(changed, 1)

    assert 2 * 2 * 2 == len(changed)
    assert torch.equal(scores(resident), scores(visiting))
    visiting.sleep("discard")
    visiting.wake()
    visiting.load_tensors(changed, 2)
    assert torch.equal(scores(resident), scores(visiting))
    with visiting.adapters_off():
        assert torch.equal(scores(load(model_dir("qwen2"), None)), scores(visiting))
    merged = visiting.merged_tensors()
    assert all(torch.equal(t, merged[name]) for name, t in resident.merged_tensors().items())


def test_what_is_saved_is_whole(model_dir, tmp_path):
    model = load(model_dir("qwen2"))

    save_model(model, str(tmp_path))

    assert torch.equal(scores(model), scores(load(str(tmp_path), None)))


def test_weights_that_layers_share_stay_on_the_device(model_dir):
    loaded = load(model_dir("llama"), None)
    from rlflow.engines.hf.layers import HostLayers

    module = loaded.module
    layers = module.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    with torch.no_grad():
        expected = scores(TorchModel(module, loaded.config, head="lm", name="m"))

    hosted = HostLayers(module, torch.device("cpu"))
    model = TorchModel(module, loaded.config, head="lm", name="m", layers=hosted)

    assert not any("up_proj" in name and ".0." in name for name in hosted.names())
    assert torch.equal(expected, scores(model))
