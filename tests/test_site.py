"""The site that `make docs` builds, as far as it can be checked without MkDocs: menu, code, maps.

`RLFLOW_WRITE_DOCS=1 pytest tests/test_site.py` writes the code and the maps that pages show anew.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import rlflow
from rlflow import data, ops, rewards
from rlflow.cli.main import cli

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
NAV = re.findall(r"^ +- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
MAPS = ("imports.svg", "imports_scheduler.svg")
SHOWN = re.compile(r'^```python source="([^":]+):([\w.]+)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)


def test_every_page_is_in_the_menu_once():
    """The README is the first page; notebooks are pages that the site makes."""
    notebooks = [f"notebooks/{path.stem}.md" for path in (DOCS / "notebooks").glob("*.ipynb")]
    assert sorted(["index.md", *PAGES, *notebooks]) == sorted(NAV)


def test_the_site_asks_nobody_else_for_anything():
    config = (ROOT / "mkdocs.yml").read_text()

    assert "font: false" in config
    assert "http" not in config


def test_versions_are_exact():
    lines = (ROOT / "constraints-docs.txt").read_text().splitlines()

    assert [] == [line for line in lines if not re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line)]


def test_the_reference_has_every_public_name():
    pages = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    modules = {"data", "ops", "rewards"}
    public = {f"rlflow.{name}" for name in rlflow.__all__ if name not in modules}
    for module in (data, ops, rewards):
        public |= {f"{module.__name__}.{name}" for name in module.__all__}

    assert sorted(public) == sorted(re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE))


def test_the_page_of_the_command_line_has_every_command():
    path = DOCS / "reference" / "cli.md"
    if os.environ.get("RLFLOW_WRITE_DOCS"):
        first = path.read_text().partition("```console")[0]
        parts = [f"## {name}\n\n{helped(name)}" for name in sorted(cli.commands)]
        path.write_text("\n".join([first + helped(), *parts]))

    assert sorted(cli.commands) == re.findall(r"^## (\w+)$", path.read_text(), re.MULTILINE)


def helped(*words: str) -> str:
    """What `--help` of a command prints, as a block of a console."""
    found = CliRunner().invoke(cli, [*words, "--help"], prog_name="rlflow", terminal_width=80)
    command = " ".join(("rlflow", *words))
    return f"```console\n$ {command} --help\n{found.output.rstrip()}\n```\n"


def shown() -> list[tuple[str, str, str, str]]:
    """Page, file, name and text of all code that pages show of files."""
    return [(page, *found) for page in PAGES for found in SHOWN.findall((DOCS / page).read_text())]


@pytest.mark.parametrize(("page", "file", "name", "text"), shown(), ids=lambda value: value[:40])
def test_code_shown_is_that_of_the_file(page, file, name, text):
    real = code_of(file, name)
    if os.environ.get("RLFLOW_WRITE_DOCS"):
        fence = f'```python source="{file}:{name}"\n'
        path = DOCS / page
        path.write_text(path.read_text().replace(f"{fence}{text}```", f"{fence}{real}```"))
    else:
        assert real == text


def code_of(file: str, name: str) -> str:
    """The lines of a function, class or constant; a method has its class before a dot."""
    source = (ROOT / file).read_text()
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        (node,) = [found for found in ast.iter_child_nodes(node) if part in names_of(found)]
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
    lines = source.splitlines()[first - 1 : node.end_lineno]
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "".join(f"{line[indent:]}\n" for line in lines)


def names_of(node: ast.AST) -> list[str]:
    """What a statement gives a name to."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return [target.id for target in targets if isinstance(target, ast.Name)]


@pytest.mark.slow
@pytest.mark.parametrize("name", MAPS)
def test_the_map_is_drawn_from_the_imports(name):
    spec = importlib.util.spec_from_file_location("import_map", ROOT / "scripts" / "import_map.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    drawn = script.picture(script.PICTURES[name])
    path = DOCS / "images" / name
    if os.environ.get("RLFLOW_WRITE_DOCS"):
        path.write_bytes(drawn)

    assert set(MAPS) == set(script.PICTURES)
    assert f"images/{name}" in (DOCS / "architecture.md").read_text()
    assert path.read_bytes() == drawn


def test_the_tour_goes_through_the_files_that_it_names():
    """Stop by stop: the file of the table is the one whose code or output the section has."""
    tour = (DOCS / "tour.md").read_text()
    stops = re.findall(r"^\| \[\d\]\(#([\w-]+)\) \|.*\| `([\w/.]+)` \|$", tour, re.MULTILINE)
    sections = re.split(r"^## ", tour, flags=re.MULTILINE)[1:]

    assert 9 == len(stops)
    for (_, file), section in zip(stops, sections, strict=False):
        assert (ROOT / file).is_file()
        assert file in section or "```console" in section
