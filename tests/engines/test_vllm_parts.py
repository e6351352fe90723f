"""What a vLLM engine is told, without the engine."""

from __future__ import annotations

import ast
import asyncio
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch

from rlflow.engines.process.client.load import KIND as SGLANG
from rlflow.engines.process.client.load import SERVER
from rlflow.engines.process.client.shared_weights import SharedWeights
from rlflow.engines.process.server.rlflow_engine_process.lent import borrowed, weights_in
from rlflow.engines.process.server.rlflow_engine_process.server import Refused
from rlflow.engines.process.server.rlflow_engine_process.vllm import VLLMServer
from rlflow.engines.process.sglang.arguments import interpreter
from rlflow.engines.process.vllm import KIND, pool, vllm_arguments, vllm_environment
from rlflow.engines.reshard.ipc import lend
from rlflow.graph.user.engines import VLLM

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
TEXT = SimpleNamespace(
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64
)
CONFIG = SimpleNamespace(get_text_config=lambda: TEXT)
COMMON = {"path": "p", "dtype": torch.float32, "ranks": 1, "seed": 3, "context": 128}


def told(options, device=CPU, **more):
    return vllm_arguments(options, device=device, config=CONFIG, **{**COMMON, **more})


def test_a_cpu_engine_is_eager_and_has_a_pool_of_a_known_size():
    made = told(VLLM())
    assert made["enforce_eager"]
    assert (16384 // 32 + 1, 32) == (made["num_gpu_blocks_override"], made["block_size"])
    # Two layers, keys and values of two heads of 16 numbers of four bytes.
    assert made["kv_cache_memory_bytes"] == (16384 + 32) * 2 * 2 * 2 * 16 * 4
    assert ("float32", "processed_logprobs", 128) == tuple(
        made[name] for name in ("dtype", "logprobs_mode", "max_model_len")
    )
    assert "enable_sleep_mode" not in told(VLLM(memory_saver=True))
    assert not {"gpu_memory_utilization", "quantization"} & made.keys()


@pytest.mark.parametrize(
    ("tokens", "context", "blocks", "longest"),
    [(64, 128, 3, 64), (65, 128, 4, 96), (1000, 128, 33, 128), (50, None, 3, 64)],
)
def test_a_pool_holds_what_is_said_and_a_block_that_is_kept_back(tokens, context, blocks, longest):
    made = pool(tokens, 32, context, each=10)
    assert {
        "block_size": 32,
        "num_gpu_blocks_override": blocks,
        "kv_cache_memory_bytes": blocks * 320,
        "max_model_len": longest,
    } == made


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        (VLLM(memory_saver=True), "enable_sleep_mode", True),
        (VLLM(cuda_graph=False), "enforce_eager", True),
        (VLLM(), "enforce_eager", False),
        (VLLM(mem_fraction_static=0.4), "gpu_memory_utilization", 0.4),
        (VLLM(max_total_tokens=160), "num_gpu_blocks_override", 11),
        (VLLM(max_running_requests=7), "max_num_seqs", 7),
        (VLLM(args={"swap_space": 1}), "swap_space", 1),
    ],
)
def test_options_of_a_gpu_engine(options, name, value):
    assert value == told(options, torch.device("cuda:1"), ranks=2)[name]


def test_a_gpu_engine_decides_on_its_pool_by_itself():
    assert (
        not {"block_size", "max_num_seqs", "gpu_memory_utilization"}
        & told(VLLM(), torch.device("cuda")).keys()
    )


def test_the_environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made = vllm_environment("/e/python", device=CPU, devices=(0,), threads=2)
    assert ("2", "nobind", "spawn") == (
        made["OMP_NUM_THREADS"],
        made["VLLM_CPU_OMP_THREADS_BIND"],
        made["VLLM_WORKER_MULTIPROC_METHOD"],
    )
    assert "PYTHONPATH" not in made
    made = vllm_environment("/e/python", device=torch.device("cuda:1"), devices=(1, 3), threads=1)
    assert "1,3" == made["CUDA_VISIBLE_DEVICES"]
    assert "VLLM_CPU_OMP_THREADS_BIND" not in made


def test_the_interpreter(monkeypatch):
    monkeypatch.setenv("RLFLOW_SGLANG_PYTHON", "/other/python")
    monkeypatch.delenv("RLFLOW_VLLM_PYTHON", raising=False)
    assert sys.executable == interpreter(VLLM())
    monkeypatch.setenv("RLFLOW_VLLM_PYTHON", "/there/python")
    assert "/there/python" == interpreter(VLLM())
    assert "/here/python" == interpreter(VLLM(python="/here/python"))


class Workers:
    """What vLLM's engine does with its workers, of two ranks: it passes plain values on."""

    weight_version = "0"

    def __init__(self):
        self.asked, self.held = [], [{}, {}]

    async def collective_rpc(self, method, args):
        self.asked.append((method, *args))
        bucket, handles = args
        assert {bytes} == {type(handle) for handle in handles}
        for held, handle in zip(self.held, handles, strict=True):
            memory = borrowed(*pickle.loads(handle))
            held.update({name: w.clone() for name, w in weights_in(memory, bucket)})
        return [len(bucket)] * 2

    async def reset_prefix_cache(self):
        self.asked.append("empty")
        return True

    async def update_weight_version(self, version):
        self.weight_version = version

    async def get_weight_version(self):
        return self.weight_version


def lending(weights):
    """Memory with some weights one after the other, and their rows."""
    memory = torch.empty(sum(t.nbytes for t in weights.values()), dtype=torch.uint8)
    rows, end = [], 0
    for name, tensor in weights.items():
        memory[end : end + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
        rows.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end))
        end += tensor.nbytes
    return memory, rows


def test_each_rank_opens_the_bucket_that_it_is_lent():
    """Nothing is served from the first bucket on until the version is told."""
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    staging = SharedWeights(weights)
    held = {"table": staging.table, "memory": staging.descriptor, "bytes": staging.size}
    engine = Workers()
    server = VLLMServer(engine, None, {"arguments": {}, "held": held, "ranks": 2, "version": 3})

    async def update():
        await server.do_open()
        told = [server.version]
        for name, tensor in weights.items():
            memory, rows = lending({name: tensor})
            handles = [lend(memory, tensor.nbytes) for _ in range(2)]
            await server.do_take(rows, handles)
            with pytest.raises(Refused, match="2 ranks got 1"):
                await server.do_take(rows, handles[:1])
        told.append(server.version)
        return [*told, await server.do_shut(4), server.version]

    assert [None, None, "4", 4] == asyncio.run(update())
    assert ["empty", "rlflow_take", "rlflow_take"] == [
        each if isinstance(each, str) else each[0] for each in engine.asked
    ]
    for its in engine.held:
        assert weights.keys() == its.keys()
        assert all(torch.equal(weights[name], its[name]) for name in weights)


def test_what_runs_in_an_engines_interpreter_needs_no_rlflow():
    """Nor may a file beside the scripts hide a module of somebody else's."""
    files = sorted(SERVER.rglob("*.py"))
    beside = {file.stem for file in SERVER.glob("*.py")} - {"__init__"}
    scripts = {KIND.script.stem, SGLANG.script.stem}
    assert scripts | {"rlflow_guardian", "rlflow_vllm_worker"} == beside
    names = {
        name.split(".")[0]
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0)
        for name in [getattr(node, "module", None) or node.names[0].name]
    }
    own = {"rlflow_engine_process"}
    assert {"torch", "vllm", "sglang"} == names - sys.stdlib_module_names - own
