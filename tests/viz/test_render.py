"""`render`: formats by name and by suffix, errors, and that nothing heavy is imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlflow.errors import UsageError
from rlflow.graph.text import graph_text
from rlflow.report.render import FORMATS, format_of, render
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.text import plan_text
from tests.viz.examples import small_graph

BEGINNINGS = {
    ".txt": b"small ", ".mmd": b"flowchart LR\n", ".dot": b"digraph small {", ".gv": b"digraph",
    ".svg": b"<?xml", ".PNG": b"\x89PNG", ".pdf": b"%PDF", ".json": b"{",
}  # fmt: skip


@pytest.mark.parametrize(("suffix", "beginning"), BEGINNINGS.items())
def test_a_file_gets_the_format_of_its_suffix(suffix: str, beginning: bytes, tmp_path: Path):
    output = tmp_path / f"picture{suffix}"
    made = render(small_graph(), None, level="graph", direction="LR", output=output)
    written = output.read_bytes()
    assert beginning == written[: len(beginning)]
    assert written.rstrip(b"\n") == (made if isinstance(made, bytes) else made.encode()).rstrip(
        b"\n"
    )


def test_text_and_json_are_those_of_the_graph_and_the_plan(split: Plan):
    assert graph_text(split.graph) == render(split.graph, split, level="graph")
    assert plan_text(split) == render(split.graph, split, level="plan")
    assert split.graph.to_json() == json.loads(
        render(split.graph, None, level="graph", format="json")
    )
    assert json.loads(json.dumps(split.to_json())) == json.loads(
        render(split.graph, split, level="plan", format="json")
    )


@pytest.mark.parametrize("form", FORMATS)
def test_a_plan_has_every_format_too(form: str, squeezed: Plan):
    made = render(squeezed.graph, squeezed, level="plan", format=form)
    assert (form in ("svg", "png", "pdf")) == isinstance(made, bytes)
    assert len(made) > 500


def test_the_name_of_a_format_wins_over_the_suffix(tmp_path: Path):
    assert "dot" == format_of("dot", tmp_path / "x.svg")
    assert "text" == format_of(None, Path("-"))


def test_an_unknown_suffix_names_the_near_ones():
    with pytest.raises(UsageError) as caught:
        render(small_graph(), None, level="graph", output=Path("graph.pgn"))
    assert (
        "error[E661]: -o graph.pgn names no format\n"
        "  got          '.pgn'\n"
        "  expected     .txt, .text, .mmd, .mermaid, .dot, .gv, .svg, .png, .pdf, .json\n"
        "  did you mean '.png'\n"
        "  fix          --format svg, or -o picture.svg"
    ) == str(caught.value)
    assert not Path("graph.pgn").exists()


def test_an_unknown_name_names_the_near_ones():
    with pytest.raises(UsageError, match="did you mean 'mermaid'"):
        render(small_graph(), None, level="graph", format="mermaids")


def test_a_plan_picture_without_a_plan_is_refused():
    with pytest.raises(UsageError, match="needs a placement"):
        render(small_graph(), None, level="plan", format="dot")


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path):
    with pytest.raises(UsageError, match="cannot write"):
        render(small_graph(), None, level="graph", output=tmp_path / "no" / "x.dot")
