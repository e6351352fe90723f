"""`rlflow doctor --measure`: what this machine's devices do, and the file that declares it.

Says what it does on standard error. The figures of a kind are those that the estimates read; the
timings behind them are in the file too. Torch is imported once something is measured.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.cli.shell.printed import json_text
from rlflow.scheduler.devices.cluster import HOST_MEMORY_SHARE, machine_cores, machine_memory
from rlflow.scheduler.devices.declared import check_device_path
from rlflow.scheduler.devices.efficiency import LAYER_SHAPES
from rlflow.scheduler.devices.hardware import KINDS
from rlflow.scheduler.devices.machine import Gpu

if TYPE_CHECKING:
    from rlflow.runtime.measuring import DeviceTiming

BUDGET = {"cpu": 40.0, "cuda": 120.0}
# 25 Gb/s, and links of PCIe where there is one device: assumed where nothing is known.
NIC = 3.125e9
LEAST_SECONDS = 1e-7
DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachine:
    """Devices of this machine and their timings: `kind` is `cpu` or `cuda`."""

    kind: str
    name: str
    base: str
    count: int
    threads: int
    memory: float
    timings: tuple[DeviceTiming, ...]

    def toml(self) -> str:
        """The file that `--devices` takes."""
        head = [
            "# Written by `rlflow doctor --measure`. Bytes, flop/s, B/s, seconds.",
            f'devices = "{self.name}:{self.count}"',
            "",
            "[host]",
        ]
        if self.kind == "cpu":
            head += [f"cores = {machine_cores()}"]
        else:
            head += [f"memory = {_number(HOST_MEMORY_SHARE * machine_memory())}"]
        head += ["", f"[kinds.{self.name}]"]
        if self.base:
            head += [f'base = "{self.base}"']
        head += [f'source = "measured by rlflow doctor, {self.count} devices"']
        head += [f"{name} = {_number(value)}" for name, value in self.figures().items()]
        for timing in self.timings:
            head += [
                "",
                f"[[kinds.{self.name}.measured]]",
                f'what = "{timing.what}"',
                f"size = {timing.size}",
                f"rate = {_number(timing.rate)}",
                f"seconds = {_number(timing.seconds)}",
            ]
        return "\n".join(head) + "\n"

    def figures(self) -> dict[str, float]:
        """The figures of a kind by these timings; what was not measured is left to the base."""
        found = self._figures_of_one() | self._figures_of_many()
        if self.kind == "cpu":
            return {"threads": self.threads, **found}
        found |= {"memory": self.memory, "reached": 1.0, "sustained": LAYER_SHAPES}
        if not self.base:
            found.setdefault("host_link", NIC)
            found = {"link": found["host_link"], "nic": NIC, **found}
        return found

    def _figures_of_one(self) -> dict[str, float]:
        best = {
            "flops": self._largest("product bfloat16"),
            "flops32": self._largest("product float32"),
            "flops_tf32": self._largest("product tf32"),
            "bandwidth": self._largest("copy"),
            "host_link": min(self._largest("h2d pinned"), self._largest("d2h pinned")),
            "launch": self._seconds("launch"),
            "replayed": self._seconds("replayed"),
        }
        if self.kind == "cpu":
            best |= {"link": best["bandwidth"], "host_link": best["bandwidth"]}
            best["weights"] = self._weights(best["flops32"])
        return {name: value for name, value in best.items() if value}

    def _weights(self, flops: float) -> float:
        """B/s at which a product reads its weights, beside the time that it computes."""
        rows = self._rows("weights")
        if not rows or not flops:
            return 0.0
        (row,) = rows
        computed = 2 * row.size / 4 / flops
        return row.size / max(row.seconds - computed, row.seconds / 2)

    def _figures_of_many(self) -> dict[str, float]:
        """Of an all-gather around a ring: a start, a step a rank, bytes over the slowest link."""
        rows = self._rows("all_gather")
        if len(rows) < 2 or self.count < 2:
            return {}
        first, last = rows[0], rows[-1]
        share = (self.count - 1) / self.count
        wire = max(last.seconds - first.seconds, last.seconds / 2)
        # The least all-gather is told apart into start and steps as the table has them.
        start = first.seconds / (1 + (self.count - 1) / 10)
        hop = (first.seconds - start) / (self.count - 1)
        bus = share * last.size / wire
        found = {"bus": bus, "latency": max(start, LEAST_SECONDS), "hop": max(hop, LEAST_SECONDS)}
        return found if self.kind == "cpu" else {"link": bus, **found}

    def _rows(self, what: str) -> list[DeviceTiming]:
        return [timing for timing in self.timings if timing.what == what]

    def _largest(self, what: str) -> float:
        rows = self._rows(what)
        return max(rows, key=lambda timing: timing.size).rate if rows else 0.0

    def _seconds(self, what: str) -> float:
        rows = self._rows(what)
        return rows[0].seconds if rows else 0.0


def measure_here(output: str | None, say: Callable[[str], None], *, as_json: bool) -> str:
    """Measure this machine and write the file; returns what goes to standard output."""
    path = None if output is None else Path(output)
    if path is not None:
        check_device_path(path)
    found = measure_machine(say)
    if path is not None:
        path.write_text(found.toml(), encoding="utf-8")
        say(f"wrote {path}")
        say(f"next: rlflow plan PIPELINE --devices {path}")
    if as_json:
        return json_text([asdict(timing) for timing in found.timings]) + "\n"
    return "" if path is not None else found.toml()


def measure_machine(say: Callable[[str], None]) -> MeasuredMachine:
    """Measure this machine's GPUs, or its processor where torch sees none; `say` what is done."""
    say("importing torch")
    import torch

    from rlflow.runtime.measuring import measured

    wanted = os.environ.get("RLFLOW_GPUS") != "off" and torch.cuda.is_available()
    there = torch.cuda.device_count() if wanted else 0
    kind = "cuda" if there else "cpu"
    cores = machine_cores()
    count = there or min(2, cores)
    if there:
        chip = torch.cuda.get_device_properties(0)
        name, memory = str(chip.name), float(chip.total_memory)
        own = Gpu(name=name, memory=memory).kind
        base = own.name if own is not None else ""
    else:
        name, memory, base = "cpu", 0.0, ""
    say(
        f"measuring {count} x {name}: products, copies, launches, collectives; "
        f"{BUDGET[kind]:.0f} s at the most, best on an idle machine"
    )
    timings: list[DeviceTiming] = []
    try:
        for timing in measured(kind, count, cores, BUDGET[kind]):
            say(timing.line())
            timings.append(timing)
    except RuntimeError as error:
        say(f"left out, with what comes after it: {error}")
    return MeasuredMachine(
        kind=kind,
        name=base or short_name(name),
        base=base,
        count=count,
        threads=cores,
        memory=memory,
        timings=tuple(timings),
    )


def short_name(name: str) -> str:
    """A device's name as one of a kind: `l4` of `NVIDIA L4`, `rtx3090` of a GeForce."""
    words = [word for word in re.findall(r"[a-z0-9]+", name.lower()) if word != "nvidia"]
    joined = "".join(word for word in words if word != "geforce") or "device"
    joined = joined if joined[0].isalpha() else f"k{joined}"
    return f"{joined}card" if joined in KINDS or joined == "gpu" else joined


def _number(value: float) -> str:
    """A number as TOML has it, with as many digits as a measurement is worth."""
    return str(value) if isinstance(value, int) else f"{value:.{DIGITS}g}"
