"""Which actions have their kernels recorded, in which iterations, and the files that hold them.

Names and numbers only: what records is in `kernels.py`, what reads in `rlflow/report/trace`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rlflow.errors import Finding, UsageError

PROFILES = "profiles"
# The name of what a file says of itself, and of the mark that its kernels have around them.
SAID = "rlflow"
MARK = "rlflow action"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledActions:
    """Actions by their ids, iterations `first` to `last` (left out), and where files are written.

    `cuda` says that the devices are CUDA's.
    """

    actions: frozenset[str]
    first: int
    last: int
    directory: Path
    cuda: bool = False

    def due(self, action: str, iteration: int) -> bool:
        """Whether the kernels of an action instance are recorded."""
        return action in self.actions and self.first <= iteration < self.last

    def path(self, action: str, iteration: int, device: int) -> Path:
        """The file of an action instance on a device."""
        name = re.sub(r"[^\w.-]+", "_", action).strip("_")
        where = "host" if device < 0 else f"device-{device}"
        return self.directory / f"{name}.iteration-{iteration:06d}.{where}.json.gz"


def profile_files(run: Path) -> list[Path]:
    """The files of kernels in a run's directory, by name."""
    return sorted((run / PROFILES).glob("*.json.gz"))


def iteration_range(text: str, option: str) -> tuple[int, int]:
    """`3:5` as (3, 5), the iterations 3 and 4, and `3` as (3, 4); UsageError E343 for others."""
    match = re.fullmatch(r"(\d{1,12})(?::(\d{1,12}))?", text.strip())
    first = int(match[1]) if match else 0
    last = int(match[2] or first + 1) if match else 0
    if match is None or last <= first:
        raise UsageError(
            Finding(
                code="E343",
                what=f"{option} {text} is no range of iterations",
                expected="FROM:TO with FROM below TO, which is left out, or one iteration",
                fix=f"{option} 3:5   for the iterations 3 and 4",
            )
        )
    return first, last
