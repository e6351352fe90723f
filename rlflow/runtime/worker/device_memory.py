"""Memory of the device of a process, and when it goes back to other processes.

Torch's caching allocator keeps the segments of freed tensors for later tensors of its own process;
an engine in another process gets nothing of them. Within the process that is right: the
allocator empties its cache by itself before it fails. So a process gives back only on devices
that an engine's process shares, and there after every action that may leave freed segments.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from rlflow.engines.hf.microbatches import ran_out
from rlflow.errors import Finding, RunError
from rlflow.runtime.worker.loaded import Loaded
from rlflow.scheduler.plan.plan import Action, Plan

# What leaves freed memory behind. A wake takes memory, and a transfer's rows lie on the host.
LEAVES = ("run", "reshard", "sleep")


class AcceleratorMemory(Protocol):
    """The memory of one device as this process takes it, all in bytes."""

    def allocated(self) -> int:
        """Bytes of the tensors that live there."""

    def reserved(self) -> int:
        """Bytes that the allocator holds, those of freed tensors among them."""

    def free(self) -> int:
        """Bytes that no process has."""

    def wait(self) -> None:
        """Return once the device has done what this thread computes on it."""

    def give_back(self) -> None:
        """Leave to other processes what no tensor of this one has."""


class CudaMemory:
    """Memory of a CUDA device under torch's caching allocator.

    `give_back` empties the cache. A part in a `torch.cuda.MemPool` of its own would go alone, but
    what an action has computed with stays in the cache as well, tens of GB after an update,
    so the cache has to be emptied in either case. Of weights, master weights, moments and
    gradients each dtype is one buffer; one above 10 MB has segments of its own and goes whole.
    Smaller ones, and shards of FSDP, may share segments of 20 MB with what stays awake: those
    stay, which a plan's reserve is for. `expandable_segments:True` would free such pages too, but
    memory that SGLang's memory saver pauses cannot lie in them (torch_memory_saver issue 24),
    older drivers cannot hand them to another process as CUDA IPC handles, and an engine's process
    inherits the variable that sets them; it is not set. Emptying waits for the device and
    unmaps segment by segment, 10 to 100 ms in all; the next action takes them anew.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def allocated(self) -> int:
        """Bytes of live tensors."""
        return torch.cuda.memory_allocated(self._device)

    def reserved(self) -> int:
        """Bytes of all segments."""
        return torch.cuda.memory_reserved(self._device)

    def free(self) -> int:
        """Bytes that the driver has left."""
        return torch.cuda.mem_get_info(self._device)[0]

    def wait(self) -> None:
        """Wait for the current stream alone: copies beside it have streams of their own.

        So the seconds of an action are its own, and what fails on the device names it.
        """
        torch.cuda.current_stream(self._device).synchronize()

    def give_back(self) -> None:
        """Wait for what is queued, then unmap every segment without a live tensor."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


class ProcessMemory:
    """Memory of a device without a cache of torch's: what is freed is free."""

    def allocated(self) -> int:
        """Nothing is counted."""
        return 0

    def reserved(self) -> int:
        """Nothing is kept."""
        return 0

    def free(self) -> int:
        """Nothing is known."""
        return 0

    def wait(self) -> None:
        """What is computed is done."""

    def give_back(self) -> None:
        """There is nothing to give."""


def device_memory(device: str) -> AcceleratorMemory:
    """The memory of a device by its name, `cuda:0` or `cpu`."""
    return CudaMemory(device) if torch.device(device).type == "cuda" else ProcessMemory()


@contextmanager
def memory_errors(
    action: Action, iteration: int, memory: AcceleratorMemory, trained: Sequence[Loaded]
) -> Iterator[None]:
    """Within it, a device or a host without memory left is RunError E768, and what was taken free.

    The frames of the error have what the action has made so far: they are emptied, and the trained
    models let go of their gradients, the allocator of what it keeps.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        said = (str(error).splitlines() or [""])[0]
        traceback.clear_frames(error.__traceback__)
    else:
        return
    for loaded in trained:
        loaded.trainer.release_gradients()
    memory.give_back()
    devices = ", ".join(map(str, action.devices))
    raise RunError(
        Finding(
            code="E768",
            what=f"{action.id} in iteration {iteration} ran out of memory on device {devices}",
            got=said or "no memory",
            expected=f"{(action.cost.transient or 0) / 1e9:.3g} GB of its own, by the plan",
            fix="--set of a smaller batch, micro_tokens= in rf.on, or more devices",
        )
    )


def leaving_memory(plan: Plan) -> frozenset[str]:
    """The actions that leave memory for which an engine beside them may wait, by their ids.

    Those are what models in a worker's own process do on a device that an engine's process
    shares, and reshards to it, which may be staged there. Which of them an engine waits for
    depends on the order of two lanes; none is left out.
    """
    shared = {device for engine in plan.engines for device in engine.devices}
    outside = {i.name for i in plan.instances if not i.engine_plan.in_process}

    def whose(action: Action) -> str | None:
        return plan.part(action.part).instance if action.part else action.instance

    return frozenset(
        action.id
        for action in plan.actions
        if action.kind in LEAVES and whose(action) in outside and shared & {*action.devices}
    )
