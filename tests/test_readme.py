"""The README's commands, plan, pipeline and file map are true."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlflow.cli.main import cli
from rlflow.scheduler.devices import cluster

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.S)
COMMANDS = [
    line
    for language, block in BLOCKS
    if not language
    for line in block.splitlines()
    if line.startswith("rlflow ") and not line.startswith("rlflow/")
]
(ON_GPUS,) = [
    [line for line in block.splitlines() if line.startswith("rlflow ")]
    for language, block in BLOCKS
    if language == "sh"
]

LOOKING = ("check", "plan", "diff", "simulate", "tune", "doctor")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(cluster, "machine_memory", lambda: 32e9)


def invoke(command, *more):
    words = shlex.split(command, comments=True)
    return CliRunner().invoke(cli, [*words[1:], *more], catch_exceptions=False)


def marked(command):
    """A search takes seconds: `test_tuning.py` makes one with each of the options."""
    marks = [pytest.mark.slow] if command.startswith("rlflow tune") else []
    return pytest.param(command, marks=marks, id=command)


@pytest.mark.parametrize("command", [marked(c) for c in COMMANDS if c.split()[1] in LOOKING])
def test_commands_that_look_work_as_written(command):
    assert 0 == invoke(command).exit_code


def test_the_commands_that_look_are_shown():
    assert set(LOOKING) <= {command.split()[1] for command in [*COMMANDS, *ON_GPUS]}


def test_viz_writes_the_picture(tmp_path):
    (command,) = [c for c in COMMANDS if c.startswith("rlflow viz")]
    invoke(command.replace("grpo.svg", str(tmp_path / "grpo.svg")))

    assert "<svg" in (tmp_path / "grpo.svg").read_text()


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("rlflow run")])
def test_the_runs_are_runs(command):
    result = invoke(command, "--dry-run")

    iterations = re.search(r"--iterations (\d+)", command)
    assert 0 == result.exit_code, result.output
    assert f"dry run: {iterations[1] if iterations else 400} iterations" in result.output


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_the_plan_shown_is_the_one_that_is_printed():
    """`RLFLOW_WRITE_DOCS=1` writes it anew."""
    command, _, shown = README.partition("$ rlflow plan ")[2].partition("\n")
    shown = shown.partition("```")[0].rstrip()
    printed = invoke(f"rlflow plan {command}").stdout.rstrip()

    if os.environ.get("RLFLOW_WRITE_DOCS"):
        path = ROOT / "README.md"
        block = f"$ rlflow plan {command}\n"
        fresh = path.read_text().replace(f"{block}{shown}".rstrip(), f"{block}{printed}")
        path.write_text(fresh)
    else:
        assert shown == printed


def test_what_staleness_gains_is_what_diff_prints():
    (command,) = [command for command in COMMANDS if command.startswith("rlflow diff")]
    rows = {
        line[:28].strip(): re.split(r"  +", line[28:].strip())
        for line in invoke(command).stdout.splitlines()
    }
    (shown,) = re.findall(
        r"estimated at (\S+ ms) instead of (\S+ ms), (\d+ %) idle instead\s+of\s+(\d+ %)", README
    )

    assert ["split", "async"] == rows[""]
    assert rows["iteration, estimated"][::-1] + rows["idle device time"][::-1] == list(shown)


def test_rows_of_ones_own_are_trained_on_in_five_commands(tmp_path, monkeypatch):
    """Typed as they are shown but for the run, which is compiled for the GPUs of the plan's line.

    `RLFLOW_WRITE_DOCS=1` writes the figures anew.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    row = {"prompt": "What is 2 + 3?", "answer": "5"}
    Path("my.jsonl").write_text(f"{json.dumps(row)}\n" * 96)
    init, check, plan, run, report = ON_GPUS
    assert 0 == invoke(init).exit_code
    assert 0 == invoke(check).exit_code
    printed = invoke(plan).stdout

    pools = re.findall(r"(?:train|gen) \[(\d+):(\d+)\]", printed.partition("backend")[0])
    train, gen = (int(stop) - int(start) for start, stop in pools)
    (took,) = re.findall(r"iteration, estimated: (\S+ s)", printed)
    told = f"{train} devices that train and {gen} that sample: {took} an iteration"
    if os.environ.get("RLFLOW_WRITE_DOCS"):
        written = re.sub(r"\d+ devices that train and .* an iteration", told, README)
        (ROOT / "README.md").write_text(written)
        return
    before, _, directory = run.partition(" --run-dir ")
    assert f"rlflow report {directory}" == report
    assert plan.split()[2:5] == before.split()[2:5]
    assert cli.commands["run"].make_context("run", shlex.split(run)[2:], **cli.context_settings)
    assert told in README


