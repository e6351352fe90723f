"""The kernels that torch.profiler recorded, on the clock of the run and under its devices.

Each file says when, by the wall clock, its mark began; from there its times are moved. Groups and
arrows are renumbered, since every file counts from the same numbers.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlflow.errors import Finding, RunDirError
from rlflow.report.trace.actions import device_group
from rlflow.report.trace.events import MICRO, Event
from rlflow.runtime.record.devices.profiled import MARK, SAID

# Kernels' groups stand behind those of devices; arrows of torch behind those of the plan.
FIRST_GROUP = 1000
ROOM = 100
KEPT = {"X", "s", "f", "t", "i"}


def kernel_events(paths: Sequence[Path], began: float, wanted: range | None) -> Iterator[Event]:
    """The events of all files, of `wanted` iterations; `began` is the run's time 0 since 1970.

    Raises RunDirError E714 for a file that is damaged.
    """
    groups: dict[tuple[int, object], int] = {}
    for number, path in enumerate(paths):
        document, said = _read(path)
        if wanted is not None and said["iteration"] not in wanted:
            continue
        yield from _moved(document["traceEvents"], said, began, groups, f"kernels {number}")


def _moved(
    events: Sequence[Event],
    said: Event,
    began: float,
    groups: dict[tuple[int, object], int],
    arrows: str,
) -> Iterator[Event]:
    """The events of one file in the run's numbers and times."""
    device = int(said["device"])
    named = {event["pid"]: event for event in events if event.get("name") == "process_labels"}
    mark = next(event for event in events if event.get("name") == MARK and event["ph"] == "X")
    moved = (said["began"] - began) * MICRO - float(mark["ts"])
    tracks = {(e["pid"], e["tid"]) for e in events if e["ph"] in KEPT and _is_of_a_thread(e)}
    for pid in sorted({pid for pid, _ in tracks}, key=str):
        if (device, pid) not in groups:
            groups[device, pid] = FIRST_GROUP + ROOM * (device_group(device)) + len(groups)
            labels = named.get(pid, {}).get("args", {}).get("labels", "")
            yield from _group(groups[device, pid], device, str(labels))
    for event in events:
        track = (event.get("pid"), event.get("tid"))
        if track not in tracks:
            continue
        placed = {**event, "pid": groups[device, event["pid"]]}
        if event["ph"] == "M" and event["name"] == "thread_name":
            yield placed
        elif event["ph"] in KEPT:
            placed["ts"] = round(float(event["ts"]) + moved, 3)
            if event["name"] == MARK:
                placed["name"] = f"{said['action']} (body)"
            if "id" in event:
                placed["id"] = f"{arrows}: {event['id']}"
            yield placed


def _is_of_a_thread(event: Event) -> bool:
    """Whether an event is of a thread or a stream; torch has rows of its own beside them."""
    return isinstance(event.get("pid"), int) and isinstance(event.get("tid"), int)


def _group(pid: int, device: int, labels: str) -> Iterator[Event]:
    where = "host" if device < 0 else f"device {device}"
    what = "streams" if labels.startswith("GPU") else "threads"
    for name, said in (
        ("process_name", {"name": f"{where}: {what} of torch.profiler"}),
        ("process_sort_index", {"sort_index": pid}),
    ):
        yield {"ph": "M", "name": name, "pid": pid, "tid": 0, "args": said}


def _read(path: Path) -> tuple[dict[str, Any], Event]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            document = json.load(file)
        said = document[SAID]
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise RunDirError(
            Finding(
                code="E714",
                what=f"{path} is damaged",
                got=f"{type(error).__name__}: {error}",
                fix=f"rm {path}   the rest of the run is still traced",
            )
        ) from error
    return document, json.loads(said) if isinstance(said, str) else said
