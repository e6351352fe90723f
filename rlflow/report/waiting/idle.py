"""Why devices were idle in an iteration of a run: their gaps, and the actions waited for.

The answer as data and as text. An iteration lasts from its first action on a device to its last;
where iterations overlap, what devices did for others meanwhile is no gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.errors import Finding, UsageError, near_names
from rlflow.report.runfiles import RunFiles, iteration_windows, median_iteration
from rlflow.report.waiting.gaps import (
    SHORTEST_GAP,
    DeviceGap,
    DeviceGaps,
    DeviceGroup,
    device_groups_of,
    ranked,
)
from rlflow.scheduler.plan.text import counted, duration, table
from rlflow.scheduler.simulate.text import MOST_CAUSES, SMALLEST_SHARE, percent

OUTSIDE = "no action (dispatch, a save, the controller)"
THE_END = "the end of the run"

Causes = Sequence[tuple[str | None, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleGap:
    """A gap within an iteration: `start` seconds after it began, and the span that came then.

    `before` is its action and iteration, None after the last span of a run.
    """

    start: float
    seconds: float
    before: tuple[str, int] | None
    causes: Causes


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleDevices:
    """Devices that ran the same spans: how long they were idle, and what they waited for."""

    label: str
    devices: tuple[int, ...]
    gaps: tuple[IdleGap, ...]

    @property
    def seconds(self) -> float:
        """Idle seconds of each of the devices."""
        return sum(gap.seconds for gap in self.gaps)

    @property
    def causes(self) -> Causes:
        """The actions waited for with their seconds in all gaps, the longest first."""
        return ranked(cause for gap in self.gaps for cause in gap.causes)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleIteration:
    """An iteration of a run, `seconds` long; `typical` where it was taken for its median length."""

    run: str
    iteration: int
    seconds: float
    typical: bool
    devices: tuple[IdleDevices, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data; times in seconds."""
        return {
            "run": self.run,
            "iteration": self.iteration,
            "seconds": self.seconds,
            "devices": [
                {
                    "label": each.label,
                    "devices": list(each.devices),
                    "idle": each.seconds,
                    "waited_for": _causes_json(each.causes),
                    "gaps": [
                        {
                            "start": gap.start,
                            "seconds": gap.seconds,
                            "before": None if gap.before is None else gap.before[0],
                            "iteration": None if gap.before is None else gap.before[1],
                            "waited_for": _causes_json(gap.causes),
                        }
                        for gap in each.gaps
                    ],
                }
                for each in self.devices
            ],
        }


def idle_iteration(
    files: RunFiles, iteration: int | None = None, device: str | None = None
) -> IdleIteration:
    """Why devices were idle in an iteration, by default in one of median length.

    `device` is a number, a pool, or a label as `gen[1]`; None stands for all. Raises UsageError
    E666 for an iteration that has no spans, or failed, and E349 for a device that ran nothing.
    """
    windows = iteration_windows(files.spans)
    chosen = median_iteration(files.spans) if iteration is None else iteration
    if chosen is None or chosen not in windows:
        raise UsageError(_no_iteration(files, iteration, sorted(windows)))
    start, end = windows[chosen]
    groups = [g for g in device_groups_of(files.spans, files.plan) if g.devices[0] >= 0]
    gaps = DeviceGaps(files.spans, files.plan)
    return IdleIteration(
        run=str(files.path),
        iteration=chosen,
        seconds=end - start,
        typical=iteration is None,
        devices=tuple(
            IdleDevices(
                label=group.label,
                devices=group.devices,
                gaps=tuple(_idle_gap(files, g, start) for g in gaps.within(group, start, end)),
            )
            for group in _wanted(files, groups, device)
        ),
    )


