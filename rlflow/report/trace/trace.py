"""`rlflow trace`: a run's spans, dependencies, memory and kernels as one Chrome trace."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from rlflow.errors import Finding, RunDirError, UsageError
from rlflow.report.runfiles import RunFiles, read_run_files
from rlflow.report.trace.actions import (
    DrawnSpan,
    dependency_events,
    iteration_events,
    placed_spans,
    slice_events,
    track_names,
)
from rlflow.report.trace.counters import memory_events
from rlflow.report.trace.events import Event, write_trace
from rlflow.report.trace.kernels import kernel_events
from rlflow.runtime.record.devices.profiled import profile_files
from rlflow.runtime.record.spans import Span, began_at

TRACE_FILE = "trace.json.gz"
SUFFIXES = (".json", ".json.gz")


def trace_run(run_dir: Path, output: Path | None, wanted: range | None) -> tuple[Path, int]:
    """Write the trace of a run, of `wanted` iterations or all; where it is, and its events.

    `output` is `run_dir/trace.json.gz` unless given. Raises RunDirError if the directory is no
    run, a file in it is damaged or the disk refuses; UsageError E344 where nothing is to be
    traced, E345 for a name that is none of a trace.
    """
    where = output if output is not None else run_dir / TRACE_FILE
    if not where.name.endswith(SUFFIXES):
        raise UsageError(
            Finding(
                code="E345",
                what=f"-o {where} is not the name of a trace",
                expected=" or ".join(SUFFIXES),
                fix=f"-o {where.stem}.json.gz",
            )
        )
    files = read_run_files(run_dir)
    spans = [span for span in files.spans if wanted is None or span.iteration in wanted]
    if not spans:
        raise UsageError(_nothing(files))
    kernels = kernel_events(profile_files(run_dir), began_at(run_dir / "spans"), wanted)
    said = {"run": files.run["name"], "id": files.run.get("id"), "started": files.run["started"]}
    try:
        return where, write_trace(where, chain(run_events(files, spans), kernels), said)
    except OSError as error:
        what = f"cannot write the trace of {run_dir}: {error}"
        raise RunDirError(
            Finding(code="E665", what=what, fix=f"rlflow trace {run_dir} -o trace.json.gz")
        ) from error


def run_events(files: RunFiles, spans: list[Span]) -> Iterator[Event]:
    """All events of a run but its kernels."""
    placed: list[DrawnSpan] = placed_spans(files, spans)
    yield from iteration_events(spans)
    yield from track_names(placed)
    yield from slice_events(files, placed)
    yield from dependency_events(files, placed)
    yield from memory_events(files, placed)


def _nothing(files: RunFiles) -> Finding:
    known = sorted({span.iteration for span in files.spans})
    return Finding(
        code="E344",
        what=f"{files.path} has nothing to trace",
        got=f"spans of the iterations {known[0]} to {known[-1]}" if known else "no spans",
        fix="leave out --iterations" if known else "",
    )
