"""All that the page draws, as plain data: curves of runs, actions of the plan, the timeline.

What is long is thinned here, and what was left out is said. Numbers have six digits.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from rlflow.report.charts.look import ACTION_STYLES, NO_MODEL, document_lane, graph_colours
from rlflow.report.interactive.samples import sample_table
from rlflow.report.interactive.timeline import timeline
from rlflow.report.runfiles import Point, RunFiles, headline_of, measured_seconds
from rlflow.report.tables import document_action_what

MOST_POINTS = 2_000


def page_data(
    files: RunFiles, others: Sequence[RunFiles] = (), wanted: int | None = None
) -> dict[str, Any]:
    """The data of one run's page, with the curves of other runs to lay over its own."""
    shown, sampled = headline_of(files), sample_table(files.path)
    return {
        "runs": run_labels([files, *others]),
        "curves": [_curves(each) for each in (files, *others)],
        "headline": [*shown.training, *shown.held_out],
        "actions": _actions(files),
        "timeline": timeline(files, wanted) if files.spans else None,
        "samples": None if sampled is None else asdict(sampled),
    }


def packed(value: object) -> str:
    """A value as JSON, compressed, in the letters of base64."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def run_labels(runs: Sequence[RunFiles]) -> list[str]:
    """A name for each run: its directory's, with as much of the path as tells them apart."""
    paths = [files.path.resolve() for files in runs]
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names


def _curves(files: RunFiles) -> dict[str, list[list[float | None]]]:
    """Iterations and values of every metric; a value that is no number is a hole."""
    found: dict[str, list[list[float | None]]] = {}
    for key in files.metric_names():
        points = thinned(files.curve(key))
        found[key] = [[i for i, _ in points], [_short(value) for _, value in points]]
    return found


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` points of a curve: the lowest and the highest of stretches of equal length."""
    if len(points) <= most:
        return list(points)
    count = max(1, most // 2 - 1)
    edges = [len(points) * n // count for n in range(count + 1)]
    kept = {0, len(points) - 1}
    for begin, end in pairwise(edges):
        kept.add(min(range(begin, end), key=lambda n: points[n][1]))
        kept.add(max(range(begin, end), key=lambda n: points[n][1]))
    return [points[n] for n in sorted(kept)]


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _actions(files: RunFiles) -> dict[str, Any]:
    """What the plan says of each action, and what the run measured, by its id."""
    plan = files.plan
    if plan is None:
        return {}
    measured = measured_seconds(files.spans)
    models = {instance["name"]: instance["model"] for instance in plan["instances"]}
    colours = graph_colours(files.graph) if files.graph else {}
    found = {}
    for action in plan["actions"]:
        style = ACTION_STYLES.get(action["kind"])
        model = models.get(action["instance"] or "")
        found[action["id"]] = {
            "kind": action["kind"],
            "mode": action["mode"],
            "what": document_action_what(action),
            "node": action["node"],
            "model": model,
            "colour": style.fill if style else colours.get(model or "", NO_MODEL),
            "pool": action["pool"],
            "lane": document_lane(action),
            "predicted": action["cost"]["seconds"],
            "source": action["cost"]["source"],
            "measured": measured.get(action["id"]),
            "peak": action["peak"],
            "reason": action["reason"]["text"],
            "after": [[dep["action"], dep["distance"], dep["kind"]] for dep in action["after"]],
        }
    return found