def idle_text(found: IdleIteration) -> str:
    """Idle shares of all devices that were asked for, then their gaps."""
    typical = ", which has the median length" if found.typical else ""
    rows = [
        (each.label, percent(each.seconds / found.seconds), duration(each.seconds), told)
        for each in found.devices
        for told in [_causes_text(each.causes, found.seconds)]
    ]
    lines = [
        f"iteration {found.iteration} of {found.run}{typical}: {duration(found.seconds)} from its "
        "first action on a device to its last",
        "",
        *table([("device", "idle", "for", "of the iteration it waited for"), *rows]),
    ]
    for each in found.devices:
        lines += ["", *_gap_lines(each, SHORTEST_GAP * found.seconds)]
    return "\n".join(lines)


def _gap_lines(each: IdleDevices, shortest: float) -> list[str]:
    told = [gap for gap in each.gaps if gap.seconds > shortest]
    if not told:
        return [f"{each.label} has no gap of {duration(shortest)} or more"]
    rows = [
        (
            duration(gap.start) if gap.start > 0 else "the start",
            duration(gap.seconds),
            THE_END if gap.before is None else f"{gap.before[0]} of {gap.before[1]}",
            _causes_text(gap.causes, gap.seconds),
        )
        for gap in told
    ]
    lines = [f"gaps of {each.label}", *table([("from", "for", "before", "waited for"), *rows])]
    rest = [gap.seconds for gap in each.gaps if gap.seconds <= shortest]
    if rest:
        lines.append(f"  and {counted(len(rest), 'shorter one')}, {duration(sum(rest))} together")
    return lines


def _causes_text(causes: Causes, whole: float) -> str:
    """`82 % actor.update, 9 % reward`: shares of a time; the small ones are summed up."""
    large = [(n, s) for n, s in causes[:MOST_CAUSES] if s >= SMALLEST_SHARE * whole]
    told = [f"{percent(seconds / whole)} {name or OUTSIDE}" for name, seconds in large]
    rest = sum(seconds for _, seconds in causes[len(large) :])
    if rest >= SMALLEST_SHARE * whole:
        told.append(f"{percent(rest / whole)} others")
    return ", ".join(told) or "-"


def _causes_json(causes: Causes) -> list[dict[str, Any]]:
    return [{"action": name, "seconds": seconds} for name, seconds in causes]


def _idle_gap(files: RunFiles, gap: DeviceGap, began: float) -> IdleGap:
    span = None if gap.place is None else files.spans[gap.place]
    return IdleGap(
        start=gap.start - began,
        seconds=gap.seconds,
        before=None if span is None else (span.action, span.iteration),
        causes=gap.causes,
    )


def _wanted(
    files: RunFiles, groups: Sequence[DeviceGroup], device: str | None
) -> Sequence[DeviceGroup]:
    """The groups that a device, a pool or a label names; all of them where none is named."""
    pools = {
        name: set(found) for name, found in (files.plan["pools"] if files.plan else {}).items()
    }
    numbers = {str(number): {number} for group in groups for number in group.devices}
    labels = {group.label: set(group.devices) for group in groups}
    single = {f"{n}[{d}]": {d} for n, found in pools.items() for d in found if str(d) in numbers}
    known = {**single, **pools, **labels, **numbers}
    if device is None:
        return groups
    if device in known:
        return [group for group in groups if known[device] & set(group.devices)]
    raise UsageError(
        Finding(
            code="E349",
            what=f"--device {device}: no device of {files.path} is called so",
            expected=", ".join([*numbers, *labels]),
            near=near_names(device, known),
        )
    )


def _no_iteration(files: RunFiles, asked: int | None, known: Sequence[int]) -> Finding:
    what = "no iteration" if asked is None else f"no iteration {asked}"
    return Finding(
        code="E666",
        what=f"{files.path} has {what} that devices could be idle in",
        got=f"spans of the iterations {known[0]} to {known[-1]}" if known else "no spans",
        fix=f"--iteration {min(known, key=lambda i: abs(i - asked))}"
        if known and asked is not None
        else "",
    )
