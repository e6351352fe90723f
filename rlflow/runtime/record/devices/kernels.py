"""The kernels of chosen actions: torch.profiler around what a worker does, one file each.

A file is a Chrome trace as torch writes it. It says of itself which action instance it is of and
when, by the wall clock, its mark began, so that a trace of the run can lay it beside the spans.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rlflow.runtime.record.devices.profiled import MARK, SAID, ProfiledActions
from rlflow.runtime.record.lines.clock import clock

T = TypeVar("T")

# torch has one profiler a process.
_ONE = threading.Lock()


def ready_profiler(profiled: ProfiledActions | None) -> None:
    """Start torch's profiler once, where actions will be recorded: seconds that none of them takes.

    It has to be first started by the thread that loaded torch, or it prints an error.
    """
    if profiled is None:
        return
    # Else the profiler tells the terminal that it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with _ONE, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        pass


def with_kernels(
    profiled: ProfiledActions | None,
    call: Callable[[], T],
    action: str,
    iteration: int,
    device: int,
) -> T:
    """What `call` returns; its kernels are written to a file where the action instance is due.

    What is recorded are the operators of the thread that calls, of the threads of its backward,
    and on CUDA devices the kernels.
    """
    if profiled is None or not profiled.due(action, iteration):
        return call()
    path = profiled.path(action, iteration, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if profiled.cuda:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with _ONE:
        recorder: Any = torch.profiler.profile(activities=kinds, record_shapes=True)
        with recorder:
            began = clock()
            with torch.profiler.record_function(MARK):
                made = call()
            said = {"action": action, "iteration": iteration, "device": device, "began": began}
            recorder.add_metadata_json(SAID, json.dumps(said))
        temporary = path.with_name(f"{path.name.removesuffix('.json.gz')}.tmp.gz")
        recorder.export_chrome_trace(str(temporary))
        temporary.rename(path)
    return made
