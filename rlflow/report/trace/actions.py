"""The actions of a run as events: slices on their devices, arrows by dependency, iterations.

An arrow goes from the action instance that was waited for to the one that waited, by the plan's
dependencies: an instance in turn t of the plan waits for one some turns earlier, and either works
on the iteration that lies as far ahead of the turn as its action does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from rlflow.report.runfiles import RunFiles, iteration_windows
from rlflow.report.trace.events import (
    Event,
    Track,
    flow_events,
    group_events,
    rows_of,
    slice_event,
    track_events,
)
from rlflow.runtime.record.spans import Span
from rlflow.scheduler.plan.plan import HOST

ITERATIONS = 1
LANES = ("compute", "copies")
# Tracks of a lane that overlap, as rows that travel beside what computes, stand below each other.
ROOM = 50


@dataclass(frozen=True, slots=True)
class DrawnSpan:
    """A span and the tracks that it is drawn on, one a device."""

    span: Span
    tracks: tuple[Track, ...]


def device_group(device: int) -> int:
    """The number of the group of tracks of a device; the host has one too."""
    return 2 if device == HOST else 10 + device


def iteration_events(spans: Sequence[Span]) -> Iterator[Event]:
    """Each iteration from its first action on a device to its last; those that overlap in rows."""
    windows = sorted((window, number) for number, window in iteration_windows(spans).items())
    rows = rows_of([window for window, _ in windows])
    yield from group_events(ITERATIONS, "iterations", 0)
    for row in range(max(rows, default=-1) + 1):
        yield from track_events(Track(ITERATIONS, row + 1), "iterations" if row == 0 else "ahead")
    for (window, number), row in zip(windows, rows, strict=True):
        track = Track(ITERATIONS, row + 1)
        said = {"iteration": number}
        yield slice_event(track, f"iteration {number}", "iteration", *window, said)


def placed_spans(files: RunFiles, spans: Sequence[Span]) -> list[DrawnSpan]:
    """Every span with its tracks: by device and lane, and below each other where they overlap."""
    lanes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, span in enumerate(spans):
        lane = int(span.kind in ("sleep", "wake"))
        for device in span.devices:
            lanes[device, lane].append(index)
    tracks: dict[int, list[Track]] = defaultdict(list)
    for (device, lane), members in sorted(lanes.items()):
        rows = rows_of([(spans[index].start, spans[index].end) for index in members])
        for index, row in zip(members, rows, strict=True):
            tracks[index].append(Track(device_group(device), 1 + lane * ROOM + row))
    return [DrawnSpan(span, tuple(tracks[index])) for index, span in enumerate(spans)]


def track_names(placed: Sequence[DrawnSpan]) -> Iterator[Event]:
    """The names of the groups and tracks that spans are on."""
    pools: dict[int, set[str]] = defaultdict(set)
    used: dict[int, set[Track]] = defaultdict(set)
    for each in placed:
        for device, track in zip(each.span.devices, each.tracks, strict=True):
            used[device].add(track)
            pools[device].add(each.span.pool)
    for device, tracks in sorted(used.items()):
        where = ", ".join(sorted(pools[device] - {""}))
        name = "host" if device == HOST else f"device {device} ({where})"
        yield from group_events(device_group(device), name, device_group(device))
        for track in sorted(tracks, key=lambda track: track.tid):
            lane, row = divmod(track.tid - 1, ROOM)
            yield from track_events(track, f"{LANES[lane]}{'' if row == 0 else f' {row + 1}'}")


def slice_events(files: RunFiles, placed: Sequence[DrawnSpan]) -> Iterator[Event]:
    """Every span on each of its devices, with what the plan says of its action."""
    actions = actions_of(files)
    for each in placed:
        span = each.span
        planned = actions.get(span.action)
        said: Event = {
            "action": span.action,
            "iteration": span.iteration,
            "kind": span.kind,
            "predicted seconds": span.predicted,
            "bytes moved": span.bytes,
            "ok": span.ok,
        }
        if span.chunk:
            said["chunk"] = span.chunk
        if planned is not None:
            said["why"] = planned["reason"]["text"]
        for track in each.tracks:
            yield slice_event(track, span.action, span.kind, span.start, span.end, said)


def dependency_events(files: RunFiles, placed: Sequence[DrawnSpan]) -> Iterator[Event]:
    """An arrow for every dependency of the plan of which both ends have run."""
    actions = actions_of(files)
    latest = {(each.span.action, each.span.iteration): each for each in placed}
    numbers = count(1)
    for each in placed:
        span = each.span
        planned = actions.get(span.action)
        for needed in planned["after"] if planned else ():
            other = actions[needed["action"]]
            turn = span.iteration - planned["ahead"] if planned else 0
            source = latest.get((needed["action"], turn - needed["distance"] + other["ahead"]))
            if source is None or source is each or not source.tracks or not each.tracks:
                continue
            left = (source.tracks[0], source.span.start, source.span.end)
            right = (each.tracks[0], span.start)
            yield from flow_events(next(numbers), needed["kind"], left, right)


def actions_of(files: RunFiles) -> Mapping[str, Any]:
    """The actions of the plan by their ids, as plan.json has them; none without a plan."""
    return {action["id"]: action for action in files.plan["actions"]} if files.plan else {}
