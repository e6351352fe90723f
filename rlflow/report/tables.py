"""The tables of a report as rows of text: predicted beside measured, where the time went.

Every figure is in the run's files or a sum over them; what is not known is a dash. This
file lays nothing out.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlflow.report.charts.look import Document, mode_text
from rlflow.report.runfiles import RunFiles, device_label, measured_seconds
from rlflow.runtime.record.spans import summarise
from rlflow.scheduler.devices.cluster import amount
from rlflow.scheduler.plan.text import duration

Rows = list[tuple[str, ...]]

UNKNOWN = "-"


def seconds_text(seconds: float | None) -> str:
    """Seconds as they are printed, a dash where there are none."""
    return UNKNOWN if seconds is None else duration(seconds)


def ratio_text(measured: float | None, predicted: float | None) -> str:
    """How many times as long as predicted it took."""
    if measured is None or not predicted:
        return UNKNOWN
    return f"{measured / predicted:.2f}"


def document_action_what(action: Document) -> str:
    """What a plan document's action does, without its kind."""
    if action["kind"] == "run":
        return str(action["id"])
    if action["kind"] == "reshard":
        return f"{action['instance']} → {' + '.join(action['targets'])}"
    if action["kind"] == "transfer":
        return f"{action['node']}: {', '.join(action['fields'])}"
    return str(action["part"])


PLAN_HEADINGS = ("#", "action", "what", "on", "predicted", "measured", "ratio", "peak", "because")


def plan_rows(files: RunFiles) -> Rows:
    """A row per action of the plan, as `PLAN_HEADINGS` names its cells."""
    plan = files.plan
    if plan is None:
        return []
    measured = measured_seconds(files.spans)
    rows: Rows = []
    for number, action in enumerate(plan["actions"], 1):
        predicted = action["cost"]["seconds"]
        took = measured.get(action["id"])
        rows.append(
            (
                str(number),
                f"{action['kind']}{mode_text(action)}",
                document_action_what(action),
                "host" if list(action["devices"]) == [-1] else str(action["pool"]),
                seconds_text(predicted),
                seconds_text(took),
                ratio_text(took, predicted),
                UNKNOWN if action["peak"] is None else amount(action["peak"]),
                str(action["reason"]["text"]),
            )
        )
    return rows


TIME_HEADINGS = ("action", "runs", "median", "total", "share")


def time_rows(files: RunFiles) -> list[tuple[tuple[str, ...], float]]:
    """A row per action, the longest in total first, with its share of the time in iterations."""
    return [
        (
            (
                total.name,
                f"{total.count}" + (f" ({total.failed} failed)" if total.failed else ""),
                duration(total.median),
                duration(total.total),
                f"{100 * total.share:.1f} %",
            ),
            total.share,
        )
        for total in summarise(files.spans).actions
    ]


def idle_shares(files: RunFiles) -> Mapping[str, float]:
    """The share of the time in iterations that each device ran nothing, the host left out."""
    idle = summarise(files.spans).idle
    return {device_label(d, files.plan): share for d, share in idle.items() if d >= 0}


def final_rows(files: RunFiles) -> Rows:
    """Every metric's first and last value and the iteration of the last."""
    rows: Rows = []
    for key in files.metric_names():
        points = files.curve(key)
        last, value = points[-1]
        rows.append((key, f"{points[0][1]:.4g}", f"{value:.4g}", str(last)))
    return rows
