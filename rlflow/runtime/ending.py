"""How the end of an action and of a run is put down: spans, the log of an error, its last lines."""

from __future__ import annotations

import traceback
from pathlib import Path

from rlflow.data.paths import shown
from rlflow.errors import Finding, RlflowError, RunError, error_text, printable
from rlflow.runtime.execute.executor import Completion
from rlflow.runtime.record.checkpoint import set_aside
from rlflow.runtime.record.durable import disk_errors, open_private
from rlflow.runtime.record.spans import Span
from rlflow.scheduler.plan.plan import Action, Plan

ONLY = "the only checkpoint leads to it: begin a new run with other values"


def trains(plan: Plan, action: Action) -> bool:
    """Whether an action changes weights."""
    return any(node.name == action.node and node.op.use == "train" for node in plan.graph.nodes)


def ended_by(checkpoints: Path, saved: int) -> str:
    """What becomes of the newest checkpoint where numbers diverge before anything is trained.

    It is its weights that do: the run goes on from the one before.
    """
    aside = set_aside(checkpoints, saved) if saved else None
    if aside is not None:
        return f"the newest checkpoint leads to it, and was set aside as {aside}"
    return ONLY if saved else ""


def last_words(error: Exception, log: Path, resume_line: str, said: str = "") -> Exception:
    """The error of a run, with where its traceback was written and the line that continues.

    A disk that takes no traceback is said in its place: what has failed before stays the error.
    """
    try:
        with open_private(log, "w") as file:
            file.write(printable("".join(traceback.format_exception(error))))
        kept = f"traceback: {shown(log)}"
    except OSError as unwritten:
        kept = f"the traceback could not be written to {shown(log)}: {unwritten.strerror}"
    ways = f"{said}\n{kept}".strip()
    ways += "" if said == ONLY else f"\ncontinue with: {resume_line}"
    if isinstance(error, OSError):
        error = _of_the_disk(error, log.parent)
    if isinstance(error, RlflowError):
        return type(error)(*error.findings, summary=f"{error.summary}\n{ways}".strip())
    return RunError(Finding(code="E751", what=error_text(error)), summary=ways)


def _of_the_disk(error: OSError, path: Path) -> Exception:
    """An error of the disk in our words; others, of a connection or a user's file, as they are."""
    try:
        with disk_errors(RunError, "write what the run keeps", path):
            raise error
    except RunError as told:
        return told if told.findings[0].code in {"E701", "E702", "E704"} else error


def span_of(action: Action, completion: Completion) -> Span:
    """The span of an action instance that has ended."""
    moved = action.cost.moved if action.kind != "run" else None
    moved = moved if completion.moved is None else completion.moved
    return Span(
        action=action.id,
        node=action.node or "",
        kind=action.kind,
        iteration=completion.iteration,
        chunk=action.chunk.index + 1 if action.chunk else 0,
        pool=action.pool,
        devices=action.devices,
        start=completion.start,
        end=completion.end,
        predicted=action.cost.seconds,
        bytes=moved,
        process="main",
        ok=completion.error is None,
    )
