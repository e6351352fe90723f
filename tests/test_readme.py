"""The README's commands, plan, pipeline and file map are true."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlflow.cli import cli
from rlflow.scheduler import cluster

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.S)
COMMANDS = [
    line
    for language, block in BLOCKS
    if not language
    for line in block.splitlines()
    if line.startswith("rlflow ") and "/ " not in line
]

LOOKING = ("check", "plan", "diff", "simulate", "tune", "doctor")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(cluster, "machine_memory", lambda: 32e9)


def invoke(command, *more):
    return CliRunner().invoke(cli, [*shlex.split(command)[1:], *more], catch_exceptions=False)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.split()[1] in LOOKING])
def test_commands_that_look_work_as_written(command):
    assert 0 == invoke(command).exit_code


def test_the_commands_that_look_are_shown():
    assert set(LOOKING) <= {command.split()[1] for command in COMMANDS}


def test_viz_writes_the_picture(tmp_path):
    (command,) = [c for c in COMMANDS if c.startswith("rlflow viz")]
    invoke(command.replace("grpo.svg", str(tmp_path / "grpo.svg")))

    assert "<svg" in (tmp_path / "grpo.svg").read_text()


@pytest.mark.torch
@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("rlflow run")])
def test_the_runs_are_runs(command):
    result = invoke(command, "--dry-run")

    iterations = re.search(r"--iterations (\d+)", command)
    assert 0 == result.exit_code, result.output
    assert f"dry run: {iterations[1] if iterations else 400} iterations" in result.output


@pytest.mark.parametrize("word", ["plan", "diff"])
def test_what_is_printed_is_what_the_commands_print(word):
    """`RLFLOW_WRITE_DOCS=1` writes it anew."""
    command, _, shown = README.partition(f"$ rlflow {word} ")[2].partition("\n")
    shown = shown.partition("```")[0].rstrip()
    printed = invoke(f"rlflow {word} {command}").stdout.rstrip()

    if os.environ.get("RLFLOW_WRITE_DOCS"):
        path = ROOT / "README.md"
        block = f"$ rlflow {word} {command}\n"
        fresh = path.read_text().replace(f"{block}{shown}".rstrip(), f"{block}{printed}")
        path.write_text(fresh)
    else:
        assert shown == printed


def test_the_pipeline_traces_and_compiles(tmp_path, monkeypatch):
    (source,) = [block for language, block in BLOCKS if language == "python"]
    path = tmp_path / "readme.py"
    path.write_text(source)

    assert 0 == invoke(f"rlflow check {path}").exit_code


def test_the_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"(?:^|`)make ([a-z-]+)", README, flags=re.M)

    assert {"demo", "test"} <= set(named)
    assert [] == [name for name in named if not re.search(rf"^{name}:", makefile, flags=re.M)]


def test_ci_calls_the_test_command():
    assert "make test\n" in (ROOT / ".ci" / "run").read_text()


def test_the_file_map_names_every_module():
    listed = README.partition("## Files")[2].partition("## Words")[0]
    words = set(re.findall(r"[\w.-]+", listed))
    tracked = subprocess.run(
        ["git", "ls-files", "rlflow", "pipelines/*.py", "docs/*.md"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout.split()
    modules = [Path(name) for name in tracked if not name.endswith(("__init__.py", "py.typed"))]

    assert [] == [str(path) for path in modules if not {path.stem, path.name} & words]


def test_links_and_pictures_are_there():
    targets = re.findall(r"\]\(([^)#]+)\)", README)

    assert [] == [target for target in targets if not (ROOT / target).exists()]
