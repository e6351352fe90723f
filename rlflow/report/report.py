"""A run as one page: built from the plain files of its directory.

The page needs nothing beside itself: style, pictures and figures are in it, and it opens
by a double click. It shows no figure that is not in the files.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlflow.errors import Finding, RunDirError, UsageError
from rlflow.report.charts.curves import write_curves
from rlflow.report.charts.gantt import gantt_svg
from rlflow.report.charts.look import escape
from rlflow.report.device_table import device_table
from rlflow.report.diagrams.draw import draw, inline_svg
from rlflow.report.diagrams.graph_dot import graph_digraph
from rlflow.report.diagrams.plan_dot import plan_digraph
from rlflow.report.page import STYLE, bars, figure, html_table, section, tiles
from rlflow.report.runfiles import (
    RunFiles,
    continue_line,
    health_lines,
    iteration_seconds,
    iteration_windows,
    median_iteration,
    num_iterations,
    read_run_files,
)
from rlflow.report.summary import estimate_text, progress_figures, summary_text
from rlflow.report.tables import (
    PLAN_HEADINGS,
    TIME_HEADINGS,
    final_rows,
    idle_shares,
    plan_rows,
    time_rows,
)
from rlflow.runtime.record.spans import summarise
from rlflow.scheduler.plan.text import duration

__all__ = ["summary_text", "write_report"]

REPORT_FILE = "report.html"


def write_report(
    run_dir: Path, output: Path | None = None, *, iteration: int | None = None
) -> Path:
    """Write a run's report.html, and its curves beside its metrics; returns where it is.

    `output` is `run_dir/report.html` unless given; the Gantt chart shows the iteration of
    median length unless one is named. Raises RunDirError if the directory is no run, a
    file in it is damaged, or the disk refuses; UsageError for an iteration without spans.
    """
    files = read_run_files(run_dir)
    where = output if output is not None else run_dir / REPORT_FILE
    try:
        where.write_text(_page(files, iteration), encoding="utf-8")
    except OSError as error:
        raise RunDirError(
            Finding(
                code="E665",
                what=f"cannot write the report of {run_dir}: {error}",
                fix=f"rlflow report {run_dir} -o report.html",
            )
        ) from error
    return where


def _page(files: RunFiles, iteration: int | None) -> str:
    name = str(files.run["name"])
    curves = write_curves(files)
    body = [
        f"<h1>{escape(name)}</h1>",
        *(f'<p class="facts">{line}</p>' for line in _heading(files)),
        tiles(_key_figures(files)),
        section("Health", *(f'<p class="sign">{escape(line)}</p>' for line in health_lines(files))),
        section("Learning curves", figure(curves) if curves else ""),
        section("Where the time went", *_time(files)),
        section("What devices did", *_devices(files)),
        section("One iteration", *_gantt(files, iteration)),
        section("Plan: predicted and measured", *_plan(files)),
        section("Graph", _graph_picture(files)),
        section(
            "Metrics",
            html_table(
                ("metric", "first", "last", "at iteration"), final_rows(files), numbers=(1, 2, 3)
            ),
        ),
        section("Configuration", _configuration(files)),
        section("How to continue", f"<pre>{escape(continue_line(files))}</pre>"),
    ]
    content = "\n".join(part for part in body if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(name)}: a run of rlflow</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{content}\n</main>\n</body>\n</html>\n"
    )


def _heading(files: RunFiles) -> list[str]:
    """What was run, where and with which versions; each line is HTML."""
    run = files.run
    lines = [f"{escape(str(run['pipeline']))} · started {escape(str(run['started']))}"]
    if "host" in run:
        lines[0] += f" on {escape(str(run['host']))}"
    if files.plan is not None:
        plan = files.plan
        lines.append(
            escape(f"placement {plan['placement']} on {plan['cluster']}, backend {plan['backend']}")
        )
    lines.append(f"<code>{escape(shlex.join(map(str, run['command'])))}</code>")
    git = run.get("git")
    if git:
        state = " with changes" if git["dirty"] else ""
        lines.append(f"git <code>{escape(str(git['commit'])[:12])}</code>{state}")
    versions = {key: value for key, value in (run.get("versions") or {}).items() if value}
    if versions:
        lines.append(escape(", ".join(f"{key} {value}" for key, value in versions.items())))
    return lines


def _key_figures(files: RunFiles) -> list[tuple[str, str]]:
    facts = progress_figures(files)
    if files.metrics:
        facts.append((str(num_iterations(files)), "iterations"))
    seconds = iteration_seconds(files.spans)
    if seconds is not None:
        facts.append((duration(seconds), f"an iteration, median{estimate_text(files)}"))
    return facts


def _time(files: RunFiles) -> list[str]:
    if not files.spans:
        return []
    total = summarise(files.spans)
    idle = ", ".join(f"{name} {100 * share:.0f} %" for name, share in idle_shares(files).items())
    return [
        bars(TIME_HEADINGS, time_rows(files)),
        f'<p class="note">Shares of the {duration(total.wall)} within {total.iterations} '
        "iterations; they add up to more than 100 % where actions overlap. "
        f"Idle: {escape(idle or 'no device')}.</p>",
    ]


def _devices(files: RunFiles) -> list[str]:
    headings, rows = device_table(files)
    if not rows:
        return []
    remark = "Medians over the run. MFU counts the products of parameters and of causal attention."
    drawn = html_table(headings, rows, numbers=range(1, len(headings)))
    return [drawn, f'<p class="note">{remark}</p>']


def _gantt(files: RunFiles, wanted: int | None) -> list[str]:
    chosen = median_iteration(files.spans) if wanted is None else wanted
    windows = iteration_windows(files.spans)
    if wanted is not None and wanted not in windows:
        known = f"{min(windows)} to {max(windows)}" if windows else "none"
        raise UsageError(
            Finding(
                code="E666", what=f"no spans of iteration {wanted}", expected=f"iterations {known}"
            )
        )
    if chosen is None:
        return []
    start, end = windows[chosen]
    why = "the one of median length" if wanted is None else "as asked"
    caption = (
        f"Iteration {chosen}, {why}: {duration(end - start)}. Hover a bar for its figures; "
        "what belongs to other iterations is faint."
    )
    return [figure(gantt_svg(files.spans, chosen, files.plan, files.graph), caption)]


def _plan(files: RunFiles) -> list[str]:
    if files.plan is None:
        return []
    rows = plan_rows(files)
    inserted = [i for i, action in enumerate(files.plan["actions"]) if action["kind"] != "run"]
    sources = sorted({action["cost"]["source"] for action in files.plan["actions"]})
    notes = [f"{note['rule']}: {note['text']}" for note in files.plan["notes"]]
    drawn = html_table(PLAN_HEADINGS, rows, numbers=(0, 4, 5, 6, 7), long=(2, 8), marked=inserted)
    source = f"Measured: the median over the run. Predictions from: {'; '.join(sources)}."
    remarks = [source, *notes]
    graph = files.graph if files.graph is not None else files.plan.get("declared")
    picture = (
        ""
        if graph is None
        else _folded(
            "the plan as a picture", figure(_inline(plan_digraph(files.plan, graph, "TB").source))
        )
    )
    text = _folded("the plan as printed", f"<pre>{escape(files.plan_text)}</pre>")
    return [
        drawn,
        *(f'<p class="note">{escape(remark)}</p>' for remark in remarks),
        picture,
        text if files.plan_text else "",
    ]


def _graph_picture(files: RunFiles) -> str:
    return figure(_inline(graph_digraph(files.graph, "TB").source)) if files.graph else ""


def _inline(source: str) -> str:
    return inline_svg(draw(source, "svg"))


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _configuration(files: RunFiles) -> str:
    rows = [(key, json.dumps(value, ensure_ascii=False)) for key, value in _flat(files.config)]
    return (
        _folded(f"{len(rows)} values", html_table(("key", "value"), rows, long=(1,)))
        if rows
        else ""
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value))
    return rows
