"""The notebooks of `docs/notebooks` in a real Jupyter kernel, cell by cell."""

from __future__ import annotations

import json

import pytest

from tests.conftest import PIPELINES, ROOT

FOLDER = ROOT / "docs" / "notebooks"
NAMES = ("placements", "plan", "run")
# What a notebook shows as parts of a page: pictures of a plan or of a simulation, tables of pandas.
SHOWN = {"placements": ("<svg", "<pre"), "plan": ("<svg", "<svg"), "run": ("<table", "<table")}


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_from_its_folder_and_shows_pages(name, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    here = tmp_path / "docs" / "notebooks"
    here.mkdir(parents=True)
    (tmp_path / "pipelines").symlink_to(PIPELINES)
    book = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    where = {"metadata": {"path": str(here)}}
    made = nbclient.NotebookClient(book, timeout=300, resources=where).execute()
    outputs = [output for cell in made.cells for output in cell.get("outputs", ())]
    pages = "".join(output.data.get("text/html", "") for output in outputs if "data" in output)

    assert all(pages.count(mark) >= SHOWN[name].count(mark) for mark in SHOWN[name])
    said = [output.text for output in outputs if output.get("name") == "stderr"]
    assert [] == [text for text in said if "tqdm" not in text]  # it misses a widget of Jupyter


def test_notebooks_are_kept_without_outputs():
    assert sorted(f"{name}.ipynb" for name in NAMES) == sorted(p.name for p in FOLDER.iterdir())
    for path in FOLDER.iterdir():
        cells = json.loads(path.read_text())["cells"]
        assert [] == [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
        assert f"notebooks/{path.stem}.md" in (ROOT / "mkdocs.yml").read_text()
