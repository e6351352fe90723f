"""The GPUs of this machine by NVML or `nvidia-smi`, their kinds, and its processor's instructions.

Asked without torch, and never fatal: where neither answers, there is no GPU.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rlflow.scheduler.devices.hardware import GB, KINDS, RESERVE, Kind

SECONDS = 10.0
MIB = 2**20
# Chips that have a number of the table in their names and fewer cores than it says.
OTHER_CHIP = re.compile(r"4090 (D|Laptop)\b")
QUERY = ("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU by the name that its driver gives it; memory in bytes."""

    name: str
    memory: float

    @property
    def kind(self) -> Kind | None:
        """Its kind in the table, with less memory where it has less; None for another."""
        named = re.search(rf"\b({'|'.join(KINDS)})\b", self.name.lower().replace("rtx ", "rtx"))
        if named is None or OTHER_CHIP.search(self.name):
            return None
        kind = KINDS[named[1]]
        return kind if self.memory >= kind.memory else replace(kind, memory=self.memory)


@cache
def machine_flags() -> frozenset[str]:
    """The processor's instructions as Linux names them; none where it does not say."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    return frozenset(next(found, ()))


def machine_gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process may use: `CUDA_VISIBLE_DEVICES` and `RLFLOW_GPUS=off` heeded."""
    if os.environ.get("RLFLOW_GPUS") == "off":
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "none"):
        return ()
    found = _by_nvml() or _by_program()
    return found if visible is None else found[: len(visible.split(","))]


def _by_nvml() -> tuple[Gpu, ...]:
    """What NVML says, through `nvidia-ml-py` where that is installed."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return ()
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
        return tuple(
            Gpu(
                name=str(nvml.nvmlDeviceGetName(handle)),
                memory=float(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            )
            for handle in handles
        )
    except nvml.NVMLError:
        return ()


def _by_program() -> tuple[Gpu, ...]:
    """What `nvidia-smi` says, which comes with the driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        done = subprocess.run(  # noqa: S603  a fixed program with fixed arguments
            [program, *QUERY], capture_output=True, text=True, timeout=SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [line.rpartition(",") for line in done.stdout.splitlines()]
    return tuple(
        Gpu(name=name.strip(), memory=float(size) * MIB)
        for name, _, size in rows
        if size.strip().isdigit()
    )


def usable(gpus: tuple[Gpu, ...]) -> tuple[Kind, int] | None:
    """The kind of the first GPU and how many there are of it; None where no kind is known."""
    kind = gpus[0].kind if gpus else None
    return None if kind is None else (kind, sum(gpu.kind == kind for gpu in gpus))


def chosen_text(gpus: tuple[Gpu, ...]) -> str:
    """What a command without `--devices` takes, in words."""
    found = usable(gpus)
    if found is not None:
        return f"{len(gpus)} x {gpus[0].name}: taken as {found[0].name}:{found[1]}"
    if gpus:
        left = gpus[0].memory * (1 - RESERVE) / GB
        return (
            f"{len(gpus)} x {gpus[0].name}, of no known kind: CPU devices are taken; "
            f"--devices a100:1@{left:.0f}GB takes it with the figures of another"
        )
    return "none on this machine: CPU devices are taken"
