"""vLLM as a rollout engine: in a process of its own, beside the worker that asks it.

The worker's side is the one that SGLang has too; its process answers the same requests. This file
knows the names of vLLM's options, and no process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlflow.contract.engines import ModelConfig
from rlflow.engines.process.client.load import SERVER, EngineKind, start_engine
from rlflow.engines.process.client.model import EngineModel, token_cache_bytes
from rlflow.engines.process.client.rollout import SGLangRollout
from rlflow.engines.process.sglang.arguments import (
    CPU_POOL_TOKENS,
    cores,
    plain_environment,
    visible_devices,
)

if TYPE_CHECKING:
    from rlflow.graph.user.engines import VLLM

STREAM_INTERVAL = 16
BLOCK_TOKENS = {"cpu": 32, "cuda": 16}
CPU_REQUESTS = 256
# On GPUs another model runner may be the default, which makes log-probs in another place. What is
# read lies in a directory: nobody is asked over a network.
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}


def load_vllm(path: str, *, options: VLLM, **how: Any) -> tuple[EngineModel, SGLangRollout]:
    """Start vLLM with the weights of `path`; see `start_engine`."""
    model = start_engine(path, KIND, options=options, **how)
    return model, SGLangRollout(model, seeded=True)


def vllm_arguments(
    options: VLLM,
    *,
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    ranks: int,
    seed: int,
    context: int | None,
    config: ModelConfig,
) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs`; what is None is left to vLLM."""
    on_cpu = device.type == "cpu"
    tokens = options.max_total_tokens
    if tokens is None and on_cpu:
        tokens = CPU_POOL_TOKENS
    requests = options.max_running_requests
    made = {
        "model": path,
        "skip_tokenizer_init": True,
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel_size": ranks,
        "seed": seed,
        "stream_interval": STREAM_INTERVAL,
        "enforce_eager": on_cpu or not options.cuda_graph,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "rlflow_vllm_worker.Weights",
        "disable_log_stats": True,
        "max_model_len": context,
        "max_num_seqs": CPU_REQUESTS if requests is None and on_cpu else requests,
        "gpu_memory_utilization": options.mem_fraction_static,
        "enable_sleep_mode": True if options.memory_saver and not on_cpu else None,
    }
    if tokens is not None:
        made |= pool(tokens, BLOCK_TOKENS[device.type], context, token_cache_bytes(config, dtype))
    return {**{name: value for name, value in made.items() if value is not None}, **options.args}


def pool(tokens: int, block: int, context: int | None, each: int) -> dict[str, Any]:
    """The arguments of a pool of at least so many tokens, of `each` so many bytes.

    vLLM keeps a block back, and starts only where the longest row has room.
    """
    blocks = -(-tokens // block)
    longest = blocks * block if context is None else min(context, blocks * block)
    return {
        "block_size": block,
        "num_gpu_blocks_override": blocks + 1,
        "kv_cache_memory_bytes": (blocks + 1) * block * each,
        "max_model_len": longest,
    }


def vllm_environment(
    python: str,
    *,
    device: torch.device,
    devices: Sequence[int],
    threads: int,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, str]:
    """The environment of an engine's process, whatever its interpreter and its `dtype` are."""
    del python, dtype
    made = {**plain_environment(threads), **SETTINGS}
    if device.type == "cpu":
        bound = "|".join(cores(devices)) if len(devices) > 1 else "nobind"
        made |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": bound}
    else:
        made["CUDA_VISIBLE_DEVICES"] = ",".join(visible_devices(devices))
    return made


KIND = EngineKind(
    script=SERVER / "serve_vllm.py", arguments=vllm_arguments, environment=vllm_environment
)
