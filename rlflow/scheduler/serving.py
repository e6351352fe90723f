"""How an engine in a process of its own serves rows: how many at once, and by which graphs.

It takes a row whenever there is room for it, and the others wait (continuous batching, Yu et al.
2022, section 4). What its options leave to it follows from what the engines do by themselves.
Knows options and sizes; no plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlflow.scheduler import keys
from rlflow.scheduler.inside import drafts, held_weights, token_bytes

if TYPE_CHECKING:
    from rlflow.graph.engine_options import EngineOptions
    from rlflow.scheduler.costs import Costs
    from rlflow.scheduler.instance import Instance
    from rlflow.scheduler.measured import Record
    from rlflow.scheduler.roofline import Roofline

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

    @property
    def graph_bytes(self) -> int:
        """Bytes that captured graphs take on each device."""
        return GRAPH_BYTES * self.captured


def with_serving(roof: Roofline, instance: Instance, costs: Costs) -> Roofline:
    """The roofline of an engine with how it serves; as it is for one in its worker's process."""
    options = instance.options
    if options is None:
        return roof
    on_cpu, captured = roof.kind.name == "cpu", 0
    slots = slots_of(instance, on_cpu=on_cpu)
    if not on_cpu and getattr(options, "cuda_graph", False):
        most = _captured(instance.tp, roof.kind.memory)
        captured = most if slots is None else min(most, slots)
    size, each = pool_size(instance, costs), token_bytes(instance, costs)
    pool = None if size is None else size / each
    return replace(roof, serving=Serving(slots=slots, pool=pool, captured=captured))


def slots_of(instance: Instance, *, on_cpu: bool) -> int | None:
    """Rows that an engine computes at once at the most, as its options say or as it does itself."""
    options = instance.options
    said: int | None = getattr(options, "max_running_requests", None)
    if said is not None or options is None:
        return said
    if on_cpu:
        return AT_ONCE_ON_CPU
    alone = AT_ONCE.get(options.engine)
    return AT_ONCE_DRAFTING.get(options.engine, alone) if drafts(instance) else alone


def with_slots(instance: Instance, *, on_cpu: bool) -> Instance:
    """An engine that drafts on an accelerator, told how many rows it computes at once.

    SGLang takes far fewer rows where it drafts, 48, since each then brings several tokens to a
    pass and logits of each. That is its own choice and stays so; said, it is what runs.
    """
    options, said = instance.options, slots_of(instance, on_cpu=on_cpu)
    if options is None or on_cpu or options.engine not in AT_ONCE_DRAFTING or not drafts(instance):
        return instance
    return replace(instance, options=options.model_copy(update={"max_running_requests": said}))


def pool_size(instance: Instance, costs: Costs) -> float | None:
    """Bytes of the pool on each device, for all models in the engine; None where nothing is said.

    Of its tokens, or what a fraction of the memory leaves: as an earlier run has measured that.
    """
    options, sizes = instance.options, []
    if options is None:
        return None
    each = token_bytes(instance, costs)
    if options.max_total_tokens is not None:
        sizes.append(options.max_total_tokens * each)
    if options.mem_fraction_static is not None:
        record = costs.cluster.measured.find(pool_key(costs, instance), costs.setting)
        memory = min(costs.cluster.kind_of(device).memory for device in instance.devices)
        left = options.mem_fraction_static * memory - (held_weights(instance, costs) or 0)
        sizes.append(max(left, 0.0) if record is None else record.held * each)
    return min(sizes, default=None)


def left_to_engine(options: EngineOptions | None) -> bool:
    """Whether a share of the memory alone decides how many tokens the pool has room for."""
    if options is None:
        return False
    return options.mem_fraction_static is not None and options.max_total_tokens is None


def pool_record(instance: Instance, costs: Costs) -> Record | None:
    """The tokens that an earlier run has measured of a pool whose size is left to the engine."""
    if not left_to_engine(instance.options):
        return None
    return costs.cluster.measured.find(pool_key(costs, instance), costs.setting)


def pool_key(costs: Costs, instance: Instance) -> str:
    """What the tokens of an engine's pool are measured under, where a share of memory decides."""
    options = instance.options
    memory = min(costs.cluster.kind_of(device).memory for device in instance.devices)
    share = None if options is None else options.mem_fraction_static
    what = f"tokens of an engine's pool, {share} of {memory:.0f} bytes"
    return keys.joined(engine_key(costs, instance), what)


def engine_key(costs: Costs, instance: Instance) -> str:
    """An engine in words of a key: its device, its backend, its models and how they lie."""
    device = costs.cluster.kind_of(instance.devices[0])
    return keys.joined(
        keys.hardware(device.name, costs.cluster.threads),
        costs.backend,
        keys.model(costs.graph.model(instance.model), costs.shapes[instance.model], instance)
        + keys.drafter(costs.graph, costs.shapes, instance.drafter),
    )


def _captured(tp: int, memory: float) -> int:
    """Rows of the largest decode pass that an engine captures by itself."""
    for gibibytes, few, many in CAPTURED:
        if memory < gibibytes * 2**30:
            return many if tp >= 4 else few
    return CAPTURED_AT_MOST
