"""How an engine in a process of its own serves rows: how many at once, and by which graphs.

It takes a row whenever there is room for it, and the others wait (continuous batching, Yu et al.
2022, section 4). What its options leave to it follows from what the engines do by themselves.
Knows options and sizes; no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlflow.scheduler.costs import measurement_keys as keys
from rlflow.scheduler.costs.drafting import held_weights, token_bytes
from rlflow.scheduler.costs.sizes import Sizes
from rlflow.scheduler.plan.instance import told_options

if TYPE_CHECKING:
    from rlflow.scheduler.devices.measured import Record
    from rlflow.scheduler.plan.instance import Instance

# Rows that an engine computes at once where nothing is said. SGLang has 512 for each context that
# its pool has room for, between two bounds (`model_runner.py`). vLLM has many on devices of so many
# gibibytes that are no A100, else few (`EngineArgs.get_batch_defaults`); but its AsyncLLM, which
# knows no use, takes 128, so it is told. Both have fewer on a CPU.
SGLANG_OF_CONTEXT, SGLANG_LEAST, SGLANG_MOST = 512, 2048, 4096
VLLM_MANY, VLLM_FEW, VLLM_LARGE = 1024, 256, 70
SMALL_BATCHES = ("a100", "a800")
AT_ONCE_ON_CPU = 256
# The same of one that drafts on an accelerator: what SGLang takes then (`speculative_hook.py`).
AT_ONCE_DRAFTING = {"sglang": 48}
# Rows of the largest decode pass that is captured, by the gibibytes of a device, and the same of
# an engine of four ranks and more: SGLang's `handle_gpu_memory_settings`.
CAPTURED = ((20, 8, 8), (35, 48, 160), (60, 32, 160), (160, 256, 512))
CAPTURED_AT_MOST = 512
# vLLM's does not follow the device.
CAPTURED_OF: Mapping[str, tuple[tuple[int, int, int], ...]] = {"vllm": ()}
# Tokens of prompts that are read in one pass, by the gibibytes of a device: SGLang's too. vLLM's
# AsyncLLM reads the fewest that any use does (`SchedulerConfig`).
PREFILL = ((35, 2048), (60, 4096), (160, 8192))
PREFILL_AT_MOST, PREFILL_OF = 16384, {"vllm": 2048}
PREFILL_NAMES = ("chunked_prefill_size", "max_num_batched_tokens")
# Bytes of graphs for each of these rows: what SGLang's `reserve_for_graph_mb` keeps free.
GRAPH_BYTES = 2 << 20
# Seconds of a step in which the host schedules and the device waits, and of each row: pages,
# samples and outputs of one request after the other in Python. An engine that did not overlap them
# had 5 to 13 ms (vLLM, issue 6854); today's update of outputs is 1.1 us a row (vLLM, pull request
# 46112), all of a step in its scheduler some 13 us a row (a profile of vLLM 0.27 on a CPU).
STEP, STEP_ROW = 5e-4, 1.2e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A replica: `slots` rows at once at the most, and what a pool of `pool` tokens has room for.

    None is no such limit. Decode passes of at most `captured` rows are replayed from graphs, and
    prompts are read in passes of `prefill` tokens.
    """

    slots: int | None = None
    pool: float | None = None
    captured: int = 0
    prefill: int = 8192

    def rows(self, rows: float) -> float:
        """How many of so many rows are computed at once, if the pool has room."""
        return rows if self.slots is None else min(rows, float(self.slots))

    def at_once(self, rows: float, tokens: float) -> float:
        """How many of so many rows are computed at once, each with so many tokens in the pool."""
        found = self.rows(rows)
        if self.pool is not None and found * tokens > self.pool:
            found = float(max(int(self.pool / tokens), 1))
        return found

    def scheduled(self, rows: float) -> float:
        """Seconds until the next step of so many rows is on its way."""
        return STEP + STEP_ROW * rows

    @property
    def graph_bytes(self) -> int:
        """Bytes that captured graphs take on each device."""
        return GRAPH_BYTES * self.captured


def serving_of(instance: Instance, sizes: Sizes) -> Serving | None:
    """How an engine serves; None for one in its worker's process."""
    if not instance.engine_plan.own_process:
        return None
    options = instance.engine_plan.settings
    kind, captured = sizes.cluster.kind_of(instance.devices[0]), 0
    on_cpu = kind.name == "cpu"
    slots, pool = slots_of(instance, sizes), pool_tokens(instance, sizes)
    if not on_cpu and getattr(options, "cuda_graph", False):
        most = _captured(instance, kind.memory)
        captured = most if slots is None else min(most, slots)
    prefill = prefill_of(instance, kind.memory)
    return Serving(slots=slots, pool=pool, captured=captured, prefill=prefill)


def slots_of(instance: Instance, sizes: Sizes) -> int | None:
    """Rows that an engine computes at once at the most, as its options say or as it does itself."""
    engine, kind = instance.engine_plan, sizes.cluster.kind_of(instance.devices[0])
    said: int | None = getattr(engine.options, "max_running_requests", None)
    if said is not None or not engine.own_process:
        return said
    if kind.name == "cpu":
        return AT_ONCE_ON_CPU
    if engine.drafts and engine.name in AT_ONCE_DRAFTING:
        return AT_ONCE_DRAFTING[engine.name]
    by_itself = AT_ONCE.get(engine.name)
    return None if by_itself is None else by_itself(instance, sizes)


