"""How much memory the processes of a group hold, on the host or on CUDA devices.

This file knows no engine.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

QUERY = ("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
SECONDS = 10.0


def held_bytes(group: int, *, cuda: bool) -> int | None:
    """Bytes that a group's processes hold: of devices with `cuda`, else of the host.

    Memory that several share counts once. None where the driver does not tell, as in containers
    with process numbers of their own.
    """
    found = members(group)
    if not cuda:
        return sum(host_bytes(pid) for pid in found)
    held = device_bytes()
    return sum(held[pid] for pid in found if pid in held) or None


def members(group: int) -> list[int]:
    """The processes of a group that are alive, ascending."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            _, _, rest = (entry / "stat").read_text().rpartition(") ")
        except OSError:
            continue
        state, _, leader = rest.split()[:3]
        if int(leader) == group and state not in "ZX":
            found.append(int(entry.name))
    return sorted(found)


def host_bytes(pid: int) -> int:
    """A process's proportional share of the host's memory; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


def device_bytes() -> dict[int, int]:
    """Bytes on all CUDA devices by process, as the driver reports them in time."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    try:
        done = subprocess.run(  # noqa: S603
            [program, *QUERY], capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    held: dict[int, int] = {}
    for line in done.stdout.splitlines():
        pid, _, mebibytes = line.partition(",")
        if pid.strip().isdigit() and mebibytes.strip().isdigit():
            held[int(pid)] = held.get(int(pid), 0) + int(mebibytes) * 2**20
    return held
