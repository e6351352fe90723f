"""What an engine is told and how its weights are laid out and hashed, without the engine."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlflow.contract.values import Reach, SampleKey, Sampling
from rlflow.engines.hf.loading import load_model
from rlflow.engines.process.client.load import StagedModel, no_drafter, readable
from rlflow.engines.process.client.process_memory import held_bytes, members
from rlflow.engines.process.client.rollout import parameters, seed_of
from rlflow.engines.process.client.shared_weights import SharedWeights
from rlflow.engines.process.server.rlflow_engine_process.sglang_adapters import whole_layers
from rlflow.engines.process.sglang.arguments import (
    cores,
    interpreter,
    sglang_arguments,
    sglang_environment,
    visible_devices,
    with_drafter,
)
from rlflow.engines.process.sglang.checksums import hashed, hashes, pieces, weight_layout
from rlflow.graph.model import LoRA
from rlflow.graph.user.engines import SGLang
from rlflow.graph.user.speculative import Speculative
from tests.conftest import TINY

pytestmark = pytest.mark.torch

COMMON = {"path": "p", "dtype": torch.float32, "ranks": 1, "seed": 3, "context": 128}


def test_shared_weights_lie_where_their_table_says():
    given = {"a": torch.arange(3.0), "b": torch.tensor([[7], [9]], dtype=torch.bfloat16)}
    made = SharedWeights(given)
    assert [("a", "float32", (3,), 0), ("b", "bfloat16", (2, 1), 64)] == made.table
    other = mmap.mmap(made.descriptor, made.size)
    assert (0, 1, 2) == struct.unpack("3f", other[:12])
    made.tensors["a"][1] = 5
    assert (0, 5, 2) == struct.unpack("3f", other[:12])
    other[0:4] = struct.pack("f", 8)
    assert [8, 5, 2] == made.tensors["a"].tolist()
    assert given["a"].tolist() == [0, 1, 2]


def test_shared_weights_have_no_name_and_go_with_their_object():
    made = SharedWeights({"a": torch.ones(1)})
    descriptor = made.descriptor
    assert "memfd" in str(Path(f"/proc/self/fd/{descriptor}").readlink())
    del made
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_a_hash_is_the_beginning_of_sha_256():
    tensor = torch.tensor([1.0, 2.0])
    wanted = hashlib.sha256(struct.pack("2f", 1, 2)).hexdigest()[:16]
    assert wanted == hashed([tensor])
    assert wanted == hashed([tensor[:1], tensor[1:]])


def test_fused_and_padded_weights_are_hashed_as_the_engine_has_them():
    q, k, v = (torch.full((2, 2), number) for number in (1.0, 2.0, 3.0))
    words = torch.ones(3, 2)
    staged = {
        "l.q_proj.weight": q,
        "l.k_proj.weight": k,
        "l.v_proj.weight": v,
        "embed_tokens.weight": words,
    }
    held = {
        "l.qkv_proj.weight": hashed([torch.cat([q, k, v])]),
        "embed_tokens.weight": hashed([torch.cat([words, torch.zeros(61, 2)])]),
    }
    assert held == hashes(held, staged)
    k[0, 0] += 1
    assert held["l.qkv_proj.weight"] != hashes(held, staged)["l.qkv_proj.weight"]
    assert {"scale": "", "l.gate_up_proj.weight": ""} == hashes(
        ["scale", "l.gate_up_proj.weight"], staged
    )
    tied = {"lm_head.weight": ([("embed_tokens.weight", 0, 0, 3)], 61, 0.0)}
    assert tied == weight_layout(["lm_head.weight"], staged)


def test_each_rank_has_its_part_of_what_tensor_parallelism_cuts():
    square = torch.arange(16.0).view(4, 4)
    q, k, v = square, 100 + square[:2], 200 + square[:2]
    staged = {
        "l.q_proj.weight": q,
        "l.k_proj.weight": k,
        "l.v_proj.weight": v,
        "l.q_proj.bias": torch.arange(4.0),
        "l.k_proj.bias": torch.arange(2.0),
        "l.v_proj.bias": torch.arange(2.0),
        "l.o_proj.weight": square,
        "l.o_proj.bias": torch.arange(4.0),
        "l.norm.weight": torch.ones(4),
        "embed_tokens.weight": torch.ones(70, 2),
    }
    second = {
        "l.qkv_proj.weight": [q[2:], k[1:], v[1:]],
        "l.qkv_proj.bias": [torch.tensor([2.0, 3.0, 1.0, 1.0])],
        "l.o_proj.weight": [square[:, 2:].contiguous()],
        "l.o_proj.bias": [torch.arange(4.0)],
        "l.norm.weight": [torch.ones(4)],
        # 128 rows in all, 64 for each rank; the last 58 are zeros.
        "embed_tokens.weight": [torch.ones(6, 2), torch.zeros(58, 2)],
    }
    assert {name: hashed(made) for name, made in second.items()} == hashes(second, staged, 1, 2)
    assert ([("embed_tokens.weight", 0, 0, 64)], 0) == pieces("embed_tokens.weight", staged, 0, 2)
    # 128 rows do not divide by 3, so there are 192.
    assert ([("embed_tokens.weight", 0, 64, 70)], 58) == pieces("embed_tokens.weight", staged, 1, 3)


@pytest.mark.parametrize("words", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_experts_of_a_layer_are_two_tensors_of_which_each_rank_has_its_part(words):
    gate, up, down = words
    shapes = {gate: (4, 6), up: (4, 6), down: (6, 4)}
    staged = {
        f"l.experts.{e}.{word}.weight": torch.randn(*shapes[word])
        for e in range(3)
        for word in words
    }
    outer, inner = "l.experts.w13_weight", "l.experts.w2_weight"
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        rows = slice(4 * rank // ranks, 4 * (rank + 1) // ranks)
        of = [[staged[f"l.experts.{e}.{word}.weight"] for word in words] for e in range(3)]
        held = {
            outer: hashed([each[rows] for gates, ups, _ in of for each in (gates, ups)]),
            inner: hashed([downs[:, rows] for _, _, downs in of]),
        }
        assert held == hashes(held, staged, rank, ranks)
    staged.pop(f"l.experts.1.{up}.weight")
    assert {outer: hashed([staged[f"l.experts.0.{word}.weight"] for word in (gate, up)])} == hashes(
        [outer], staged
    )


def test_latents_norms_and_layers_of_hybrids_are_found_by_what_sglang_calls_them():
    latent = {
        f"l.self_attn.{name}.weight": torch.randn(3, 4)
        for name in ("q_a_proj", "kv_a_proj_with_mqa")
    }
    hybrid = {f"l.self_attn.{name}_proj.weight": torch.randn(2, 4) for name in "qkvo"}
    staged = {**latent, **hybrid, "l.norm.weight": torch.randn(4)}
    held = {
        "l.self_attn.fused_qkv_a_proj_with_mqa.weight": hashed(list(latent.values())),
        "l.qkv_proj.weight": hashed([hybrid[f"l.self_attn.{n}_proj.weight"] for n in "qkv"]),
        "l.o_proj.weight": hashed([hybrid["l.self_attn.o_proj.weight"]]),
        "l.norm.gemma_weight": hashed([staged["l.norm.weight"] + 1]),
    }
    assert held == hashes(held, staged)
    norm, other = weight_layout(["l.norm.gemma_weight", "l.other.weight"], staged).values()
    assert ([("l.norm.weight", 0, 0, 4)], 0, 1.0) == norm
    assert ([], 0, 0.0) == other


def test_a_cpu_engine_computes_all_sequences_at_once_unless_told_otherwise():
    made = sglang_arguments(SGLang(), device=torch.device("cpu"), **COMMON)
    assert "intel_amx" == made["prefill_attention_backend"] == made["decode_attention_backend"]
    assert made["disable_cuda_graph"]
    assert 128 < made["context_length"]
    assert "enable_memory_saver" not in made
    told = SGLang(attention_backend="torch_native", max_total_tokens=99, args={"page_size": 4})
    made = sglang_arguments(told, device=torch.device("cpu"), **COMMON)
    assert ("torch_native", 99, 4) == tuple(
        made[name] for name in ("attention_backend", "max_total_tokens", "page_size")
    )
    assert "prefill_attention_backend" not in made


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        (SGLang(memory_saver=True), "enable_memory_saver", True),
        (SGLang(deterministic=True), "enable_deterministic_inference", True),
        (SGLang(cuda_graph=False), "disable_cuda_graph", True),
        (SGLang(), "disable_cuda_graph", False),
        (SGLang(mem_fraction_static=0.4), "mem_fraction_static", 0.4),
        (SGLang(quantization="fp8"), "quantization", "fp8"),
    ],
)
def test_options_of_a_gpu_engine(options, name, value):
    assert value == sglang_arguments(options, device=torch.device("cuda:1"), **COMMON)[name]


def test_a_gpu_engine_decides_on_its_pool_by_itself():
    made = sglang_arguments(SGLang(), device=torch.device("cuda"), **COMMON)
    assert not made.keys() & {"max_total_tokens", "mem_fraction_static", "max_running_requests"}


def test_a_part_of_the_memory_is_the_pool_of_a_cpu_too():
    made = sglang_arguments(SGLang(mem_fraction_static=0.3), device=torch.device("cpu"), **COMMON)
    assert (0.3, False) == (made["mem_fraction_static"], "max_total_tokens" in made)
    both = SGLang(mem_fraction_static=0.3, max_total_tokens=77)
    made = sglang_arguments(both, device=torch.device("cpu"), **COMMON)
    assert (0.3, 77) == (made["mem_fraction_static"], made["max_total_tokens"])
    assert 0 < sglang_arguments(SGLang(), device=torch.device("cpu"), **COMMON)["max_total_tokens"]


@pytest.mark.parametrize(
    ("said", "verified"),
    [
        ({"algorithm": "EAGLE", "draft_model": "/d", "draft_tokens": 3, "topk": 2}, 7),
        ({"algorithm": "STANDALONE", "draft_model": "/d", "draft_tokens": 3}, 4),
        ({"algorithm": "NGRAM", "draft_tokens": 3}, 4),
    ],
)
def test_what_drafts_is_kept_where_memory_is_given_back(said, verified):
    drafts = Speculative(**said)
    for saver, kept in ((True, True), (False, None), (None, None)):
        told = SGLang(speculative=drafts, memory_saver=saver)
        made = sglang_arguments(told, device=torch.device("cuda"), **COMMON)
        assert kept == made.get("enable_draft_weights_cpu_backup")
        assert said["algorithm"] == made["speculative_algorithm"]
        assert said.get("draft_model") == made.get("speculative_draft_model_path")
        assert verified == made["speculative_num_draft_tokens"] == drafts.verified


def test_an_engine_with_adapters_has_room_for_one_version_of_them():
    lora = LoRA(rank=3, targets=("1.self_attn.q_proj", "down_proj", "q_proj"))
    made = sglang_arguments(SGLang(), device=torch.device("cuda"), lora=lora, **COMMON)
    wanted = {
        "enable_lora": True,
        "max_lora_rank": 3,
        "lora_target_modules": ["down_proj", "q_proj"],
        "max_loras_per_batch": 1,
    }
    assert wanted == {name: made[name] for name in made if "lora" in name}
    made = sglang_arguments(SGLang(), device=torch.device("cpu"), lora=lora, **COMMON)
    assert "torch_native" == made["lora_backend"]
    plain = sglang_arguments(SGLang(), device=torch.device("cpu"), **COMMON)
    assert not [name for name in plain if "lora" in name]


def test_layers_that_are_computed_as_one_are_adapted_as_one():
    """Of q, k, v the v is adapted in layer 0, q and k in layer 1; of gate and up the up."""
    weights = {
        f"l.{number}.{name}.weight": torch.ones(size, 5)
        for number in (0, 1)
        for name, size in {"q_proj": 4, "k_proj": 2, "v_proj": 2, "o_proj": 4, "up_proj": 6}.items()
    }
    given = ("0.v_proj", "1.q_proj", "1.k_proj", "1.up_proj", "0.o_proj")
    for name in given:
        rows = len(weights[f"l.{name}.weight"])
        weights |= {f"l.{name}.lora_A": torch.ones(3, 5), f"l.{name}.lora_B": torch.ones(rows, 3)}
    found = whole_layers(weights, 3)
    zeros = ("0.q_proj", "0.k_proj", "1.v_proj")
    names = {f"l.{name}.lora_{half}.weight" for name in (*given, *zeros) for half in "AB"}
    assert names == found.keys()
    for name in names:
        adapted = not any(zero in name for zero in zeros)
        assert adapted == bool(found[name].any())
    assert [(3, 5), (4, 3)] == [tuple(found[f"l.0.q_proj.lora_{h}.weight"].shape) for h in "AB"]


def test_random_weights_are_written_without_the_adapters_beside_them(tmp_path):
    (tmp_path / "made").mkdir()
    model = load_model(str(TINY), dtype=torch.float32, device="cpu", init="random", lora=LoRA())
    readable(tmp_path / "made", str(TINY), model.named_tensors())
    found = load_file(tmp_path / "made" / "model.safetensors")
    assert "model.layers.0.self_attn.q_proj.weight" in found
    assert not [name for name in found if "lora" in name]


def test_the_interpreter(monkeypatch):
    monkeypatch.delenv("RLFLOW_SGLANG_PYTHON", raising=False)
    assert sys.executable == interpreter(SGLang())
    monkeypatch.setenv("RLFLOW_SGLANG_PYTHON", "/there/python")
    assert "/there/python" == interpreter(SGLang())
    assert "/here/python" == interpreter(SGLang(python="/here/python"))


def test_the_environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("OTHER", "kept")
    made = sglang_environment("/e/bin/python", device=torch.device("cpu"), devices=(0,), threads=1)
    assert ("kept", "1", "1") == (
        made["OTHER"],
        made["SGLANG_USE_CPU_ENGINE"],
        made["OMP_NUM_THREADS"],
    )
    assert "/e/cpu" == made["PYTHONPATH"]
    made = sglang_environment(
        "/e/bin/python", device=torch.device("cuda:1"), devices=(1,), threads=1
    )
    assert "PYTHONPATH" not in made
    assert "SGLANG_USE_CPU_ENGINE" not in made


def test_devices_are_named_as_this_process_sees_them(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert ["0", "2"] == visible_devices((0, 2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert ["7"] == visible_devices((1,))


def test_ranks_on_a_cpu_are_bound_to_cores_that_there_are(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 1})
    assert ["1", "3", "1"] == cores((0, 1, 2))
    made = sglang_environment(
        "/e/bin/python", device=torch.device("cpu"), devices=(2, 3), threads=1
    )
    assert "1|3" == made["SGLANG_CPU_OMP_THREADS_BIND"]


def test_a_readable_directory_has_weights_and_no_ends(tmp_path):
    source, made = tmp_path / "source", tmp_path / "made"
    source.mkdir()
    made.mkdir()
    (source / "config.json").write_text('{"model_type": "x", "eos_token_id": [1, 2]}')
    (source / "generation_config.json").write_text('{"eos_token_id": 3}')
    (source / "model.safetensors").write_bytes(b"w")
    readable(made, str(source), None)
    assert {"config.json", "model.safetensors"} == {file.name for file in made.iterdir()}
    assert b"w" == (made / "model.safetensors").read_bytes()
    assert {"model_type": "x", "eos_token_id": None} == json.loads(
        (made / "config.json").read_text()
    )
    assert "eos_token_id" in json.loads((TINY / "config.json").read_text())


@pytest.mark.parametrize(
    ("sampling", "reach", "wanted"),
    [
        (
            Sampling(max_new_tokens=9),
            Reach(),
            {"max_new_tokens": 9, "top_k": -1, "ignore_eos": True},
        ),
        (Sampling(max_new_tokens=9), Reach(first=2, until=5), {"max_new_tokens": 3}),
        (Sampling(max_new_tokens=9), Reach(first=2), {"max_new_tokens": 7}),
        (Sampling(max_new_tokens=9), Reach(until=50), {"max_new_tokens": 9}),
        (Sampling(max_new_tokens=9, top_k=5, top_p=0.5), Reach(), {"top_k": 5, "top_p": 0.5}),
        (
            Sampling(max_new_tokens=9, stop_tokens=(4, 7)),
            Reach(),
            {"stop_token_ids": [4, 7], "ignore_eos": False},
        ),
    ],
)
def test_parameters_of_sglang(sampling, reach, wanted):
    made = parameters(sampling, reach)
    assert wanted == {name: made[name] for name in wanted}


def test_a_seed_depends_on_the_key_and_the_sample():
    keys = [
        SampleKey(seed=seed, iteration=iteration, stream=stream)
        for seed in (0, 1)
        for iteration in (0, 1)
        for stream in ("a", "b")
    ]
    seeds = {seed_of(key, sample) for key in keys for sample in range(50)}
    assert 400 == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seed_of(keys[0], 3) == seed_of(keys[0], 3)


def test_memory_of_a_group():
    mine = os.getpgrp()
    assert os.getpid() in members(mine)
    assert held_bytes(mine, cuda=False) > 10e6
    assert [] == members(2**22 + 1)


def test_a_drafter_proposes_one_chain_and_is_kept_where_memory_is_given_back():
    """The policy reads its drafts and one token more."""
    made = with_drafter({"model_path": "p"}, "d", 3)
    assert ("p", "STANDALONE", "d") == (
        made["model_path"],
        made["speculative_algorithm"],
        made["speculative_draft_model_path"],
    )
    names = ("num_steps", "eagle_topk", "num_draft_tokens")
    assert [3, 1, 4] == [made[f"speculative_{name}"] for name in names]
    assert "enable_draft_weights_cpu_backup" not in made
    saving = with_drafter({"enable_memory_saver": True}, "d", 3)
    assert saving["enable_draft_weights_cpu_backup"] is True


def test_an_engine_without_drafters_is_given_none():
    with pytest.raises(AssertionError, match="in an engine without drafters"):
        no_drafter({}, "d", 3)


def test_every_rank_writes_the_random_weights_of_its_engine(tmp_path, monkeypatch):
    made = StagedModel.of(str(TINY), "random", torch.float32, 3)
    config, module = made.config, made.make()
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda *group: 1)
    readable(tmp_path, str(TINY), {n: p.detach() for n, p in module.named_parameters()})
    found = load_file(tmp_path / "model.safetensors")
    wanted = dict(module.named_parameters())
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    said = json.loads((tmp_path / "config.json").read_text())
    assert (config.vocab_size, None) == (said["vocab_size"], said["eos_token_id"])
