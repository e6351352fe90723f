"""A simulated plan as a picture and as a page: the chart, the figures, what devices wait for."""

from __future__ import annotations

from rlflow.report.charts.gantt import simulated_chart
from rlflow.report.charts.look import escape
from rlflow.report.charts.shapes import picture
from rlflow.report.page import figure, html_table, section, style, tiles
from rlflow.scheduler.plan.text import bound_text, cycle_text, duration, sources_text
from rlflow.scheduler.simulate.simulate import Simulation
from rlflow.scheduler.simulate.text import lags_text, percent, waits_text


def simulated_picture(found: Simulation, form: str) -> bytes:
    """Two turns of the plan as svg, png or pdf."""
    return picture(simulated_chart(found), form)


def simulated_page(found: Simulation) -> bytes:
    """One HTML page that opens by a double click: no script, nothing fetched."""
    plan, timing = found.plan, found.plan.timing
    facts = [
        (duration(found.period), "an iteration, in the long run"),
        (percent(found.idle), "of device time idle"),
        (duration(found.latency), "from an iteration's first action to its last"),
    ]
    notes = [f"Estimates from: {sources_text(plan)}.", lags_text(found)]
    if timing is not None:
        facts.append((duration(timing.resource_bound), f"busiest device: {timing.busiest}"))
        facts.append((duration(timing.recurrence_bound), "slowest chain"))
        notes.insert(0, f"Bounds: {bound_text(plan, timing)}.")
        if timing.critical:
            notes.insert(1, f"Critical cycle: {cycle_text(timing.critical)}.")
    rows = [
        (use.label, percent(use.busy), percent(use.idle), waits_text(use)) for use in found.uses
    ]
    chart = simulated_chart(found)
    title = f"{plan.graph.name}, {plan.placement}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="facts">simulated on {escape(plan.cluster)}; plan {plan.hash[:8]}; '
        f"{found.iterations} iterations on a virtual clock</p>",
        tiles(facts),
        section("Two turns", figure(chart.svg(), chart.title)),
        section(
            "Devices",
            html_table(("device", "busy", "idle", "waiting for"), rows, numbers=(1, 2), long=(3,)),
        ),
        section("Notes", *(f'<p class="note">{escape(note)}</p>' for note in notes if note)),
    ]
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        f"</title><style>{style()}</style></head><body><main>\n"
    )
    return (page + "\n".join(body) + "\n</main></body></html>\n").encode()
