"""Run directories: what is in them, who may use them, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlflow.errors import RunDirError
from rlflow.runtime.record import durable
from rlflow.runtime.record.metrics import MetricsLog, read_metrics
from rlflow.runtime.record.rundir import RUNS, RunDir, fresh_path, latest_run

GIT = {
    "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@b",
    "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null",
}  # fmt: skip


def create(path: Path | None, name: str = "grpo", **options) -> RunDir:
    where = path or fresh_path(RUNS, name)
    return RunDir.create(
        where, name, pipeline=f"pipelines/{name}.py", command=["rlflow", "run"], **options
    )


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_a_new_run_has_its_facts(tmp_path):
    with create(tmp_path / "a") as run:
        facts = json.loads((run.path / "run.json").read_text())
        assert facts == run.read_run()
    assert [
        "again",
        "command",
        "git",
        "host",
        "id",
        "name",
        "pipeline",
        "started",
        "versions",
    ] == list(facts)
    assert ("grpo", "pipelines/grpo.py", ["rlflow", "run"]) == (
        facts["name"], facts["pipeline"], facts["command"],
    )  # fmt: skip
    assert sys.version.split()[0] == facts["versions"]["python"]
    assert {"torch", "transformers"} <= facts["versions"].keys()
    assert ["checkpoints", "lock", "logs", "run.json", "spans"] == names(tmp_path / "a")


def test_files_are_plain_sorted_and_repeatable(tmp_path):
    with create(tmp_path / "a") as run:
        run.write_config({"lr": 3e-4, "clip": float("inf"), "a": None})
        run.write_graph({"nodes": [{"params": {"judge_api_key": "k", "n": 1}}]})
        run.write_plan("1  run rollout\n", {"actions": ()})
    text = (tmp_path / "a" / "config.json").read_text()
    assert '{\n "a": null,\n "clip": {\n  "$float": "inf"\n },\n "lr": 0.0003\n}\n' == text
    assert "1  run rollout\n" == (tmp_path / "a" / "plan.txt").read_text()
    assert {"actions": []} == json.loads((tmp_path / "a" / "plan.json").read_text())
    assert {"nodes": [{"params": {"judge_api_key": "***", "n": 1}}]} == json.loads(
        (tmp_path / "a" / "graph.json").read_text()
    )


def test_default_path_names_pipeline_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [create(None) for _ in range(3)]
    assert 3 == len({run.path for run in runs})
    assert all(run.path.parent == Path("runs") for run in runs)
    assert runs[0].path.name.startswith("grpo-20")
    for run in runs:
        run.close()


def test_an_empty_directory_may_be_used(tmp_path):
    (tmp_path / "a").mkdir()
    create(tmp_path / "a").close()


def test_run_in_use_names_its_process(tmp_path):
    with create(tmp_path / "a"):
        for again in (lambda: create(tmp_path / "a"), lambda: RunDir.open(tmp_path / "a")):
            with pytest.raises(
                RunDirError, match=rf"E710.*in use by pid {os.getpid()} on "
            ) as caught:
                again()
            assert f"--run-dir {tmp_path}/a-2" in str(caught.value)
            assert 2 == caught.value.exit_code
        assert tmp_path / "a" == RunDir.view(tmp_path / "a").path


def test_a_run_stays_where_it_is_where_its_process_goes_elsewhere(tmp_path, monkeypatch):
    """As it does after a reward function that changes directory; most runs are named from here."""
    monkeypatch.chdir(tmp_path)
    with create(Path("a")) as run:
        monkeypatch.chdir("/")
        run.note(saved=True)
        with MetricsLog(run.metrics) as log:
            log.write(0, {"loss": 1.0})
        assert run.read_run()["saved"] is True
    assert ("a", 1) == (str(run.path), len(read_metrics(tmp_path / "a" / "metrics.jsonl")))


def test_a_forked_copy_does_not_hold_the_run(tmp_path):
    """A daemon that a reward function starts would keep it from being continued."""
    begun, begins = os.pipe()
    end, ends = os.pipe()
    with create(tmp_path / "a"):
        copy = os.fork()
        if copy == 0:
            os.close(ends)
            os.write(begins, b"!")
            os.read(end, 1)
            os._exit(0)
        os.read(begun, 1)
    try:
        RunDir.open(tmp_path / "a").close()
    finally:
        for each in (begun, begins, end, ends):
            os.close(each)
        os.waitpid(copy, 0)


def test_two_processes_cannot_share_a_run(tmp_path):
    code = (
        "import sys, pathlib\nfrom rlflow.runtime.record.rundir import RunDir\n"
        "run = RunDir.create(pathlib.Path(sys.argv[1]), 'x', pipeline='x.py', command=[])\n"
        "sys.stdout.write('held\\n'); sys.stdout.flush(); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with holder:
        assert "held\n" == holder.stdout.readline()
        with pytest.raises(RunDirError, match=f"in use by pid {holder.pid} on"):
            RunDir.open(tmp_path / "a")
        holder.kill()
    RunDir.open(tmp_path / "a").close()


def test_of_many_that_start_at_once_one_gets_the_directory(tmp_path):
    ready, go = os.pipe(), os.pipe()
    children = []
    for _ in range(6):
        pid = os.fork()
        if pid == 0:
            os.close(go[1])
            os.read(go[0], 1)
            try:
                create(tmp_path / "a")
            except RunDirError as error:
                os.write(ready[1], error.findings[0].code.encode() + b"\n")
            else:
                os.write(ready[1], b"got\n")
            os.close(ready[1])
            signal.pause()
        children.append(pid)
    os.close(go[0])
    os.close(go[1])
    os.close(ready[1])
    with os.fdopen(ready[0]) as answers:
        found = sorted(answers.readlines())
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert ["E710\n"] * 5 + ["got\n"] == found


def test_another_run_is_never_written_over(tmp_path):
    create(tmp_path / "a").close()
    (tmp_path / "a-2").mkdir()
    before = (tmp_path / "a" / "run.json").read_bytes()
    with pytest.raises(RunDirError) as caught:
        create(tmp_path / "a", "ppo")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"error[E711]: {tmp_path}/a holds a run of grpo, started 20")
    assert [
        f"  fix          rlflow run pipelines/grpo.py --resume {tmp_path}/a",
        f"               rlflow run pipelines/ppo.py --run-dir {tmp_path}/a-3",
    ] == lines[1:]
    assert before == (tmp_path / "a" / "run.json").read_bytes()
    RunDir.open(tmp_path / "a").close()


def test_lines_to_paste_are_quoted(tmp_path):
    create(tmp_path / "my run").close()
    with pytest.raises(RunDirError, match=f"--resume '{tmp_path}/my run'"):
        create(tmp_path / "my run")


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunDirError, match=r"E712.*holds other files(.|\n)*thesis.tex"):
        create(tmp_path)
    assert ["thesis.tex"] == names(tmp_path)


def test_what_is_no_run_cannot_be_opened(tmp_path):
    create(tmp_path / "grpo-1").close()
    with pytest.raises(RunDirError, match=r"not a run(.|\n)*no such dir(.|\n)*mean 'grpo-1'"):
        RunDir.open(tmp_path / "grpo-2")
    with pytest.raises(RunDirError, match="E712"):
        RunDir.view(tmp_path)
    with pytest.raises(RunDirError, match="E706"):
        create(tmp_path / "grpo-1" / "run.json")


def test_latest_run_is_the_last_started(tmp_path):
    for path, name in (("z", "grpo"), ("a", "ppo"), ("m", "grpo"), ("b", "ppo")):
        create(tmp_path / path, name).close()
    (tmp_path / "stray").mkdir()
    assert tmp_path / "b" == latest_run(tmp_path)
    assert tmp_path / "m" == latest_run(tmp_path, "grpo")
    assert tmp_path / "m" == latest_run(tmp_path, "pipelines/grpo.py")
    with pytest.raises(RunDirError, match=r"E713.*no run of grp(.|\n)*mean 'grpo'"):
        latest_run(tmp_path, "grp")
    with pytest.raises(RunDirError, match="no run at all"):
        latest_run(tmp_path / "absent")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "\x00"])
def test_damaged_run_file_is_said(tmp_path, text):
    create(tmp_path / "a").close()
    (tmp_path / "a" / "run.json").write_text(text)
    with pytest.raises(RunDirError, match="E714"):
        latest_run(tmp_path)
    with pytest.raises(RunDirError, match="E714"):
        create(tmp_path / "a")


def test_git_state(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with create(tmp_path / "runs" / "none") as run:
        assert run.read_run()["git"] is None

    def git(*words: str) -> str:
        environment = {**os.environ, **GIT}
        done = subprocess.run(
            ["git", *words], check=True, capture_output=True, text=True, env=environment
        )
        return done.stdout.strip()

    git("init", "-q")
    Path("file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "first")
    for name, content, dirty in (("clean", "one", False), ("dirty", "two", True)):
        Path("file").write_text(content)
        with create(tmp_path / "runs" / name) as run:
            assert {"commit": git("rev-parse", "HEAD"), "dirty": dirty} == run.read_run()["git"]


def test_environment_is_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "canary-7f3a")
    create(tmp_path / "a").close()
    assert all(
        b"canary-7f3a" not in f.read_bytes() for f in (tmp_path / "a").iterdir() if f.is_file()
    )


@pytest.mark.parametrize("stage", ["write", "fsync", "rename", "dirsync"])
def test_kill_while_writing_leaves_the_old_file_or_the_new(tmp_path, stage):
    create(tmp_path / "a").close()
    with RunDir.open(tmp_path / "a") as run:
        run.write_config({"v": 1})
    pid = os.fork()
    if pid == 0:
        os.environ[durable.FAULT_VARIABLE] = f"rundir:file:{stage}=kill9"
        durable.arm_from_environment()
        RunDir.open(tmp_path / "a").write_config({"v": 2})
        os._exit(0)
    assert signal.SIGKILL == os.WTERMSIG(os.waitpid(pid, 0)[1])
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert {"v": 1 if stage in {"write", "fsync"} else 2} == config
    with RunDir.open(tmp_path / "a"):
        assert not [name for name in names(tmp_path / "a") if durable.is_leftover(name)]


@pytest.mark.parametrize("stage", ["write", "fsync"])
def test_directory_of_a_run_that_died_at_birth_can_be_used(tmp_path, stage):
    pid = os.fork()
    if pid == 0:
        os.environ[durable.FAULT_VARIABLE] = f"rundir:file:{stage}=kill9"
        durable.arm_from_environment()
        create(tmp_path / "a")
        os._exit(0)
    assert signal.SIGKILL == os.WTERMSIG(os.waitpid(pid, 0)[1])
    create(tmp_path / "a").close()
