"""How an engine in a process of its own serves rows: how many at once, and by which graphs.

It takes a row whenever there is room for it, and the others wait (continuous batching, Yu et al.
2022, section 4). What its options leave to it follows from what the engines do by themselves.
Knows options and sizes; no plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlflow.scheduler.costs import measurement_keys as keys
from rlflow.scheduler.costs.drafting import held_weights, token_bytes
from rlflow.scheduler.costs.sizes import Sizes
from rlflow.scheduler.plan.instance import told_options

if TYPE_CHECKING:
    from rlflow.scheduler.devices.measured import Record
    from rlflow.scheduler.plan.instance import Instance

# Rows that an engine computes at once where nothing is said: `max_running_requests` of SGLang,
# whose pool ends before that, `max_num_seqs` of vLLM's AsyncLLM; both have fewer on a CPU.
AT_ONCE = {"sglang": 2048, "vllm": 128}
AT_ONCE_ON_CPU = 256
# The same of one that drafts on an accelerator: what SGLang takes then (`speculative_hook.py`).
AT_ONCE_DRAFTING = {"sglang": 48}
# Rows of the largest decode pass that is captured, by the gibibytes of a device, and the same of
# an engine of four ranks and more: SGLang's `handle_gpu_memory_settings`.
CAPTURED = ((20, 8, 8), (35, 48, 160), (60, 32, 160), (160, 256, 512))
CAPTURED_AT_MOST = 512
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

    None is no such limit. Decode passes of at most `captured` rows are replayed from graphs.
    """

    slots: int | None = None
    pool: float | None = None
    captured: int = 0

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
    slots = slots_of(instance, on_cpu=on_cpu)
    if not on_cpu and getattr(options, "cuda_graph", False):
        most = _captured(instance.tp, kind.memory)
        captured = most if slots is None else min(most, slots)
    size, each = pool_size(instance, sizes), token_bytes(instance, sizes)
    pool = None if size is None else size / each
    return Serving(slots=slots, pool=pool, captured=captured)


def slots_of(instance: Instance, *, on_cpu: bool) -> int | None:
    """Rows that an engine computes at once at the most, as its options say or as it does itself."""
    engine = instance.engine_plan
    said: int | None = getattr(engine.options, "max_running_requests", None)
    if said is not None or not engine.own_process:
        return said
    if on_cpu:
        return AT_ONCE_ON_CPU
    alone = AT_ONCE.get(engine.name)
    return AT_ONCE_DRAFTING.get(engine.name, alone) if engine.drafts else alone


def with_slots(instance: Instance, *, on_cpu: bool) -> Instance:
    """An engine that drafts on an accelerator, told how many rows it computes at once.

    SGLang takes far fewer rows where it drafts, 48, since each then brings several tokens to a
    pass and logits of each. That is its own choice and stays so; said, it is what runs.
    """
    engine = instance.engine_plan
    if on_cpu or engine.name not in AT_ONCE_DRAFTING or not engine.drafts:
        return instance
    return told_options(instance, max_running_requests=slots_of(instance, on_cpu=on_cpu))


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


def _captured(tp: int, memory: float) -> int:
    """Rows of the largest decode pass that an engine captures by itself."""
    for gibibytes, few, many in CAPTURED:
        if memory < gibibytes * 2**30:
            return many if tp >= 4 else few
    return CAPTURED_AT_MOST
