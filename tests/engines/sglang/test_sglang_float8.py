"""What an engine in float8 is started with and sent, up to its door: a CPU does not run it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import FineGrainedFP8Config, Qwen2Config, Qwen2ForCausalLM
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

from rlflow.engines.hf.lora import adapt
from rlflow.engines.process.client.load import StagedModel, in_float8, staged
from rlflow.engines.process.client.weight_check import hash_differences
from rlflow.engines.process.server.rlflow_engine_process.held import HeldWeights
from rlflow.engines.process.server.rlflow_engine_process.sglang_adapters import whole_layers
from rlflow.engines.process.sglang.arguments import sglang_arguments
from rlflow.engines.process.sglang.checksums import weight_layout
from rlflow.engines.reshard.quantised import dequantised, in_blocks, quantise
from rlflow.graph.model import LoRA
from rlflow.graph.user.engines import VLLM, SGLang

pytestmark = pytest.mark.torch

WIDTHS = {
    "vocab_size": 96,
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
}
HOW = {"seed": 3, "device": torch.device("cpu"), "held": True}


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def path(request, tmp_path):
    """A model's config, whose weights are drawn."""
    made = Qwen2Config(**WIDTHS, tie_word_embeddings=request.param)
    made.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def in_checkpoint(config):
    """The names, shapes and dtypes of a checkpoint in blocks, by what transformers loads."""
    with torch.device("meta"):
        module = Qwen2ForCausalLM(config)
    quantization = FineGrainedFP8Config(weight_block_size=(128, 128))
    replace_with_fp8_linear(module, ["lm_head"], quantization)
    found = {n: (tuple(p.shape), p.dtype) for n, p in module.named_parameters()}
    return {
        n: (shape, dtype if dtype == torch.float8_e4m3fn or "scale" in n else torch.bfloat16)
        for n, (shape, dtype) in found.items()
    }


def test_an_engine_is_sent_what_a_checkpoint_in_blocks_has(path, tmp_path):
    """By name, shape and dtype as transformers has it, and value by value as it is quantised."""
    (tmp_path / "made").mkdir()
    how = {"lora": None, "blocks": True, **HOW}
    (config,), (staging,), _ = staged(
        {"model": (path, "random")}, str(tmp_path / "made"), torch.bfloat16, **how
    )
    told = {name: (tuple(t.shape), t.dtype) for name, t in staging.tensors.items()}
    wanted = in_checkpoint(config)
    assert wanted == told
    written = load_file(tmp_path / "made" / "model" / "model.safetensors")
    assert wanted == {name: (tuple(t.shape), t.dtype) for name, t in written.items()}
    said = json.loads((tmp_path / "made" / "model" / "config.json").read_text())
    assert {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    } == said["quantization_config"]
    module = StagedModel.of(path, "random", torch.bfloat16, 3, whole=True).module
    for name, weight in module.named_parameters():
        values, scales = staging.tensors[name], staging.tensors.get(f"{name}_scale_inv")
        made = (weight.detach(), None) if scales is None else quantise(weight.detach())
        for mine, its in zip(made, (values, scales), strict=True):
            assert mine is its is None or torch.equal(mine.view(torch.uint8), its.view(torch.uint8))
        assert torch.equal(values.view(torch.uint8), written[name].view(torch.uint8))


def test_hashes_of_quantised_weights_are_of_what_they_stand_for(path, tmp_path):
    """Fused as an engine has them, by the process that holds the memory; scales have no own."""
    (tmp_path / "made").mkdir()
    how = {"lora": None, "blocks": True, **HOW}
    _, (staging,), _ = staged(
        {"model": (path, "random")}, str(tmp_path / "made"), torch.bfloat16, **how
    )
    held = HeldWeights(
        {"table": staging.table, "memory": staging.descriptor, "bytes": staging.size}
    )
    front = "model.layers.1.self_attn"
    fused = [staging.tensors[f"{front}.{part}_proj.weight"] for part in "qkv"]
    scales = [staging.tensors[f"{front}.{part}_proj.weight_scale_inv"] for part in "qkv"]
    pairs = zip(fused, scales, strict=True)
    wanted = torch.cat([dequantised(*pair, torch.bfloat16) for pair in pairs])
    name = f"{front}.qkv_proj.weight"
    assert torch.equal(wanted, held.joined(*weight_layout([name], staging.tensors)[name]))
    engine = [name for name in staging.tensors if "scale" not in name]
    sums = dict.fromkeys(engine, "same")

    def ask(do, fields):
        return [sums] if do == "checksums" else dict.fromkeys(fields["layout"], "same")

    assert {} == hash_differences(ask, staging.tensors, {}, cuda=True)
    gone = f"{front}.o_proj.weight"
    del sums[gone]
    assert {gone, f"{gone}_scale_inv"} == hash_differences(
        ask, staging.tensors, {}, cuda=True
    ).keys()


def test_adapters_above_quantised_layers_are_not_quantised(path):
    module = StagedModel.of(path, "random", torch.bfloat16, 3, whole=True).module
    names = adapt(module, LoRA(rank=4, targets=("q_proj",)), 3).names
    weights = in_blocks({name: tensor.detach() for name, tensor in module.named_parameters()})
    assert {torch.bfloat16} == {weights[name].dtype for name in names}
    beside = whole_layers(weights, 4)
    assert {torch.bfloat16} == {tensor.dtype for tensor in beside.values()}
    assert any("k_proj" in name for name in beside)


def test_the_option_is_sglangs_and_of_one_kind():
    assert [True, False, False] == [
        in_float8(each) for each in (SGLang(quantization="fp8"), SGLang(), VLLM())
    ]
    told = {"path": "p", "dtype": torch.bfloat16, "ranks": 1, "seed": 3, "context": 8}
    made = sglang_arguments(SGLang(quantization="fp8"), device=torch.device("cuda:0"), **told)
    assert "fp8" == made["quantization"]
