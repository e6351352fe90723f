"""Processes end with those that started them, and a session's processes are told from others."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time

import pytest

from rlflow.runtime.ray.cluster import reaper
from rlflow.runtime.ray.cluster.process_lifetime import Reaper, session_processes
from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals of the Linux kernel")

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""
CHILD = """
import time
from rlflow.runtime.ray.cluster.process_lifetime import die_with_parent
die_with_parent()
print("ready", flush=True)
time.sleep(300)
"""


LAST = """
import os, sys
from rlflow.runtime.ray.cluster.process_lifetime import a_word_if_gone
with a_word_if_gone("told"):
    if sys.argv[1] == "within":
        os._exit(1)
os._exit(1)
"""


def gone_within(seconds, pid):
    end = time.monotonic() + seconds
    while reaper.parent_of(pid) is not None and time.monotonic() < end:
        time.sleep(0.02)
    return reaper.parent_of(pid) is None


def test_a_process_dies_with_the_one_that_started_it():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    child = int(parent.stdout.readline())
    assert reaper.parent_of(child) == parent.pid

    parent.kill()
    parent.communicate()

    assert gone_within(10, child)


@pytest.fixture
def start(tmp_path):
    """Start sleeping processes; they end with the test."""
    started = []

    def begin(*words, **options):
        process = subprocess.Popen(words or ("sleep", "300"), **options)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_processes_are_known_by_mark_by_open_file_and_by_descent(start, tmp_path):
    name = secrets.token_hex(8)
    inside = tmp_path / "session"
    inside.mkdir()
    marked = start(env={**os.environ, reaper.MARK: name})
    with (inside / "log").open("w") as log:
        writing = start("sh", "-c", "sleep 300 >/dev/null & echo; wait", stdout=log)
    start()
    while not (inside / "log").read_text():
        time.sleep(0.02)

    found = session_processes(name, inside)

    (child,) = found - {marked.pid, writing.pid}
    assert reaper.parent_of(child) == writing.pid
    assert {marked.pid} == session_processes(name)
    assert set() == session_processes(secrets.token_hex(8), tmp_path / "other")


def test_a_reaper_ends_the_session_and_spares_who_asks(start, tmp_path):
    name = secrets.token_hex(8)
    inside = tmp_path / "session"
    inside.mkdir()
    marked = start(env={**os.environ, reaper.MARK: name})
    other = start()
    (inside / "kept open").write_text("by the process that asks")
    with (inside / "kept open").open():
        assert Reaper(name, inside).finish(20)

    assert -9 == marked.wait(timeout=10)
    assert other.poll() is None
    assert not inside.exists()


def test_a_reaper_that_was_killed_is_stood_in_for(start, tmp_path):
    name = secrets.token_hex(8)
    marked = start(env={**os.environ, reaper.MARK: name})
    ours = Reaper(name, tmp_path / "session")
    ours._process.kill()

    assert ours.finish(20)

    assert -9 == marked.wait(timeout=10)


@pytest.mark.parametrize(("when", "said"), [("within", b"told"), ("after", b"")])
def test_last_words_are_said_for_a_process_that_ends_without_its_own(when, said):
    done = subprocess.run(
        [sys.executable, "-c", LAST, when],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert (1, said) == (done.returncode, done.stderr)
