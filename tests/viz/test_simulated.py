"""A simulated plan drawn: rows of joined devices, bars of two turns, a page that is whole."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from rlflow.report.charts.gantt import simulated_chart
from rlflow.report.charts.shapes import Box, Chart, Rule, ShapeGroup, Words, picture
from rlflow.report.simulated import simulated_page, simulated_picture
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.simulate.simulate import play_plan

SVG = "{http://www.w3.org/2000/svg}"


def test_every_device_group_has_a_row_and_every_long_action_a_bar(split: Plan):
    found = play_plan(split)
    root = ET.fromstring(simulated_chart(found).svg())
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"train[0]", "gen[1]", "host"} <= set(texts)
    tips = [element.text for element in root.iter(f"{SVG}title")]
    assert all(any(tip.startswith(f"{a.id}, ") for tip in tips[1:]) for a in split.actions)
    assert any("actor.update" in text for text in texts if text)


def test_bars_lie_within_the_chart_and_on_their_rows(squeezed: Plan):
    chart = simulated_chart(play_plan(squeezed))
    boxes = [
        shape
        for group in chart.shapes
        if isinstance(group, ShapeGroup)
        for shape in group.shapes
        if isinstance(shape, Box)
    ]
    assert len(boxes) >= len(squeezed.actions)
    for box in boxes:
        assert 0 < box.x
        assert box.x + box.width <= chart.width
        assert box.y + box.height <= chart.height


def test_bars_of_all_iterations_are_strong_and_numbered(split: Plan):
    drawn = simulated_chart(play_plan(split)).svg()
    assert "opacity=" not in drawn
    found = play_plan(split)
    numbers = {span.iteration for span in found.spans}
    assert any(f"actor.update {number}<" in drawn for number in numbers)


@pytest.mark.parametrize("form", ["svg", "png", "pdf"])
def test_pictures_are_of_their_format_and_the_same_each_time(split: Plan, form: str):
    found = play_plan(split)
    first, second = (simulated_picture(found, form) for _ in range(2))
    heads = {"svg": b"<svg ", "png": b"\x89PNG", "pdf": b"%PDF"}
    assert first.startswith(heads[form])
    assert first == second


def test_pixels_have_the_colour_of_their_shapes():
    """A red box of 60 x 20 at the middle of 100 x 40, drawn at twice the size."""
    import io

    import matplotlib.image as mpl

    box = Box(x=20, y=10, width=60, height=20, fill="#FF0000")
    rule = Rule(x=95, top=0, bottom=40, colour="#0000FF", width=2)
    words = Words(x=50, y=24, text="x", ink="#FFFFFF", anchor="middle")
    chart = Chart(title="t", width=100, height=40, shapes=(box, rule, words))
    drawn = picture(chart, "png")
    assert (200, 80) == struct.unpack(">II", drawn[16:24])
    pixels = mpl.imread(io.BytesIO(drawn))
    assert [1, 0, 0] == [round(float(c)) for c in pixels[24, 60][:3]]
    assert [1, 1, 1] == [round(float(c)) for c in pixels[4, 4][:3]]
    assert [0, 0, 1] == [round(float(c)) for c in pixels[40, 190][:3]]


class Balance(HTMLParser):
    """Counts open tags, of which there have to be none at the end."""

    VOID = frozenset({"meta", "br", "line", "rect", "img"})

    def __init__(self):
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert tag == self.open.pop()


def test_the_page_is_balanced_and_tells_figures_causes_and_sources(split: Plan):
    found = play_plan(split)
    page = simulated_page(found).decode()
    parser = Balance()
    parser.feed(page)
    assert [] == parser.open
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    for text in ("waiting for", "Critical cycle: ", "Estimates from: ", "Bounds: ", "idle"):
        assert text in page
    assert found.uses[0].label in page
