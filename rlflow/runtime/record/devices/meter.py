"""The meter of one process: what its device did while an action ran.

On a GPU memory by the allocator, seconds by events, and what the driver's library says; on a CPU
the most memory that the process had. One event is waited for after each action, none within.
"""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from rlflow.runtime.record.devices.nvml import NvmlGpu

T = TypeVar("T")

RSS_UNIT = 1 if sys.platform == "darwin" else 1024


class DeviceMeter:
    """Figures of the actions that run in this process on `device`, `cpu` or `cuda:0`."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._gpu: NvmlGpu | None = None
        if self._device.type == "cuda":
            chip: Any = torch.cuda.get_device_properties(self._device)
            uuid = str(getattr(chip, "uuid", "")).removeprefix("GPU-")
            self._gpu = NvmlGpu.found(f"GPU-{uuid}")
        self._noted = threading.local()

    def note(self, work: Mapping[str, float]) -> None:
        """Figures of the rows that the action of this thread has made."""
        self._noted.work = work

    def around(self, call: Callable[[], T], *, beside: bool = False) -> tuple[T, dict[str, float]]:
        """What a call returns, and the figures of the device while it ran.

        `beside` others, as copies run, it leaves the peak of the allocator to them.
        """
        self._noted.work = {}
        if self._device.type != "cuda":
            made = call()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
            return made, {"peak_rss": float(peak), **self._noted.work}
        before = torch.cuda.memory_allocated(self._device)
        if not beside:
            torch.cuda.reset_peak_memory_stats(self._device)
        event: Any = torch.cuda.Event  # untyped in torch
        first, last = event(enable_timing=True), event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        first.record(stream)
        made = call()
        last.record(stream)
        last.synchronize()
        figures = {
            "device_seconds": first.elapsed_time(last) / 1e3,
            "allocated_before": float(before),
            "allocated": float(torch.cuda.memory_allocated(self._device)),
            "reserved": float(torch.cuda.memory_reserved(self._device)),
        }
        if not beside:
            figures["peak"] = float(torch.cuda.max_memory_allocated(self._device))
        driver = {} if self._gpu is None else self._gpu.figures()
        return made, {**figures, **driver, **self._noted.work}
