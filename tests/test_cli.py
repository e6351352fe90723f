"""The commands: what they print where, how they end, and what they never import."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from rlflow.cli import main as commands
from rlflow.cli.shell import leaving
from rlflow.errors import (
    CheckpointError,
    GraphError,
    Interrupted,
    InvariantError,
    PlanError,
    Preempted,
    RunDirError,
    RunError,
    UsageError,
)
from tests.conftest import PIPELINES, QUICK, ROOT, SMALL, ended, process

GRPO = PIPELINES / "grpo_arithmetic.py"
CODES = {
    RunError: 1,
    CheckpointError: 1,
    UsageError: 2,
    RunDirError: 2,
    GraphError: 3,
    PlanError: 4,
    InvariantError: 70,
    Interrupted: 130,
    Preempted: 75,
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_rlflow_alone_shows_examples(rlflow):
    result = rlflow()
    assert 2 == result.code
    for line in ("  rlflow viz  pipelines", "  rlflow plan pipelines", "  rlflow run  pipelines"):
        assert line in result.out + result.err


def test_rlflow_run_alone_shows_examples(rlflow):
    result = rlflow("run")
    assert 2 == result.code
    assert 2 == (result.out + result.err).count("    rlflow run pipelines/")


@pytest.mark.parametrize("command", sorted(commands.cli.commands))
def test_every_command_has_help(rlflow, command):
    result = rlflow(command, "--help")
    assert 0 == result.code
    assert result.out.startswith(f"Usage: rlflow {command} ")


def test_version(rlflow):
    result = rlflow("--version")
    assert 0 == result.code
    assert result.out.startswith("rlflow, version ")


def test_an_unknown_option_and_an_unknown_command(rlflow):
    assert 2 == rlflow("run", GRPO, "--iteratoins", 3).code
    assert "--iterations" in rlflow("run", GRPO, "--iteratoins", 3).err
    assert 2 == rlflow("runn").code


@pytest.mark.parametrize(("error", "code"), CODES.items(), ids=lambda value: str(value))
def test_each_class_of_error_has_its_exit_code(rlflow, monkeypatch, error, code):
    def fail(_):
        raise error(summary="what happened")

    monkeypatch.setattr("rlflow.cli.commands.check_all", fail)
    result = rlflow("check", GRPO)
    assert (code, "", "what happened\n") == result


def test_a_bug_is_written_to_a_file(rlflow, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("rlflow.cli.commands.check_all", lambda _: 1 / 0)
    result = rlflow("check", GRPO)
    assert 70 == result.code
    assert result.err.startswith(
        "error[E900]: a bug in rlflow: ZeroDivisionError: division by zero\n  traceback    "
    )
    (file,) = tmp_path.glob("rlflow-bug-*.txt")
    assert str(file) in result.err
    assert "ZeroDivisionError" in file.read_text()


def test_ctrl_c_outside_of_a_run(rlflow, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("rlflow.cli.commands.check_all", interrupt)
    result = rlflow("check", GRPO)
    assert 130 == result.code
    assert "stopped at once" == result.err.strip()
    assert "Traceback" not in result.err


def test_debug_shows_the_traceback(rlflow):
    assert "Traceback" in rlflow("--debug", "check", "nothing.py").err
    assert "Traceback" not in rlflow("check", "nothing.py").err


def test_a_part_is_checked_on_the_devices_that_it_needs(rlflow):
    words = ("check", GRPO, "--placement", "split")
    assert "on cpu:2" in rlflow(*words).out
    assert "1 model   ok\nplacement split: 3 actions on cpu:1 " in (
        rlflow(*words, "--only", "actor.rollout").out
    )


def test_only_the_word_error_is_painted(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[31m\x1b[1merror\x1b[0m[E101]: x" == commands.painted("error[E101]: x")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "error[E101]: x" == commands.painted("error[E101]: x")


@pytest.mark.parametrize(
    "words",
    [
        ("check", GRPO, "--json"),
        ("plan", GRPO, "--json"),
        ("plan", GRPO, "--placement", "split", "--devices", "cpu:2", "--json"),
        ("viz", GRPO, "--format", "json"),
        ("diff", GRPO, "--json"),
        ("doctor", "--json"),
    ],
    ids=lambda words: " ".join(map(str, words[:1])),
)
def test_json_is_all_there_is_on_standard_output(rlflow, words):
    result = rlflow(*words)
    assert 0 == result.code, result.err
    assert json.loads(result.out)


@pytest.mark.slow
@pytest.mark.torch
def test_a_run_prints_json_only_and_says_nothing_else(rlflow, tmp_path):
    words = (*SMALL, *QUICK, "--set", "group_size=4", "--iterations", 1, "--json")
    result = rlflow("run", GRPO, *words, "--run-dir", "out")
    assert 0 == result.code, result.err
    found = json.loads(result.out)
    assert {"iterations": 1, "run_dir": "out"} == {
        key: found[key] for key in ("iterations", "run_dir")
    }
    assert "eval/reward" in found["metrics"]
    assert "" == result.err
    dry = rlflow("run", GRPO, *words, "-n")
    assert {"iterations": 0, "run_dir": None, "metrics": {}} == json.loads(dry.out)


def test_plan_prints_the_plan_and_names_the_next_command(rlflow):
    result = rlflow("plan", GRPO, "--placement", "split", "--devices", "cpu:2")
    assert 0 == result.code
    assert "actor@train -> actor@gen" in result.out
    assert f"next: rlflow run {GRPO} --placement split " in result.err
    assert "after " in rlflow("plan", GRPO, "--show-passes").out


def test_the_backend_is_chosen_or_said(rlflow):
    split = ("plan", GRPO, "--placement", "split", "--devices", "cpu:2")
    chosen, said = rlflow(*split), rlflow(*split, "--backend", "ray")
    assert "   backend local\n" in chosen.out
    assert " 0 transfer" in chosen.out
    assert "   backend ray\n" in said.out
    assert " 4 transfer" in said.out
    assert "   backend local\n" in rlflow("plan", GRPO, "--devices", "h100:1").out
    gpus = rlflow("plan", GRPO, "--placement", "split", "--devices", "h100:2")
    assert "  backend ray: one process a device: the devices are h100\n" in gpus.out
    assert "backend ray:" not in said.out
    assert 0 == rlflow("check", GRPO, "--backend", "ray").code
    assert 2 == rlflow("plan", GRPO, "--backend", "rey").code


def test_diff_tells_plans_of_a_backend_apart(rlflow):
    words = ("diff", GRPO, "--devices", "cpu:2")
    local, ray = (rlflow(*words, "--backend", backend) for backend in ("local", "ray"))
    assert "only in split\n    reshard" in local.out
    assert "transfer prompts" not in local.out
    assert "transfer prompts" in ray.out


def test_plan_writes_the_same_bytes_twice(rlflow, tmp_path):
    for name in ("one.json", "two.json"):
        assert 0 == rlflow("plan", GRPO, "-o", name).code
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert (tmp_path / "one.json").read_text() == rlflow("plan", GRPO, "--json").out


def test_plan_config_says_where_each_value_comes_from(rlflow):
    result = rlflow("plan", GRPO, "--config", "--set", "lr=3e-4")
    rows = {line.split()[0]: line.split()[2:] for line in result.out.splitlines()}
    assert ["0.0003", "--set"] == rows["lr"]
    assert ["8", "default"] == rows["group_size"]


def test_plan_explains_an_action(rlflow):
    assert "actor.update" in rlflow("plan", GRPO, "--explain", "actor.update").out
    result = rlflow("plan", GRPO, "--explain", "actor.updat")
    assert 2 == result.code
    assert "error[E206]: the plan has no action 'actor.updat'\n" in result.err
    assert "did you mean 'actor.update'" in result.err


def test_diff_tells_the_placements_apart(rlflow):
    words = ("diff", GRPO, "--devices", "cpu:2")
    result = rlflow(*words)
    assert 0 == result.code
    assert "colocate" in result.out
    assert "split" in result.out
    assert 1 == rlflow(*words, "--exit-code").code
    same = ("--placement", "split", "--placement", "split")
    assert 0 == rlflow(*words, *same, "--exit-code").code
    result = rlflow("diff", PIPELINES / "sft_arithmetic.py")
    assert 2 == result.code
    assert "error[E207]: diff compares two placements, got 1\n" in result.err


def test_later_settings_win(rlflow):
    result = rlflow("plan", GRPO, "--config", "--set", "group_size=2", "--set", "group_size=4")
    assert "group_size" in result.out
    assert ["4"] == [
        line.split()[2] for line in result.out.splitlines() if line.startswith("group_size")
    ]


@pytest.mark.torch
def test_a_dry_run_creates_nothing_and_prints_the_plan_of_plan(rlflow, tmp_path):
    dry = rlflow("run", GRPO, "-n")
    assert 0 == dry.code
    assert "dry run: 400 iterations would run; nothing was started" in dry.out
    assert dry.out.startswith(rlflow("plan", GRPO).out.rstrip("\n"))
    assert [] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.torch
def test_the_line_that_continues_a_run_continues_it(rlflow, tmp_path):
    """The config says 1 iteration, the command line 3: the line has twice of these."""
    words = (*SMALL, "--set", "group_size=4", "--set", "iterations=1", "--deadline", "77.5")
    result = rlflow("run", GRPO, *words, "--iterations", 3, "--run-dir", "with space")
    assert 0 == result.code, result.err
    line = next(row for row in result.out.splitlines() if row.startswith("continue: "))
    assert "--deadline 77.5 --iterations 6 --resume 'with space'" in line
    again = rlflow(*shlex.split(line)[2:], "--iterations", 4)
    assert 0 == again.code, again.err
    assert "resuming after iteration 3" in again.err
    assert 4 == json.loads((tmp_path / "with space" / "config.json").read_text())["iterations"]

    taken = rlflow("run", GRPO, *words, "--run-dir", "with space")
    line = next(row for row in taken.err.splitlines() if row.startswith("  fix "))
    done = rlflow(*shlex.split(line)[2:])
    assert 0 == done.code, done.err


@pytest.mark.torch
@pytest.mark.parametrize("existing", [False, True])
def test_ctrl_c_while_loading_names_what_is_there(rlflow, monkeypatch, tmp_path, existing):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    words = ("run", GRPO, *SMALL, "--set", "group_size=4", "--iterations", 1)
    if existing:
        assert 0 == rlflow(*words, "--run-dir", "mine").code
    monkeypatch.setattr("rlflow.runtime.worker.worker.Worker.__init__", interrupt)
    result = rlflow(*words, *(("--resume", "mine") if existing else ("--run-dir", "mine")))
    assert 130 == result.code
    assert existing == (tmp_path / "mine").exists()
    last = result.err.splitlines()[-1]
    assert ("continue with: rlflow run" in last) == existing
    assert ("no iteration had begun, so mine was removed" in last) != existing


@pytest.mark.torch
@pytest.mark.parametrize("at", ["_start", "remove"])
def test_a_signal_while_a_run_directory_is_made_or_removed_says_what_is_there(
    rlflow, monkeypatch, tmp_path, at
):
    """Of the third signal the process ends in any line; what it says there is asked for in one."""
    said = []

    def third(*_):
        said.append((leaving._signals.said(), (tmp_path / "mine" / "run.json").exists()))
        raise KeyboardInterrupt

    monkeypatch.setattr("rlflow.cli.running.weights_to_begin", third)
    monkeypatch.setattr(f"rlflow.runtime.record.rundir.RunDir.{at}", third)
    result = rlflow("run", GRPO, *SMALL, "--run-dir", "mine")
    assert 130 == result.code
    for text, there in [*said, (result.err, (tmp_path / "mine" / "run.json").exists())]:
        assert there == ("continue with: rlflow run " in text)
        assert there != ("no iteration had begun" in text)
    assert (at == "remove") == there


@pytest.mark.torch
def test_standard_output_carries_the_result_and_standard_error_the_rest(rlflow):
    words = (*SMALL, "--set", "group_size=4", "--iterations", 2, "--run-dir", "out")
    result = rlflow("run", GRPO, *words)
    assert result.out.startswith("grpo   2 iterations   placement colocate ")
    assert "run directory: out\n" in result.err
    assert "run directory" not in result.out
    assert "\x1b" not in result.out + result.err
    quiet = rlflow("run", GRPO, *words, "-q", "--resume")
    assert ("", "") == (quiet.out, quiet.err)


@pytest.mark.slow
@pytest.mark.torch
def test_export_writes_a_model_that_a_run_starts_from(rlflow, tmp_path):
    words = (*SMALL, "--set", "group_size=4", "--iterations", 1, "-q")
    assert 0 == rlflow("run", GRPO, *words, "--run-dir", "out").code
    result = rlflow("export", "out", "-o", "model")
    assert (0, "model   weights after 1 iterations\n") == (result.code, result.out)
    again = rlflow("run", GRPO, *words, "--set", "model=./model", "--run-dir", "again")
    assert 0 == again.code, again.err
    wrong = rlflow("export", "out", "-o", "other", "--model", "acter")
    assert 2 == wrong.code
    assert "did you mean 'actor'" in wrong.err
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.torch
def test_export_says_which_checkpoints_are_damaged_and_that_there_is_none(rlflow, tmp_path):
    words = (*SMALL, "--set", "group_size=4", "--iterations", 2, "--save-every", 1, "-q")
    assert 0 == rlflow("run", GRPO, *words, "--run-dir", "out").code
    checkpoints = tmp_path / "out" / "checkpoints"
    newest = max(checkpoints.iterdir())
    max(newest.rglob("*.safetensors")).write_bytes(b"cut")
    result = rlflow("export", "out", "-o", "model")
    assert 0 == result.code, result.err
    assert f"warning: checkpoint {newest.name} cannot be used: " in result.err
    words = (*words, "--iterations", 1, "--run-dir", "next", "--from-weights", "out")
    assert f"checkpoint {newest.name} cannot be used: " in rlflow("run", GRPO, *words).err
    shutil.rmtree(checkpoints)
    checkpoints.mkdir()
    result = rlflow("export", "out", "-o", "other")
    assert 1 == result.code
    assert "error[E754]: out has no checkpoint yet" in result.err
    assert 2 == rlflow("export", "nothing", "-o", "model").code


@pytest.mark.torch
def test_report_writes_a_page(rlflow, tmp_path):
    words = (*SMALL, "--set", "group_size=4", "--iterations", 1, "-q")
    assert 0 == rlflow("run", GRPO, *words, "--run-dir", "out").code
    result = rlflow("report", "out")
    assert 0 == result.code, result.err
    assert (tmp_path / "out" / "report.html").is_file()
    assert 2 == rlflow("report", "nothing").code


def test_doctor_names_what_is_missing_and_what_to_type(rlflow, monkeypatch):
    from importlib.metadata import PackageNotFoundError, version

    def missing(name):
        if name == "safetensors":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    result = rlflow("doctor")
    assert 1 == result.code
    assert (
        "missing  safetensors    not installed   type: pip install -c constraints.txt safetensors"
    ) in result.out.splitlines()


HEAVY = """
import sys
from click.testing import CliRunner
from rlflow.cli.main import cli
from rlflow.errors import RlflowError
for words in {commands!r}:
    result = CliRunner().invoke(cli, words)
    refused = isinstance(result.exception, RlflowError)
    assert refused or result.exit_code == 0, (words, result.output, result.exception)
    heavy = {{"torch", "ray", "transformers", "numpy", "tensordict", "pyarrow", "datasets",
              "matplotlib", "pygraphviz"}} & set(sys.modules)
    print(*words, sorted(heavy))
    if "plan" in words:
        import rlflow.report.report
