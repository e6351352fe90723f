"""Where a relative path is looked for, and what is said when nothing is there."""

from __future__ import annotations

import pytest

import rlflow.data as data
from rlflow.data.paths import shown
from rlflow.errors import Source, UsageError


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with a pipeline in a folder, called from somewhere else.

    project/data/train.jsonl, project/pipelines/a.py; working directory: elsewhere/
    """
    (tmp_path / "project" / "data").mkdir(parents=True)
    (tmp_path / "project" / "pipelines").mkdir()
    (tmp_path / "project" / "pipelines" / "a.py").touch()
    (tmp_path / "project" / "data" / "train.jsonl").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "project"


def test_the_folders_above_the_pipeline_are_searched(project):
    near = project / "pipelines" / "a.py"

    assert project / "data" / "train.jsonl" == data.resolve_path("data/train.jsonl", near)
    assert data.find_path("data/train.jsonl") is None


def test_the_working_directory_comes_first(project, tmp_path):
    (tmp_path / "elsewhere" / "data").mkdir()
    (tmp_path / "elsewhere" / "data" / "train.jsonl").touch()
    near = project / "pipelines" / "a.py"

    assert tmp_path / "elsewhere/data/train.jsonl" == data.resolve_path("data/train.jsonl", near)


def test_an_absolute_path_is_itself(project):
    path = project / "data" / "train.jsonl"

    assert path == data.resolve_path(path) == data.resolve_path(str(path), path)


def test_a_missing_file_names_its_neighbours(project, monkeypatch):
    monkeypatch.chdir(project)
    where = Source(path="pipelines/a.py", line=7, text='rf.data.jsonl("data/trian.jsonl")')
    with pytest.raises(UsageError) as error:
        data.resolve_path("data/trian.jsonl", project / "pipelines" / "a.py", where)

    assert (
        "error[E601]: no file 'data/trian.jsonl'\n"
        '  pipelines/a.py:7   rf.data.jsonl("data/trian.jsonl")\n'
        "  got          data holds train.jsonl\n"
        "  expected     a file below the working directory or a folder above the pipeline file\n"
        "  did you mean 'data/train.jsonl'"
    ) == str(error.value)
    assert 2 == error.value.exit_code


def test_a_missing_folder(project):
    with pytest.raises(UsageError) as error:
        data.resolve_path("/nowhere/at/all.jsonl")

    assert (
        "error[E601]: no file '/nowhere/at/all.jsonl'\n"
        "  got          no folder /nowhere/at\n"
        "  expected     a file at this path"
    ) == str(error.value)


def test_paths_are_shown_from_the_working_directory(project, monkeypatch):
    monkeypatch.chdir(project)

    assert "data/train.jsonl" == shown(project / "data" / "train.jsonl")
    assert "/etc/hosts" == shown(project.__class__("/etc/hosts"))


def test_a_source_finds_its_file_from_the_pipeline(project):
    pipeline = project / "pipelines" / "a.py"
    pipeline.write_text("import rlflow.data as d\nsource = d.jsonl('data/train.jsonl')\n")
    (project / "data" / "train.jsonl").write_text('{"prompt": "x"}\n')
    names: dict = {}
    exec(compile(pipeline.read_text(), str(pipeline), "exec"), names)

    assert [{"prompt": "x"}] == names["source"].rows()
    assert "jsonl data/train.jsonl" == names["source"].describe()
    assert (str(pipeline), 2, "source = d.jsonl('data/train.jsonl')") == (
        names["source"].declared.path,
        names["source"].declared.line,
        names["source"].declared.text,
    )


def test_a_source_keeps_its_file_when_the_working_directory_changes(project, monkeypatch):
    monkeypatch.chdir(project)
    (project / "data" / "train.jsonl").write_text('{"prompt": "x"}\n')
    source = data.jsonl("data/train.jsonl")
    monkeypatch.chdir("/")

    assert [{"prompt": "x"}] == source.rows()
