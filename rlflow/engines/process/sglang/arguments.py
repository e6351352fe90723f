"""What an SGLang engine is started with: its arguments, its environment, its interpreter.

This file knows the names of SGLang's options, and no process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlflow.contract.engines import ModelConfig
from rlflow.graph.user import speculative

if TYPE_CHECKING:
    from rlflow.graph.model import LoRA
    from rlflow.graph.user.engine_options import EngineOptions
    from rlflow.graph.user.engines import SGLang

# A request may have fewer tokens than the engine's context; the rest stays unused.
SPARE_CONTEXT = 16
STREAM_INTERVAL = 16
CPU_POOL_TOKENS = 16384
CPU_REQUESTS = 256
# By the model's own word: what is SGLang's of a model that sees, where rlflow brings a part of it.
SEEING = "rlflow_sglang_seeing"
REQUESTS = {"SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": SEEING}
BROUGHT = {
    "mistral3": REQUESTS,
    "internvl": {
        **REQUESTS,
        "SGLANG_EXTERNAL_MODEL_PACKAGE": SEEING,
        "SGLANG_EXTERNAL_MM_MODEL_ARCH": "InternVLForConditionalGeneration",
    },
}
PASSED_ON = (
    "mem_fraction_static",
    "max_total_tokens",
    "max_running_requests",
    "attention_backend",
    "quantization",
)


def interpreter(options: EngineOptions) -> str:
    """The interpreter that an engine is installed for."""
    return options.python or os.environ.get(options.variable()) or sys.executable


def sglang_arguments(
    options: SGLang,
    *,
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    ranks: int,
    seed: int,
    context: int | None,
    config: ModelConfig | None = None,
    lora: LoRA | None = None,
) -> dict[str, Any]:
    """Arguments of `sglang.Engine`; what is None is left to it. The model's config says nothing."""
    del config
    given = {name: getattr(options, name) for name in PASSED_ON}
    made: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    made |= {
        "model_path": path,
        "skip_tokenizer_init": True,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "tp_size": ranks,
        "random_seed": seed,
        "stream_interval": STREAM_INTERVAL,
        "weight_version": "0",
        "skip_server_warmup": True,
        "log_level": "error",
        "disable_cuda_graph": not options.cuda_graph,
    }
    if context is not None:
        made["context_length"] = context + SPARE_CONTEXT
    if options.deterministic:
        made["enable_deterministic_inference"] = True
    if options.routed_experts:
        made["enable_return_routed_experts"] = True
    if lora is not None:
        made |= adapting(lora, on_cpu=device.type == "cpu")
    if device.type == "cpu":
        made = _on_cpu(made)
    elif options.memory_saver:
        made["enable_memory_saver"] = True
    if options.speculative is not None:
        made = _with_drafts(made, options.speculative.arguments())
    return {**made, **options.args}


def adapting(lora: LoRA, *, on_cpu: bool) -> dict[str, Any]:
    """Arguments of an engine with adapters, those of one version at a time."""
    made = {
        "enable_lora": True,
        "max_lora_rank": lora.rank,
        "lora_target_modules": layer_names(lora),
        "max_loras_per_batch": 1,
    }
    return {**made, "lora_backend": "torch_native"} if on_cpu else made


def layer_names(lora: LoRA) -> list[str]:
    """The last parts of the names of the layers that have adapters, sorted."""
    return sorted({target.rpartition(".")[2] for target in lora.targets})


def with_drafter(given: Mapping[str, Any], path: str, tokens: int) -> dict[str, Any]:
    """The arguments with a drafter: a model of its own that proposes one chain of tokens."""
    return _with_drafts(given, speculative.drafting("STANDALONE", path, tokens))


def _with_drafts(given: Mapping[str, Any], drafts: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with those that say what drafts.

    Where the engine gives memory back, SGLang restores what drafts from a copy of its own alone:
    the weights that nothing else brings, and what is no weight, such as tables of positions.
    """
    kept = {"enable_draft_weights_cpu_backup": True} if "enable_memory_saver" in given else {}
    return {**given, **kept, **drafts}


def _on_cpu(made: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a CPU: attention of all sequences at once, a pool that does not take it all.

    A part of the host's memory for the pool is taken as it is said.
    """
    plain = {
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_overlap_schedule": True,
        # A scheduler that has nothing to do would take a core for asking whether it has.
        "sleep_on_idle": True,
        "max_running_requests": CPU_REQUESTS,
    }
    if "mem_fraction_static" not in made:
        plain |= {"mem_fraction_static": 0.1, "max_total_tokens": CPU_POOL_TOKENS}
    if "attention_backend" not in made:
        # Named by phase, they are taken on a CPU without AMX too.
        plain["prefill_attention_backend"] = plain["decode_attention_backend"] = "intel_amx"
    return {**plain, **made, "disable_cuda_graph": True}


def sglang_environment(
    python: str,
    *,
    device: torch.device,
    devices: Sequence[int],
    threads: int,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, str]:
    """The environment of an engine's process: this one's, but for what is Python's own.

    What convolutions carry from token to token is in the model's `dtype`, as rlflow has it.
    On a CPU it finds torchvision, and stand-ins for what has no wheel there, in the folder `cpu` of
    the interpreter's environment, where `scripts/sglang_cpu.sh` puts them.
    """
    made = plain_environment(threads)
    made["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    # What towers make of pictures it would keep by the pixels, also where the weights are new.
    made["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    made["SGLANG_MAMBA_CONV_DTYPE"] = str(dtype).removeprefix("torch.")
    if device.type == "cpu":
        made["PYTHONPATH"] = str(Path(python).parent.parent / "cpu")
        made["SGLANG_USE_CPU_ENGINE"] = "1"
        made["TORCHDYNAMO_DISABLE"] = "1"
        if len(devices) > 1:
            made["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(cores(devices))
    else:
        made["CUDA_VISIBLE_DEVICES"] = ",".join(visible_devices(devices))
    return made


def seeing_variables(config: ModelConfig) -> dict[str, str]:
    """The variables by which SGLang finds what rlflow brings of a model that sees."""
    return BROUGHT.get(str(config.to_dict().get("model_type")), {})


def plain_environment(threads: int) -> dict[str, str]:
    """The environment here without what is Python's own, for so many threads."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP"}
    made = {name: value for name, value in os.environ.items() if name not in dropped}
    made["OMP_NUM_THREADS"] = str(max(1, threads))
    # Threads that spin while they wait take the cores of other processes.
    made["GOMP_SPINCOUNT"] = "0"
    return made


def visible_devices(devices: Sequence[int]) -> list[str]:
    """The names of CUDA devices for a process that is to see only these."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = named.split(",") if named else []
    return [names[index] if index < len(names) else str(index) for index in devices]


def cores(devices: Sequence[int]) -> list[str]:
    """The core of each rank on a CPU; where there are more ranks, some share one."""
    here = sorted(os.sched_getaffinity(0))
    return [str(here[index % len(here)]) for index in devices]