@pytest.mark.slow
@pytest.mark.torch
def test_the_five_commands_run_on_a_cpu_with_a_tiny_model(tmp_path, monkeypatch):
    """The lines of the README with another model, on one CPU device, for two iterations."""
    monkeypatch.chdir(tmp_path)
    rows = ({"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(10, 42))
    Path("my.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    model = str(ROOT / "pipelines" / "assets" / "arith-tiny")
    init, _, _, run, report = (
        line.replace("Qwen/Qwen2.5-7B-Instruct", model).replace("sglang", "one") for line in ON_GPUS
    )
    small = ("prompts_per_iteration=4", "group_size=4", "max_new_tokens=8")
    settings = [word for setting in small for word in ("--set", setting)]

    assert 0 == invoke(init).exit_code
    assert 0 == invoke("rlflow check mine.py", *settings).exit_code
    assert 0 == invoke("rlflow plan mine.py --placement one", *settings).exit_code
    assert 0 == invoke(run, *settings, "--iterations", "2", "--threads", "1").exit_code
    assert 0 == invoke(report).exit_code

    metrics = (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()
    assert 2 == len(metrics)
    assert (tmp_path / "runs/mine/report.html").is_file()


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


def folders(root: str) -> list[str]:
    """Folders below one in which git knows Python files, apart from those of other packages."""
    known = subprocess.run(
        ["git", "ls-files", f"{root}/**.py"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.split()
    return sorted({str(Path(name).parent) for name in known} - {root})


def test_the_file_map_names_every_folder():
    """Several of a line stand in braces, or with commas between them."""
    written = re.findall(r"^((?:[\w/{},]+/,? )+)", README.partition("## Files")[2], re.MULTILINE)
    listed = [
        f"{before}{name}{after}".strip("/")
        for names in written
        for several in names.replace("/, ", "/ ").split()
        for before, inner, after in [re.fullmatch(r"([^{]*)\{?([^}]*)\}?(.*)", several).groups()]
        for name in inner.split(",")
    ]
    packages = [name for name in folders("rlflow") if 1 == name.count("/")]
    others = ["pipelines", "benchmarks", "docs", "tests"]

    assert sorted(listed) == sorted(packages + others)


def test_the_five_files_hold_what_the_readme_says():
    named = re.findall(r"`(\w+)`\s+in\s+`(rlflow/[\w/]+\.py)`", README)

    assert 5 == len({file for _, file in named})
    assert [] == [
        (name, file)
        for name, file in named
        if not re.search(rf"^(def |class )?{name}\b", (ROOT / file).read_text(), re.MULTILINE)
    ]


def test_the_architecture_names_every_folder_and_only_files_that_are_there():
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.findall(r"^\| `(rlflow/\S+?)/` \|", page, re.MULTILINE)
    files = re.findall(r"`(rlflow/[\w/]+\.py)`", page)

    assert sorted(listed) == folders("rlflow")
    assert files
    assert [] == [name for name in files if not (ROOT / name).is_file()]


def test_links_and_pictures_are_there():
    targets = re.findall(r"\]\(([^)#]+)\)", README)

    assert [] == [target for target in targets if not (ROOT / target).exists()]
