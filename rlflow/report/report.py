"""A run as one page: built from the plain files of its directory.

The page needs nothing beside itself: style, scripts, pictures and figures are in it, and it opens
by a double click without a network. It shows no figure that is not in the files.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlflow.errors import Finding, RunDirError, UsageError
from rlflow.report.charts.curves import write_curves
from rlflow.report.charts.look import escape
from rlflow.report.device_table import device_table
from rlflow.report.diagrams.draw import draw, inline_svg
from rlflow.report.diagrams.graph_dot import graph_digraph
from rlflow.report.diagrams.plan_dot import plan_digraph
from rlflow.report.interactive.document import PagePart, document
from rlflow.report.interactive.payload import packed, page_data
from rlflow.report.interactive.samples import sample_table
from rlflow.report.page import bars, figure, html_table, tiles
from rlflow.report.runfiles import (
    RunFiles,
    continue_line,
    health_lines,
    iteration_seconds,
    iteration_windows,
    num_iterations,
    read_run_files,
)
from rlflow.report.summary import estimate_text, kept_text, progress_figures, summary_text
from rlflow.report.tables import (
    PLAN_HEADINGS,
    TIME_HEADINGS,
    final_rows,
    idle_shares,
    plan_rows,
    time_rows,
)
from rlflow.runtime.record.edges.reading import recorded
from rlflow.runtime.record.spans import summarise
from rlflow.scheduler.plan.text import duration

__all__ = ["report_page", "summary_text", "write_report"]

REPORT_FILE = "report.html"
NOTHING_RECORDED = "No rows are recorded: the run had <code>--record none</code>, or ended before."
NEEDS_SCRIPTS = "The chart needs a browser that runs the scripts in this file."


def write_report(
    run_dir: Path,
    output: Path | None = None,
    *,
    others: Sequence[Path] = (),
    iteration: int | None = None,
) -> Path:
    """Write a run's report.html, and its curves beside its metrics; returns where it is.

    `output` is `run_dir/report.html` unless given; curves of the runs `others` are laid over its
    own. The timeline begins at the iteration of median length unless one is named. Raises
    RunDirError if a directory is no run, a file in it is damaged, or the disk refuses; UsageError
    for an iteration without spans.
    """
    files = read_run_files(run_dir)
    beside = [read_run_files(other) for other in others]
    where = output if output is not None else run_dir / REPORT_FILE
    try:
        write_curves(files)
        where.write_text(report_page(files, beside, iteration), encoding="utf-8")
    except OSError as error:
        raise RunDirError(
            Finding(
                code="E665",
                what=f"cannot write the report of {run_dir}: {error}",
                fix=f"rlflow report {run_dir} -o report.html",
            )
        ) from error
    return where


def report_page(
    files: RunFiles, others: Sequence[RunFiles] = (), iteration: int | None = None, live: str = ""
) -> str:
    """The page as text; `live` is the address that a served page asks for what is new."""
    _known_iteration(files, iteration)
    data = [("run", packed(page_data(files, others, iteration)))]
    data += [("live", live)] if live else []
    title = f"{files.run['name']}: a run of rlflow"
    return document(title, page_head(files), page_parts(files), data, served=bool(live))


def page_head(files: RunFiles) -> str:
    """What stands above the sections: what was run, and its key figures."""
    return "\n".join(
        [
            f"<h1>{escape(str(files.run['name']))}</h1>",
            *(f'<p class="facts">{line}</p>' for line in _heading(files)),
            tiles(_key_figures(files)),
        ]
    )


def page_parts(files: RunFiles) -> list[PagePart]:
    """The sections that a run has something for."""
    signs = "".join(f'<p class="sign">{escape(line)}</p>' for line in health_lines(files))
    metrics = html_table(
        ("metric", "first", "last", "at iteration"), final_rows(files), numbers=(1, 2, 3)
    )
    parts = [
        PagePart(name="health", title="Health", html=signs),
        PagePart(
            name="learning",
            title="Learning curves",
            html=_drawn("curves" if files.metrics else ""),
            drawn="curves" if files.metrics else "",
        ),
        PagePart(
            name="iteration",
            title="One iteration",
            html=_gantt(files),
            drawn="gantt" if iteration_windows(files.spans) else "",
        ),
        PagePart(
            name="sampled",
            title="Samples",
            html=_sampled(files),
            drawn="samples" if recorded(files.path) else "",
        ),
        PagePart(name="time", title="Where the time went", html=_time(files)),
        PagePart(name="devices", title="What devices did", html=_devices(files)),
        PagePart(name="plan", title="Plan: predicted and measured", html=_plan(files)),
        PagePart(name="graph", title="Graph", html=_graph_picture(files)),
        PagePart(name="metrics", title="Metrics", html=metrics),
        PagePart(name="configuration", title="Configuration", html=_configuration(files)),
        PagePart(
            name="continue",
            title="How to continue",
            html=f'<pre tabindex="0">{escape(continue_line(files))}</pre>',
        ),
    ]
    return [part for part in parts if part.html or part.drawn]


def _drawn(what: str) -> str:
    return f'<noscript><p class="note">{NEEDS_SCRIPTS}</p></noscript>' if what else ""


def _known_iteration(files: RunFiles, wanted: int | None) -> None:
    windows = iteration_windows(files.spans)
    if wanted is not None and wanted not in windows:
        known = f"{min(windows)} to {max(windows)}" if windows else "none"
        raise UsageError(
            Finding(
                code="E666", what=f"no spans of iteration {wanted}", expected=f"iterations {known}"
            )
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


def _time(files: RunFiles) -> str:
    if not files.spans:
        return ""
    total = summarise(files.spans)
    idle = ", ".join(f"{name} {100 * share:.0f} %" for name, share in idle_shares(files).items())
    return bars(TIME_HEADINGS, time_rows(files)) + (
        f'<p class="note">Shares of the {duration(total.wall)} within {total.iterations} '
        f"iterations{kept_text(files)}; they add up to more than 100 % where actions overlap. "
        f"Idle: {escape(idle or 'no device')}.</p>"
    )


def _devices(files: RunFiles) -> str:
    headings, rows = device_table(files)
    if not rows:
        return ""
    remark = "Medians over the run. MFU counts the products of parameters and of causal attention."
    chosen = [row[0] for row in rows]
    drawn = html_table(headings, rows, numbers=range(1, len(headings)), chosen=chosen)
    return f'{drawn}<p class="note">{remark}</p>'


def _gantt(files: RunFiles) -> str:
    """What is said below the timeline, which a script draws."""
    if not iteration_windows(files.spans):
        return ""
    remark = (
        "Drag or use the buttons to move, Ctrl and the wheel to zoom; a bar or a gap tells its "
        "figures. What belongs to other iterations is faint. A gap is told by what released the "
        "next action, what released that, and so on, by the dependencies of the plan."
    )
    return f'<p class="note">{remark}</p>{_drawn("gantt")}'


def _sampled(files: RunFiles) -> str:
    """What is said below the table, which a script draws."""
    table = sample_table(files.path)
    if table is None:
        return f'<p class="note">{NOTHING_RECORDED}</p>' if files.metrics else ""
    more = f"rlflow samples {shlex.quote(str(files.path))}"
    remark = f"{table.remark} All, token by token: <code>{escape(more)}</code>"
    return f'<p class="note">{remark}</p>{_drawn("samples")}'


def _plan(files: RunFiles) -> str:
    if files.plan is None:
        return ""
    actions = files.plan["actions"]
    inserted = [i for i, action in enumerate(actions) if action["kind"] != "run"]
    sources = sorted({action["cost"]["source"] for action in actions})
    notes = [f"{note['rule']}: {note['text']}" for note in files.plan["notes"]]
    drawn = html_table(
        PLAN_HEADINGS,
        plan_rows(files),
        numbers=(0, 4, 5, 6, 7),
        long=(2, 8),
        marked=inserted,
        chosen=[action["id"] for action in actions],
        choosing=2,
    )
    source = f"Measured: the median over the run. Predictions from: {'; '.join(sources)}."
    remarks = "".join(f'<p class="note">{escape(remark)}</p>' for remark in (source, *notes))
    graph = files.graph if files.graph is not None else files.plan.get("declared")
    source = plan_digraph(files.plan, graph, "TB").source if graph is not None else ""
    picture = _folded("the plan as a picture", figure(_inline(source))) if source else ""
    text = _folded("the plan as printed", f'<pre tabindex="0">{escape(files.plan_text)}</pre>')
    return drawn + remarks + picture + (text if files.plan_text else "")


def _graph_picture(files: RunFiles) -> str:
    return figure(_inline(graph_digraph(files.graph, "TB").source)) if files.graph else ""


@lru_cache(maxsize=8)
def _inline(source: str) -> str:
    """DOT as an svg element, without names that several pictures in a page would share."""
    return re.sub(r' id="[^"]*"', "", inline_svg(draw(source, "svg")))


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
