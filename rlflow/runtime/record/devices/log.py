"""The figures of devices in a run directory: a line an action instance and device, read back.

They depend on the machine and on the moment, so that they are no metrics: those of a resumed run
are the same to the byte. What a resumed run did again stands below what the dead one had done.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlflow.errors import RunDirError
from rlflow.runtime.record.durable import NOT_READ, disk_errors
from rlflow.runtime.record.lines.rolling import DROPPED, ROOM, Rolling, halves

DEVICE_LOG = "devices.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLine:
    """What one device did during an action instance of `seconds`; bytes, Hz, W, percent."""

    action: str
    iteration: int
    device: int
    seconds: float
    figures: Mapping[str, float]


class DeviceLog:
    """Appends lines, of which the last `room` bytes are kept.

    Raises RunDirError when the disk refuses.
    """

    def __init__(self, path: Path, *, room: int = ROOM) -> None:
        self.path = path
        with disk_errors(RunDirError, f"open {path}", path.parent):
            self._file = Rolling(path, lambda n: f'{{"{DROPPED}": {n}}}\n'.encode(), room=room)

    def write(self, line: DeviceLine) -> None:
        """Append one line."""
        figures = {name: _short(value) for name, value in sorted(line.figures.items())}
        head = {"action": line.action, "iteration": line.iteration, "device": line.device}
        row = {**head, "seconds": _short(line.seconds), **figures}
        with disk_errors(RunDirError, f"write {self.path}", self.path.parent):
            self._file.append(f"{json.dumps(row)}\n".encode())

    def close(self) -> None:
        """Close the file; safe to repeat."""
        self._file.close()


def read_device_lines(path: Path) -> list[DeviceLine]:
    """All lines, the last of each action instance and device; none where there is no file.

    A line that a kill has torn, or that holds no figures, is left out.
    """
    found: dict[tuple[str, int, int], DeviceLine] = {}
    texts = [each.read_text(encoding="utf-8", errors="replace") for each in halves(path)]
    for row in (row for text in texts for row in text.splitlines()):
        try:
            values = json.loads(row)
            action, iteration, device, seconds = (
                values.pop(name) for name in ("action", "iteration", "device", "seconds")
            )
            figures = {name: float(value) for name, value in values.items()}
            line = DeviceLine(
                action=str(action),
                iteration=int(iteration),
                device=int(device),
                seconds=float(seconds),
                figures=figures,
            )
        except NOT_READ:
            continue
        if all(map(math.isfinite, (line.seconds, *figures.values()))):
            found[line.action, line.iteration, line.device] = line
    return list(found.values())


def _short(value: float) -> float:
    """Six digits of what is measured; whole numbers stay whole."""
    return int(value) if float(value).is_integer() else float(f"{value:.6g}")
