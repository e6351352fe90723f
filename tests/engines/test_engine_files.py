"""Shared memory that an engine has made goes with the engine, whoever is killed; nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from rlflow.engines.process.client.process import Command, EngineProcess
from rlflow.engines.process.server.rlflow_engine_process.sweeping import HELD_FILE
from tests.conftest import ROOT

SHARED = Path("/dev/shm")
# An engine, and a process of it, each with a file that is mapped, one that is only open, and one
# that is mapped under a name which it has no more, as a semaphore is.
ENGINE = """
import mmap, os, sys, time
def hold(name):
    mapped = open(f"/dev/shm/{name}-mapped", "xb+")
    mapped.truncate(4096)
    named = open(f"/dev/shm/{name}-first", "xb+")
    named.truncate(4096)
    held = mmap.mmap(mapped.fileno(), 4096), mmap.mmap(named.fileno(), 4096)
    mapped.close(), named.close()
    os.link(f"/dev/shm/{name}-first", f"/dev/shm/{name}-named")
    os.unlink(f"/dev/shm/{name}-first")
    return held, open(f"/dev/shm/{name}-open", "xb")
name = os.environ["NAME"]
if os.fork() == 0:
    os.close(int(sys.argv[2]))  # by which its end is told
    held = hold(name + "-child")
    time.sleep(300)
held = hold(name)
while not os.path.exists(os.environ["END"]):
    time.sleep(0.02)
"""
WORKER = """
import sys, time
from pathlib import Path
from rlflow.engines.process.client.process import Command, EngineProcess
name, end, script = sys.argv[1:]
environment = {"NAME": name, "END": end, "PATH": "/usr/bin:/bin"}
made = EngineProcess(
    Command(python=sys.executable, script=Path(script), environment=environment, descriptors=())
)
print(made.directory, flush=True)
time.sleep(300)
"""


@pytest.fixture
def name():
    made = f"made-{uuid.uuid4().hex}"
    yield made
    for file in SHARED.glob(f"*{made}*"):
        file.unlink()


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "engine.py"
    file.write_text(ENGINE)
    return file


def there(name):
    return sorted(file.name.removeprefix(name) for file in SHARED.glob(f"{name}*"))


def noted(directory, name):
    file = directory / HELD_FILE
    names = file.read_text().split("\0") if file.exists() else []
    return [each.removeprefix(name) for each in names]


def wait(met, seconds=30):
    until = time.monotonic() + seconds
    while not met() and time.monotonic() < until:
        time.sleep(0.02)
    assert met()


KINDS = ["-mapped", "-named", "-open"]
ALL = [*(f"-child{kind}" for kind in KINDS), *KINDS]


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_shared_memory_goes_with_the_engine(how, name, script, tmp_path):
    before = SHARED / f"before-{name}"
    before.touch()
    environment = {"NAME": name, "END": str(tmp_path / "end"), "PATH": "/usr/bin:/bin"}
    command = Command(python=sys.executable, script=script, environment=environment, descriptors=())
    made = EngineProcess(command)
    others = SHARED / f"other-{name}"
    others.touch()
    wait(lambda: there(name) == ALL)
    try:
        if how == "ended":  # its guardian looks every second
            wait(lambda: noted(made.directory, name) == ALL)
            (tmp_path / "end").touch()
            os.waitid(os.P_PID, made.pid, os.WEXITED | os.WNOWAIT)
    finally:
        made.kill()
        made.connection.close()
    assert there(name) == ALL
    made.remove()
    assert ([], True, True) == (there(name), before.exists(), others.exists())
    assert not made.directory.exists()


def test_shared_memory_goes_where_the_worker_was_killed(name, script, tmp_path):
    words = [sys.executable, "-c", WORKER, name, str(tmp_path / "end"), str(script)]
    others = SHARED / f"other-{name}"
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as worker:
        directory = Path(worker.stdout.readline().strip())
        others.touch()
        wait(lambda: there(name) == ALL)
        worker.send_signal(signal.SIGKILL)
    wait(lambda: not there(name) and not directory.exists())
    assert others.exists()
