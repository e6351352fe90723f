"""What devices did as counters: memory beside what the plan proves, power, clock, utilisation.

A figure stands from the end of the action that it was measured with, a peak from its start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlflow.report.runfiles import RunFiles
from rlflow.report.trace.actions import DrawnSpan, device_group
from rlflow.report.trace.events import Event, counter_event
from rlflow.runtime.record.devices.log import DEVICE_LOG, DeviceLine, read_device_lines
from rlflow.runtime.record.spans import Span

MIB = 1 << 20
# By figure its counter, what it is divided by, and whether it stands from the start of its action.
COUNTERS = {
    "allocated_before": ("memory allocated (MiB)", MIB, True),
    "allocated": ("memory allocated (MiB)", MIB, False),
    "reserved": ("memory reserved (MiB)", MIB, False),
    "peak": ("memory at its peak in the action (MiB)", MIB, True),
    "used": ("memory used by all processes (MiB)", MIB, False),
    "peak_rss": ("most memory of the process (MiB)", MIB, False),
    "utilisation": ("utilisation (%)", 1, False),
    "clock": ("clock (MHz)", 1e6, False),
    "power": ("power (W)", 1, False),
}
PROVEN = "memory that the plan proves (MiB)"


def memory_events(files: RunFiles, placed: Sequence[DrawnSpan]) -> Iterator[Event]:
    """The figures of devices.jsonl at the times of their spans, in the order of time."""
    spans = {(each.span.action, each.span.iteration): each.span for each in placed}
    lines = read_device_lines(files.path / DEVICE_LOG)
    found = [
        event
        for line in lines
        if (span := spans.get((line.action, line.iteration))) is not None
        for event in _events(line, span)
    ]
    yield from sorted(found, key=lambda event: float(event["ts"]))
    measured = {line.device for line in lines}
    end = max((each.span.end for each in placed), default=0.0)
    peaks: Mapping[str, int] = files.plan["peaks"] if files.plan else {}
    for device, peak in sorted((int(name), peak) for name, peak in peaks.items()):
        if device in measured and peak:
            yield counter_event(device_group(device), PROVEN, 0.0, peak / MIB)
            yield counter_event(device_group(device), PROVEN, end, peak / MIB)


def _events(line: DeviceLine, span: Span) -> Iterator[Event]:
    for figure, (name, unit, first) in COUNTERS.items():
        if figure in line.figures:
            at = span.start if first else span.end
            yield counter_event(device_group(line.device), name, at, line.figures[figure] / unit)
