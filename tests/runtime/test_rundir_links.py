"""Links in run directories are refused; what may hold a key is for its user alone."""

from __future__ import annotations

import os
import stat

import pytest

from rlflow.errors import RunDirError
from rlflow.runtime.ending import last_words
from rlflow.runtime.record.printed import FILE, LARGEST, LONGEST, Printed, PrintedLog
from rlflow.runtime.record.rundir import RunDir


@pytest.fixture
def run(tmp_path):
    made = RunDir.create(tmp_path / "run", "made", pipeline="made", command=["made"])
    made.close()
    return made


@pytest.mark.parametrize("name", ["metrics.jsonl", "logs/printed.txt", "config.json", "records"])
@pytest.mark.parametrize("how", [RunDir.open, RunDir.view])
def test_a_link_in_the_place_of_a_file_is_refused(run, tmp_path, name, how):
    outside = tmp_path / "outside"
    outside.write_text("precious")
    (run.path / name).symlink_to(outside)

    with pytest.raises(RunDirError) as caught:
        how(run.path)

    assert "error[E715]" in str(caught.value)
    assert name in str(caught.value)
    assert "precious" == outside.read_text()


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_a_file_is_refused(run):
    """Whoever opens it waits for whoever writes into it."""
    os.mkfifo(run.path / "spans" / "main.jsonl")

    with pytest.raises(RunDirError, match="E715"):
        RunDir.view(run.path)


def test_a_folder_that_is_a_link_is_refused_and_the_run_itself_may_be_one(run, tmp_path):
    (tmp_path / "link").symlink_to(run.path)
    RunDir.open(tmp_path / "link").close()
    (run.path / "spans").rmdir()
    (run.path / "spans").symlink_to(tmp_path)

    with pytest.raises(RunDirError, match="E715"):
        RunDir.open(run.path)


def test_links_of_trackers_are_theirs(run):
    (run.path / "wandb").mkdir()
    (run.path / "wandb" / "latest-run").symlink_to("run-1")
    RunDir.open(run.path).close()


def test_files_that_may_hold_a_key_are_for_their_user_alone(run):
    run.write_config({"a": 1})
    PrintedLog(run.logs / FILE, lambda text: None).keep(("a", "text"))
    last_words(ValueError("bad"), run.logs / "error.txt", "")

    for name in ("run.json", "config.json", f"logs/{FILE}", "logs/error.txt"):
        assert 0o600 == stat.S_IMODE((run.path / name).stat().st_mode), name


def test_what_is_printed_is_bounded_and_shown(tmp_path):
    log = PrintedLog(tmp_path / FILE, lambda text: None)
    stream = Printed(log.keep)
    stream.write("\x1b[2J\rforged\n" + "y" * (LONGEST + 5) + "\n")
    for _ in range(LARGEST // LONGEST + 9):
        stream.write("x" * (LONGEST + 1))  # never a line's end
    stream.write("late\n")
    text = (tmp_path / FILE).read_text()

    assert text.startswith("?: \\x1b[2J\\rforged\n")
    assert "y... (5 more letters)" in text
    assert LARGEST < len(text) < LARGEST + 3 * LONGEST
    assert text.endswith("what follows is not kept\n")
