"""How an engine in a process of its own serves rows: how many at once, and by which graphs.

It takes a row whenever there is room for it, and the others wait (continuous batching, Yu et al.
2022, section 4). What its options leave to it follows from what the engines do by themselves.
Knows options; neither models nor plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.graph.engine_options import EngineOptions
from rlflow.scheduler.hardware import Kind
from rlflow.scheduler.instance import Instance

# Rows that an engine computes at once where nothing is said: `max_running_requests` of SGLang,
# whose pool ends before that, `max_num_seqs` of vLLM's AsyncLLM; both have fewer on a CPU.
AT_ONCE = {"sglang": 2048, "vllm": 128}
AT_ONCE_ON_CPU = 256
# Rows of the largest decode pass that is captured, by the gibibytes of a device, and the same of
# an engine of four ranks and more: SGLang's `handle_gpu_memory_settings`.
CAPTURED = ((20, 8, 8), (35, 48, 160), (60, 32, 160), (160, 256, 512))
CAPTURED_AT_MOST = 512
# Bytes of graphs for each of these rows: what SGLang's `reserve_for_graph_mb` keeps free.
GRAPH_BYTES = 2 << 20
# Options that change neither how long an engine's work takes nor what its process holds; the
# pool counts by the rows that it has room for.
BESIDE_TIME = {
    "python",
    "start_seconds",
    "memory_saver",
    "max_total_tokens",
    "mem_fraction_static",
}


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


def serving_of(instance: Instance, kind: Kind, held: int, each: float) -> Serving | None:
    """How an engine serves that holds so many bytes of weights, and of each token in its pool.

    None for one that generates in its worker's process.
    """
    options = instance.options
    if options is None:
        return None
    on_cpu = kind.name == "cpu"
    said: int | None = getattr(options, "max_running_requests", None)
    slots = said or (AT_ONCE_ON_CPU if on_cpu else AT_ONCE.get(options.engine))
    captured = 0
    if not on_cpu and getattr(options, "cuda_graph", False):
        most = _captured(instance.tp, kind.memory)
        captured = most if slots is None else min(most, slots)
    size = pool_size(options, kind.memory, held, each)
    return Serving(slots=slots, pool=None if size is None else size / each, captured=captured)


def pool_size(options: EngineOptions, memory: float, held: int, each: float) -> float | None:
    """Bytes of the pool: of its tokens, or what a fraction leaves; None where neither is said."""
    sizes = []
    if options.max_total_tokens is not None:
        sizes.append(options.max_total_tokens * each)
    if options.mem_fraction_static is not None:
        sizes.append(max(options.mem_fraction_static * memory - held, 0.0))
    return min(sizes, default=None)


def _captured(tp: int, memory: float) -> int:
    """Rows of the largest decode pass that an engine captures by itself."""
    for gibibytes, few, many in CAPTURED:
        if memory < gibibytes * 2**30:
            return many if tp >= 4 else few
    return CAPTURED_AT_MOST


def timed(options: EngineOptions) -> Mapping[str, Any]:
    """What is said of an engine that changes how long its work takes."""
    return {name: value for name, value in options.said().items() if name not in BESIDE_TIME}
