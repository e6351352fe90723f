"""Rollout engines beside the embedded one, and their options, as values.

Nothing here knows what an engine does with an option, or whether one is installed.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rlflow.errors import Finding, PlanError, near_names

Engine = Literal["torch", "sglang"]
ENGINES: tuple[Engine, ...] = ("torch", "sglang")

Positive = Annotated[int, Field(ge=1)]

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
    "host": "no port is opened",
    "port": "no port is opened",
    "nccl_port": "no port is opened",
    "disable_cuda_graph": "cuda_graph=",
    "enable_deterministic_inference": "deterministic=",
    "enable_memory_saver": "memory_saver=",
    "enable_weights_cpu_backup": "the plan's sleeps",
    "custom_weight_loader": "rlflow brings the weights",
}


class SGLang(BaseModel):
    """SGLang as the engine of a rollout, in a process of its own; what is None is derived.

    The pool of keys and values has `max_total_tokens` tokens, or what `mem_fraction_static` of
    a device's memory leaves beside the weights, or as many as the rollouts need at the most.
    `python` is the interpreter that SGLang is installed for, by default that of the variable
    RLFLOW_SGLANG_PYTHON, or this one; it has `start_seconds` to start. With `memory_saver`
    weights and pool can be given back while the engine waits; None: where the plan has it
    sleep. `deterministic` draws alike whatever else is in a batch, on accelerators. `args` are
    further arguments of its server, by their names there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mem_fraction_static: float | None = Field(default=None, gt=0, lt=1)
    max_total_tokens: Positive | None = None
    max_running_requests: Positive | None = None
    context_length: Positive | None = None
    attention_backend: str | None = None
    cuda_graph: bool = True
    quantization: str | None = None
    deterministic: bool = False
    memory_saver: bool | None = None
    speculative: None = None
    python: str | None = None
    start_seconds: float = Field(default=300.0, gt=0)
    args: dict[str, Any] = Field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @field_validator("args")
    @classmethod
    def _of_its_own(cls, args: dict[str, Any]) -> dict[str, Any]:
        """Plain data under names that nothing else decides; PlanError E246 for any other."""
        findings = [_said_elsewhere(name) for name in args if name in _taken(cls)]
        findings += [_no_data(name, value) for name, value in args.items() if not _plain(value)]
        if findings:
            raise PlanError(*findings)
        return args

    def describe(self) -> str:
        """The printed form: `sglang`, and in brackets what differs from the defaults."""
        said = self.said()
        options = ", ".join(f"{name}={value}" for name, value in said.items())
        return f"sglang({options})" if said else "sglang"

    def said(self) -> dict[str, Any]:
        """What differs from the defaults, as plain data."""
        return self.model_dump(exclude_defaults=True)


def engine_named(value: object) -> object:
    """What `engine=` was given, checked by name; PlanError E245 for an unknown one."""
    if isinstance(value, str) and value not in ENGINES:
        raise PlanError(
            Finding(
                code="E245",
                what=f"there is no engine {value!r}",
                expected=f"{', '.join(ENGINES)}, or rf.SGLang(...)",
                near=near_names(value.lower(), ENGINES),
            )
        )
    return value


def _taken(options: type[BaseModel]) -> set[str]:
    return {*SAID_ELSEWHERE, *options.model_fields}


def _plain(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _said_elsewhere(name: str) -> Finding:
    own = f"{name}= of rf.SGLang"
    return Finding(
        code="E246",
        what=f"rf.SGLang(args=...) sets {name!r}, which is said elsewhere",
        expected=f"it follows from {SAID_ELSEWHERE.get(name, own)}",
    )


def _no_data(name: str, value: object) -> Finding:
    return Finding(
        code="E246",
        what=f"rf.SGLang(args=...) sets {name!r} to what is no plain data",
        got=type(value).__name__,
        expected="numbers, text, lists and dictionaries: they go to another process",
    )
