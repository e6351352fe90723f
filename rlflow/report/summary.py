"""A run in about 15 lines for a terminal; the same facts as the report, from the same files."""

from __future__ import annotations

from pathlib import Path

from rlflow.report.runfiles import (
    RunFiles,
    continue_line,
    first_and_last,
    headline_of,
    health_lines,
    iteration_seconds,
    num_iterations,
    read_run_files,
)
from rlflow.report.tables import idle_shares, time_rows
from rlflow.scheduler.plan.text import duration, table

MOST_ACTIONS = 6


def summary_text(run_dir: Path) -> str:
    """Rewards at both ends, seconds an iteration, where the time went, how to continue.

    Raises RunDirError if the directory is no run or a file in it is damaged.
    """
    files = read_run_files(run_dir)
    plan = files.plan
    placed = f"   placement {plan['placement']} on {plan['cluster']}" if plan else ""
    rows = [(what, value) for value, what in progress_figures(files)]
    seconds = iteration_seconds(files.spans)
    if seconds is not None:
        rows.append((f"an iteration, median{estimate_text(files)}", duration(seconds)))
    lines = [f"{files.run['name']}   {num_iterations(files)} iterations{placed}"]
    lines += table(rows) if rows else []
    lines += [f"  health: {line}" for line in health_lines(files)]
    if files.spans:
        lines += ["", f"  where the time went{kept_text(files)}", *_time(files)]
    return "\n".join([*lines, "", f"continue: {continue_line(files)}"])


def kept_text(files: RunFiles) -> str:
    """How many spans there were before those that are kept; nothing where all are."""
    return f", without the first {files.dropped:,} spans" if files.dropped else ""


def progress_figures(files: RunFiles) -> list[tuple[str, str]]:
    """How training and held-out rewards began and ended: (figures, what they are)."""
    facts = []
    shown = headline_of(files)
    for key in shown.training:
        first, last, count = first_and_last(files.curve(key))
        facts.append((f"{first:.3f} → {last:.3f}", f"{key}, means of the first and last {count}"))
    for key in shown.held_out:
        (began, first), *_, (ended, last) = [*files.curve(key)[:1], *files.curve(key)]
        facts.append((f"{first:.3f} → {last:.3f}", f"{key}, iterations {began} and {ended}"))
    return facts


def estimate_text(files: RunFiles) -> str:
    """What the plan estimated for an iteration, to be put behind what was measured."""
    timing = files.plan["timing"] if files.plan else None
    return f", estimated {duration(timing['period'])}" if timing else ""


def _time(files: RunFiles) -> list[str]:
    shares = time_rows(files)
    rows = [
        (name, share, f"{median} each") for (name, _, median, _, share), _ in shares[:MOST_ACTIONS]
    ]
    left = shares[MOST_ACTIONS:]
    if left:
        rows.append((f"{len(left)} more", f"{100 * sum(share for _, share in left):.1f} %", ""))
    idle = idle_shares(files)
    rows += [(f"{name} idle", f"{100 * share:.1f} %", "") for name, share in idle.items()]
    return table(rows, "    ")