"""


def test_what_does_not_run_imports_neither_torch_nor_ray(tmp_path):
    """One command after another in one process: the first that loads something is named."""
    commands = [
        ("--help",),
        ("check", GRPO),
        ("check", PIPELINES / "ppo_arithmetic.py"),
        ("check", PIPELINES / "grpo_gsm8k.py"),
        ("run", GRPO, "--set", "modle=x"),
        ("run", GRPO, "--devices", "cpu:1@1MB"),
        ("viz", GRPO),
        ("viz", GRPO, "-o", "graph.dot"),
        ("viz", GRPO, "--format", "json"),
        ("viz", GRPO, "--level", "plan", "--format", "mermaid"),
        ("diff", GRPO),
        ("plan", GRPO, "--show-passes"),
        ("simulate", GRPO),
        ("doctor",),
        ("tune", GRPO, "--devices", "cpu:2"),
    ]
    lines = [[str(word) for word in words] for words in commands]
    done = subprocess.run(
        [sys.executable, "-c", HEAVY.format(commands=lines)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "" == done.stderr
    assert [" ".join([*words, "[]"]) for words in lines] == done.stdout.splitlines()


def test_output_into_a_closed_pipe_is_no_error(tmp_path):
    started = process("plan", GRPO, "--show-passes", cwd=tmp_path)
    started.stdout.close()
    started.stdout = None
    result = ended(started)
    assert "Traceback" not in result.err
    assert "Errno 32" not in result.err
    assert result.code in (0, 1)


def test_commands_work_through_the_click_runner():
    result = CliRunner().invoke(commands.cli, ["check", str(GRPO)])
    assert 0 == result.exit_code
    assert "grpo: 7 nodes, 2 models   ok" in result.output
