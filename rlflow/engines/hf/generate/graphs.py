"""Steps of one shape recorded once and replayed: CUDA graphs, where there is CUDA.

A step reads and writes tensors that stay where they are. Its first window of tokens in a shape is
run as it is, which also readies the libraries; then it is recorded, unless it has asked the device
for a number, or moves weights from the host. This file knows no model and no step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlflow.engines.hf.generate.waits import HostWaits

Step = Callable[[], None]
Record = Callable[[Step], Step]


class Replays:
    """Runs a step a number of times, from a recording where there is one of its shape.

    `record` makes one, None never. `addresses` says where the tensors lie that are read: where
    that has changed, as after a sleep that has freed memory, recordings are dropped. Writing to
    weights in place does not change it, so recordings read the new ones.
    """

    def __init__(self, record: Record | None, addresses: Callable[[], tuple[int, ...]]) -> None:
        self.record = record
        self.addresses = addresses
        self.recorded_at: tuple[int, ...] = ()
        self.recorded: dict[tuple[int, int], Step] = {}
        # Shapes that a window was run in, and whether it waited for a number.
        self.seen: dict[tuple[int, int], bool] = {}

    def play(self, shape: tuple[int, int], step: Step, times: int) -> None:
        """Make the step so many times."""
        if self.record is None or not times:
            for _ in range(times):
                step()
            return
        self._forget_what_moved()
        if shape not in self.seen:
            with HostWaits() as waits:
                step()
            self.seen[shape] = waits.count > 0
            for _ in range(times - 1):
                step()
            return
        if not self.seen[shape] and shape not in self.recorded:
            self.recorded[shape] = self.record(step)
        run = self.recorded.get(shape, step)
        for _ in range(times):
            run()

    def _forget_what_moved(self) -> None:
        now = self.addresses()
        if now != self.recorded_at:
            self.recorded.clear()
            self.recorded_at = now


def cuda_graphs() -> Record:
    """Recording into CUDA graphs, of which all have their memory from one pool.

    They are replayed one after the other, so what one leaves there the next may write over. Other
    threads may go on asking CUDA for memory while one is recorded.
    """
    pool = torch.cuda.graph_pool_handle()

    def record(step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            step()
        replay: Step = graph.replay
        return replay

    return record
