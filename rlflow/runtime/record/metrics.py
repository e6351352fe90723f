"""The figures of every iteration, one JSON line each.

Nothing here reads a clock (times are in the spans), keys are sorted and floats are written
by `repr`: a run that was killed and resumed has, byte for byte, the file of one that was
not. This file does not know what a metric means.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Self

from rlflow.errors import Finding, RunDirError, RunError
from rlflow.runtime.record.durable import (
    NOT_READ,
    append,
    disk_errors,
    fault,
    register_atomic_faults,
    register_faults,
    write_atomic,
)

TRUNCATE_POINTS = register_atomic_faults("metrics:truncate")
register_faults("metrics:write")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLine:
    """The metrics of one iteration, by name in sorted order.

    The `closing` line is of the actions after the last iteration, evaluations of the final weights;
    its number is one past that iteration's.
    """

    iteration: int
    metrics: Mapping[str, float]
    closing: bool = False


class MetricsLog:
    """Appends to a metrics file; each line is handed to the system before `write` returns.

    To resume: `truncate_after(path, iteration of the checkpoint)` before it is opened. For
    the file to survive a power loss too, `sync` before each checkpoint. Where the disk refuses,
    what opens or cuts the file raises `RunDirError`, and what a run has in its middle, `RunError`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with disk_errors(RunDirError, f"open {path}", path.parent):
            self._file = path.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, iteration: int, metrics: Mapping[str, float], *, closing: bool = False) -> None:
        """Append the metrics of one iteration; ints stay ints, floats keep every bit."""
        values = {name: _word(value) for name, value in sorted(metrics.items())}
        mark = {"closing": True} if closing else {}
        line = json.dumps({"iteration": iteration, **mark, "metrics": values}, allow_nan=False)
        with disk_errors(RunError, f"write {self.path}", self.path.parent):
            # What is written to a file that was removed or moved is kept nowhere.
            if not os.path.samestat(self.path.stat(), os.fstat(self._file.fileno())):
                raise FileNotFoundError(errno.ENOENT, "another file is there", str(self.path))
            append(self._file, f"{line}\n".encode())
            fault("metrics:write")

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        with disk_errors(RunError, f"sync {self.path}", self.path.parent):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; safe to repeat."""
        self._file.close()


def truncate_after(path: Path, iteration: int) -> int:
    """Remove the lines of later iterations and a torn last line; say how many.

    Atomic: the file is the old one or the new one; where there is none it is made. Raises
    `RunDirError` if an earlier line is damaged.
    """
    with disk_errors(RunDirError, f"truncate {path}", path.parent):
        path.touch()
        data = path.read_bytes()
        earlier = takewhile(lambda row: row[1].iteration <= iteration, _lines(path, data))
        kept = [raw + b"\n" for raw, _ in earlier]
        text = b"".join(kept)
        if text != data:
            write_atomic(path, text, TRUNCATE_POINTS)
    return len(data.splitlines()) - len(kept)


def read_metrics(path: Path) -> list[MetricsLine]:
    """All lines of a metrics file, in its order; a torn last line is left out.

    Floats have the bits that were written. Raises `RunDirError` if the file cannot be read
    or a line other than the last is damaged.
    """
    with disk_errors(RunDirError, f"read {path}", path):
        data = path.read_bytes()
    return [line for _, line in _lines(path, data)]


def final_metrics(path: Path) -> dict[str, float]:
    """The metrics of the last iteration, and over them those of the closing line, if there is one.

    Empty where no iteration has ended. Raises `RunDirError` as `read_metrics` does.
    """
    lines = read_metrics(path)
    last = lines[-2:] if lines and lines[-1].closing else lines[-1:]
    return {name: value for line in last for name, value in line.metrics.items()}


def _word(value: float) -> float | str:
    """JSON has no word for a float that is not finite: it becomes "nan", "inf" or "-inf"."""
    return value if math.isfinite(value) else repr(float(value))


def _figure(word: object) -> float:
    """The figure that a word of JSON stands for; one of NOT_READ where it stands for none."""
    if isinstance(word, str):
        return float(word)
    if isinstance(word, bool) or not isinstance(word, int | float):
        raise TypeError(type(word))
    float(word)  # an integer beyond all floats is no figure
    return word


def _lines(path: Path, data: bytes) -> Iterator[tuple[bytes, MetricsLine]]:
    """Each whole line as bytes and as figures; only the last one may be torn."""
    lines = data.splitlines()
    for number, raw in enumerate(lines, start=1):
        try:
            found = json.loads(raw)
            metrics = {name: _figure(value) for name, value in found["metrics"].items()}
            iteration, closing = int(found["iteration"]), bool(found.get("closing"))
            line = MetricsLine(iteration=iteration, metrics=metrics, closing=closing)
        except NOT_READ as error:
            if number == len(lines):
                return
            raise RunDirError(
                Finding(
                    code="E730",
                    what=f"line {number} of {path} is damaged",
                    got=repr(raw[:60].decode(errors="replace")),
                    fix=f"sed -i {number}d {path}",
                )
            ) from error
        yield raw, line
