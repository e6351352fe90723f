"""Pictures: that they are what their suffix says, readable and the same without fonts."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET

import pytest

from rlflow.errors import UsageError
from rlflow.report.diagrams import draw as drawing
from rlflow.report.diagrams.draw import draw, inline_svg
from rlflow.report.diagrams.graph_dot import graph_digraph
from tests.viz.examples import ppo

MAGIC = {"svg": b"<?xml", "png": b"\x89PNG\r\n\x1a\n", "pdf": b"%PDF-"}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def source() -> str:
    return graph_digraph(ppo.trace().to_json(), "TB").source


@pytest.mark.parametrize("form", drawing.FORMATS)
def test_pictures_begin_as_they_should_and_are_not_empty(source: str, form: str):
    picture = draw(source, form)
    assert picture.startswith(MAGIC[form])
    assert len(picture) > 5_000


def test_svg_is_well_formed_and_names_every_node(source: str):
    root = ET.fromstring(draw(source, "svg"))
    assert f"{SVG}svg" == root.tag
    texts = {element.text for element in root.iter(f"{SVG}text")}
    assert {node.name for node in ppo.trace().nodes} <= texts


def test_svg_asks_for_fonts_that_browsers_have(source: str):
    assert b"sans-serif" in draw(source, "svg")


def test_inline_svg_is_the_element_alone(source: str):
    assert inline_svg(draw(source, "svg")).startswith("<svg")


def test_the_dot_program_is_used_where_there_is_one(source: str, tmp_path, monkeypatch):
    program = tmp_path / "dot"
    program.write_text('#!/bin/sh\ncat > /dev/null\necho "<svg>$1</svg>"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert b"<svg>-Tsvg</svg>\n" == draw(source, "svg")


def test_a_dot_program_that_fails_is_quoted(source: str, tmp_path, monkeypatch):
    program = tmp_path / "dot"
    program.write_text("#!/bin/sh\necho no plugin for png >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(UsageError, match="no plugin for png"):
        draw(source, "png")


def test_without_dot_and_library_the_error_says_what_to_install(source: str, monkeypatch):
    monkeypatch.setattr(drawing.shutil, "which", lambda name: None)
    monkeypatch.setattr(drawing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install pygraphviz"):
        draw(source, "png")


def test_pictures_have_text_without_any_font_of_the_system(source: str, monkeypatch, tmp_path):
    monkeypatch.setattr(drawing.shutil, "which", lambda name: None)
    with_fonts = draw(source, "png")
    empty = tmp_path / "fonts.conf"
    empty.write_text("<fontconfig><dir>/nonexistent</dir></fontconfig>")
    monkeypatch.setenv("FONTCONFIG_FILE", str(empty))
    assert with_fonts == draw(source, "png")


def test_bad_dot_is_an_error_and_not_a_crash():
    with pytest.raises(UsageError, match="cannot draw svg"):
        draw("digraph { a -> ", "svg")