def _vllm_slots(instance: Instance, sizes: Sizes) -> int:
    """Rows that vLLM computes at once, by the kind of its devices."""
    kind = sizes.cluster.kind_of(instance.devices[0])
    large = kind.memory >= VLLM_LARGE * 2**30 and kind.chip not in SMALL_BATCHES
    return VLLM_MANY if large else VLLM_FEW


def _sglang_slots(instance: Instance, sizes: Sizes) -> int:
    """Rows that SGLang computes at once, by its pool and the model's context."""
    pool, shape = pool_tokens(instance, sizes), sizes.shapes[instance.model]
    if pool is None or shape is None:
        return SGLANG_LEAST
    context = getattr(instance.engine_plan.options, "context_length", None) or shape.context
    return min(max(int(SGLANG_OF_CONTEXT * pool / context), SGLANG_LEAST), SGLANG_MOST)


AT_ONCE: Mapping[str, Callable[[Instance, Sizes], int]] = {
    "sglang": _sglang_slots,
    "vllm": _vllm_slots,
}
# Engines that take what is right on few devices where they are told nothing.
TOLD = frozenset({"vllm"})


def with_slots(instance: Instance, sizes: Sizes) -> Instance:
    """An engine on an accelerator, told how many rows it computes at once where it has to be.

    SGLang takes far fewer rows where it drafts, 48, since each then brings several tokens to a
    pass and logits of each. That is its own choice and stays so; said, it is what runs. vLLM would
    take 128 whatever the device.
    """
    engine = instance.engine_plan
    if sizes.cluster.kind_of(instance.devices[0]).name == "cpu":
        return instance
    if engine.name not in TOLD and not (engine.name in AT_ONCE_DRAFTING and engine.drafts):
        return instance
    return told_options(instance, max_running_requests=slots_of(instance, sizes))


def prefill_of(instance: Instance, memory: float) -> int:
    """Tokens of prompts that an engine reads in one pass, as it is told or does by itself."""
    engine = instance.engine_plan
    told = getattr(engine.options, "args", {})
    said = next((int(told[name]) for name in PREFILL_NAMES if told.get(name)), 0)
    own = next((t for gibibytes, t in PREFILL if memory < gibibytes * 2**30), PREFILL_AT_MOST)
    return said if said > 0 else PREFILL_OF.get(engine.name, own)


def pool_tokens(instance: Instance, sizes: Sizes) -> float | None:
    """Tokens that an engine's pool has room for; None where nothing is said of it."""
    size = pool_size(instance, sizes)
    return None if size is None else size / token_bytes(instance, sizes)


def pool_size(instance: Instance, sizes: Sizes) -> float | None:
    """Bytes of the pool on each device, for all models in the engine; None where nothing is said.

    Of its tokens, or what a fraction of the memory leaves: as an earlier run has measured that.
    """
    if not instance.engine_plan.own_process:
        return None
    options, limits = instance.engine_plan.settings, []
    each = token_bytes(instance, sizes)
    if options.max_total_tokens is not None:
        limits.append(options.max_total_tokens * each)
    if options.mem_fraction_static is not None:
        record = sizes.cluster.measured.find(pool_key(sizes, instance), sizes.setting)
        memory = min(sizes.cluster.kind_of(device).memory for device in instance.devices)
        left = options.mem_fraction_static * memory - (held_weights(instance, sizes) or 0)
        limits.append(max(left, 0.0) if record is None else record.held * each)
    return min(limits, default=None)


def pool_record(instance: Instance, sizes: Sizes) -> Record | None:
    """The tokens that an earlier run has measured of a pool whose size is left to the engine."""
    if not instance.engine_plan.share_decides:
        return None
    return sizes.cluster.measured.find(pool_key(sizes, instance), sizes.setting)


def pool_key(sizes: Sizes, instance: Instance) -> str:
    """What the tokens of an engine's pool are measured under, where a share of memory decides."""
    memory = min(sizes.cluster.kind_of(device).memory for device in instance.devices)
    share = instance.engine_plan.settings.mem_fraction_static
    what = f"tokens of an engine's pool, {share} of {memory:.0f} bytes"
    return keys.key_of_parts(engine_key(sizes, instance), what)


def engine_key(sizes: Sizes, instance: Instance) -> str:
    """An engine in words of a key: its device, its backend, its models and how they lie."""
    device = sizes.cluster.kind_of(instance.devices[0])
    return keys.key_of_parts(
        keys.hardware(device.name, sizes.cluster.threads),
        sizes.backend,
        keys.model(sizes.graph.model(instance.model), sizes.shapes[instance.model], instance)
        + keys.drafter(sizes.graph, sizes.shapes, instance.drafter),
    )


def _captured(instance: Instance, memory: float) -> int:
    """Rows of the largest decode pass that an engine captures by itself."""
    for gibibytes, few, many in CAPTURED_OF.get(instance.engine_plan.name, CAPTURED):
        if memory < gibibytes * 2**30:
            return many if instance.tp >= 4 else few
    return CAPTURED_AT_MOST
