"""The engines that rlflow brings beside the embedded one, and their options, as values.

Nothing here knows what an engine does with an option, or whether one is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from rlflow.errors import Finding, PlanError
from rlflow.graph.user.engine_options import EngineOptions, Positive, register_engine
from rlflow.graph.user.speculative import Speculative

Updates = Literal["device", "memory", "group", "disk"]
VLLMUpdates = Literal["device", "memory"]
Quantization = Literal["fp8"]

SAID_ELSEWHERE = {
    "model_path": "the model's path",
    "tokenizer_path": "the model's path",
    "tokenizer_mode": "the model's path",
    "skip_tokenizer_init": "rlflow sends and reads tokens",
    "dtype": "the model's dtype",
    "device": "the devices of the pool",
    "base_gpu_id": "the devices of the pool",
    "gpu_id_step": "the devices of the pool",
    "tp_size": "tp= of the placement",
    "tp": "tp= of the placement",
    "dp_size": "replicas over the pool",
    "dp": "replicas over the pool",
    "pp_size": "tp= of the placement",
    "pp": "tp= of the placement",
    "nnodes": "the devices of the pool",
    "node_rank": "the devices of the pool",
    "dist_init_addr": "the devices of the pool",
    "random_seed": "the config's seed",
    "load_format": "the model's init",
    "lora_paths": "the model's lora",
    "enable_lora": "the model's lora",
    "max_lora_rank": "the model's lora",
    "lora_target_modules": "the model's lora",
    "max_loras_per_batch": "the model's lora",
    "max_loaded_loras": "the model's lora",
    "host": "no port is opened",
    "port": "no port is opened",
    "nccl_port": "no port is opened",
    "disable_cuda_graph": "cuda_graph=",
    "enable_deterministic_inference": "deterministic=",
    "enable_memory_saver": "memory_saver=",
    "enable_weights_cpu_backup": "the plan's sleeps",
    "custom_weight_loader": "rlflow brings the weights",
    "enable_return_routed_experts": "routing= of the rollout",
    "speculative_algorithm": "speculative=, or drafter= of the rollout",
    "speculative_draft_model_path": "speculative=, or drafter= of the rollout",
    "speculative_num_steps": "speculative=, or drafter= of the rollout",
    "speculative_num_draft_tokens": "speculative=, or drafter= of the rollout",
    "speculative_eagle_topk": "speculative=, or drafter= of the rollout",
}

SAID_ELSEWHERE_VLLM = {
    "model": "the model's path",
    "tokenizer": "the model's path",
    "skip_tokenizer_init": "rlflow sends and reads tokens",
    "dtype": "the model's dtype",
    "seed": "the config's seed",
    "load_format": "the model's init",
    "enable_lora": "the model's lora",
    "tensor_parallel_size": "tp= of the placement",
    "pipeline_parallel_size": "tp= of the placement",
    "data_parallel_size": "replicas over the pool",
    "nnodes": "the devices of the pool",
    "node_rank": "the devices of the pool",
    "master_addr": "the devices of the pool",
    "master_port": "no port is opened",
    "max_model_len": "context_length=",
    "max_num_seqs": "max_running_requests=",
    "enforce_eager": "cuda_graph=",
    "gpu_memory_utilization": "mem_fraction_static=",
    "num_gpu_blocks_override": "max_total_tokens=",
    "kv_cache_memory_bytes": "max_total_tokens=",
    "enable_sleep_mode": "memory_saver=",
    "logprobs_mode": "log-probs are those at the sampling temperature",
    "worker_extension_cls": "rlflow brings the weights",
    "quantization": "the model's dtype: weights arrive in it",
    "speculative_config": "rlflow sends no drafters to it",
}


@register_engine
class SGLang(EngineOptions):
    """SGLang as a rollout engine, in a process of its own. What is None is derived by the plan.

    The pool of keys and values has `max_total_tokens` tokens. Without a number it has what
    `mem_fraction_static` of a device's memory leaves beside the weights, or else as many as the
    rollouts need at the most. `python` is the interpreter that SGLang is installed for: by default
    that of the variable RLFLOW_SGLANG_PYTHON, or this one. It has `start_seconds` to start. With
    `memory_saver` weights and pool can be freed while the engine is idle; None means where the
    plan has it sleep. `deterministic` makes samples independent of the rest of the batch, on
    accelerators. `args` are further arguments of SGLang's server, under its own names.

    `updates` is how new weights reach it: in buckets in the memory of the "device", which the
    engine opens where they are; by "memory" that worker and engine map, by a broadcast in a process
    "group", or by a file on "disk", in `updates_dir` or a directory that is removed with the
    engine. None means "device" on accelerators, for whole models without a drafter, else "group"
    for a replica over several hosts and "memory" for others.

    With `quantization="fp8"` it holds the weights of linear layers as 8-bit floats with a scale
    for each block of 128 x 128, which updates bring: a bfloat16 model, by the device.

    `speculative` drafts with a model that is not trained. A trained one is given to the rollout:
    `ops.rollout(..., drafter=)`. With `routed_experts` it keeps which experts tokens chose, as it
    does for a rollout with `routing="record"`.
    """

    engine: ClassVar[str] = "sglang"
    title: ClassVar[str] = "SGLang"
    loader: ClassVar[str] = "rlflow.engines.process.client.load:load_sglang"
    packages: ClassVar[tuple[str, ...]] = ("sglang", "torch", "transformers")
    install: ClassVar[str] = (
        "pip install -e '.[sglang]'   or, on a CPU, scripts/sglang_cpu.sh ENV, "
        "then export RLFLOW_SGLANG_PYTHON=ENV/bin/python"
    )
    said_elsewhere: ClassVar[Mapping[str, str]] = SAID_ELSEWHERE
    adapted: ClassVar[tuple[str, ...]] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    drafts: ClassVar[bool] = True
    routes: ClassVar[bool] = True

    max_running_requests: Positive | None = None
    context_length: Positive | None = None
    attention_backend: str | None = None
    cuda_graph: bool = True
    quantization: Quantization | None = None
    deterministic: bool = False
    speculative: Speculative | None = None
    updates: Updates | None = None
    updates_dir: str | None = None
    routed_experts: bool = False

    @model_validator(mode="after")
    def _directory_for_disk(self) -> Self:
        """A directory is for updates by disk, and the same from everywhere; PlanError E670."""
        said = self.updates_dir
        if said is None or (self.updates == "disk" and PurePath(said).is_absolute()):
            return self
        raise PlanError(
            Finding(
                code="E670",
                what=f"rf.SGLang(updates_dir={said!r}) would do nothing"
                if self.updates != "disk"
                else f"rf.SGLang(updates_dir={said!r}) is another directory for every process",
                got=f"updates={self.updates!r}",
                expected='an absolute path, with updates="disk"',
                fix='rf.SGLang(updates="disk", updates_dir="/shared/weights")',
            )
        )

    def way(self, hosts: int) -> Updates:
        """How weights get from the host's copy to a replica whose ranks are on that many hosts.

        Where updates come by the device that fills an engine that was lost or wakes.
        """
        said = None if self.updates == "device" else self.updates
        return said or ("memory" if hosts == 1 else "group")

    def host_findings(self, name: str, hosts: int) -> list[Finding]:
        """What keeps a replica from lying on so many hosts: memory, or files, of one of them."""
        if hosts == 1:
            return []
        way = self.way(hosts)
        own = way == "disk" and self.updates_dir is None
        if way != "memory" and not own:
            return []
        missing = "the memory of its worker" if way == "memory" else "a directory of its worker"
        return [
            Finding(
                code="E671",
                what=f"weights cannot reach {name}, whose ranks are on {hosts} hosts, "
                f"through {missing}",
                got=f"updates={way!r}" + ", no updates_dir" * own,
                expected='updates="group", or updates="disk" with a directory that all hosts share',
                fix='rf.SGLang(updates="group")',
            )
        ]

    def unseeded(self, *, on_cpu: bool) -> str:
        """SGLang draws by seeds on accelerators alone, and there when it is deterministic."""
        if on_cpu:
            return " on CPU: SGLang ignores seeds there"
        if self.deterministic:
            return ""
        return (
            ": what SGLang draws depends on what else is in a batch; "
            "rf.SGLang(deterministic=True) ends that"
        )

    def distorted(self, temperature: float, *, on_cpu: bool) -> str:
        """On a CPU SGLang keeps drafts by the likeliest token, as if the temperature were 0."""
        wrong = on_cpu and temperature > 0
        return "on a CPU SGLang verifies drafts greedily, whatever the temperature" if wrong else ""


@register_engine
class VLLM(EngineOptions):
    """vLLM as a rollout engine, in a process of its own. What is None is derived by the plan.

    The pool of keys and values has `max_total_tokens` tokens. Without a number it has what
    `mem_fraction_static` of a device's memory leaves beside the weights, or else as many as the
    rollouts need at the most. `python` is the interpreter that vLLM is installed for: by default
    that of the variable RLFLOW_VLLM_PYTHON, or this one. It has `start_seconds` to start. With
    `memory_saver` weights and pool can be freed while the engine is idle; None means where the
    plan has it sleep. Every sample has a seed of its own. `args` are further arguments of vLLM's
    engine, under its own names. `updates` is how new weights reach it: in buckets in the memory of
    the "device", or by "memory" that worker and engine map; None means the first on accelerators.
    """

    engine: ClassVar[str] = "vllm"
    title: ClassVar[str] = "vLLM"
    loader: ClassVar[str] = "rlflow.engines.process.vllm:load_vllm"
    packages: ClassVar[tuple[str, ...]] = ("vllm", "torch", "transformers")
    install: ClassVar[str] = (
        "pip install -e '.[vllm]'   or, on a CPU, scripts/vllm_cpu.sh ENV, "
        "then export RLFLOW_VLLM_PYTHON=ENV/bin/python"
    )
    said_elsewhere: ClassVar[Mapping[str, str]] = SAID_ELSEWHERE_VLLM

    max_running_requests: Positive | None = None
    context_length: Positive | None = None
    cuda_graph: bool = True
    updates: VLLMUpdates | None = None
