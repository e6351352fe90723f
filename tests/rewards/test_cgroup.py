"""Control groups: where they can be made, what they hold to, and that none is left.

What the kernel does is tested where it lets this process make groups, and skipped elsewhere.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from rlflow.errors import RewardError
from rlflow.rewards import cgroup, sandbox
from rlflow.rewards.cgroup import Home, find
from rlflow.rewards.sandbox import run_python, walls_here
from rlflow.rewards.walls import Limits
from tests.rewards.jails import ALL, JAILED

HOME = find()
REAL = pytest.mark.skipif(HOME.path is None, reason=f"no cgroup: {HOME.why}")
MOUNT = "31 24 0:27 {root} {point} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER = "30 24 0:26 / /sys/fs/cgroup/pids rw shared:8 - cgroup cgroup rw,pids\n"
SMALL = Limits(cpu=10, wall=20, memory=128, disk=4, processes=8)
HOLDS = "held = bytearray(b'x') * ({mib} << 20)\n"


def tree(tmp_path, own, enabled, *, root="/"):
    """Files as the kernel has them: groups with what is enabled below each, and a process."""
    point = tmp_path / "cgroup mount"
    for name, names in enabled.items():
        folder = point / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.controllers").write_text("cpu memory pids\n")
        (folder / "cgroup.subtree_control").write_text(f"{names}\n")
        (folder / "cgroup.procs").write_text("")
    process = tmp_path / "process"
    process.mkdir()
    (process / "cgroup").write_text(f"5:memory:/old\n0::{own}\n")
    told = MOUNT.format(root=root, point=str(point).replace(" ", "\\040"))
    (process / "mountinfo").write_text(OTHER + told)
    return process, point


def test_the_nearest_group_that_is_divided_already(tmp_path):
    groups = {"": "memory", "app": "cpu memory pids", "app/run.scope": "memory pids"}
    process, point = tree(tmp_path, "/app/run.scope", groups)
    assert Home(point / "app/run.scope") == find(process)


def test_one_that_is_not_divided_is_asked_to(tmp_path):
    process, point = tree(tmp_path, "/app", {"": "", "app": "cpu"})
    assert Home(point / "app") == find(process)
    assert "+memory +pids" == (point / "app/cgroup.subtree_control").read_text()


def test_groups_are_named_from_the_one_that_is_mounted(tmp_path):
    process, point = tree(tmp_path, "/pod/run", {"run": "memory pids"}, root="/pod")
    assert Home(point / "run") == find(process)


@pytest.mark.parametrize("own", ["/../other", "/elsewhere"])
def test_a_process_outside_of_what_is_mounted(tmp_path, own):
    process, _ = tree(tmp_path, own, {}, root="/pod")
    found = find(process)
    assert found.path is None
    assert f"the process's cgroup {own} lies outside of" in found.why


def test_controllers_of_version_1_are_not_taken(tmp_path):
    process, point = tree(tmp_path, "/", {"": ""})
    (point / "cgroup.controllers").write_text("hugetlb\n")
    assert Home(None, f"{point}: no controller memory and pids of version 2") == find(process)


def test_no_version_2_at_all(tmp_path):
    process, _ = tree(tmp_path, "/", {})
    (process / "mountinfo").write_text(OTHER)
    assert Home(None, "no cgroup v2 is mounted here") == find(process)
    (process / "cgroup").unlink()
    assert "No such file" in find(process).why


def test_one_that_is_required_is_an_error_where_there_is_none(monkeypatch):
    monkeypatch.setattr(sandbox, "find", lambda: Home(None, "not here"))
    walls_here.cache_clear()
    with pytest.raises(RewardError, match=r"no cgroup \(not here\)"):
        run_python("print(1)", cgroup="required")
    assert "no cgroup (not here)" in walls_here("limits").without
    walls_here.cache_clear()


def groups():
    return list(HOME.path.glob(f"{cgroup.PREFIX}*"))


@REAL
@JAILED
def test_all_processes_have_no_more_memory_than_the_group(isolation):
    """Each below the limit of a process, all together above it."""
    program = f"import os, time\nfor _ in range(2): os.fork()\n{HOLDS.format(mib=60)}time.sleep(15)"
    began = time.monotonic()
    ran = run_python(program, limits=SMALL, isolation=isolation, cgroup="required")
    assert (137, "") == (ran.code, ran.cut)
    assert ran.stderr.endswith("ended: past 128 MiB of memory\n")
    assert time.monotonic() - began < 10
    assert [] == groups()


@REAL
@ALL
def test_what_fits_runs(isolation):
    program = f"{HOLDS.format(mib=60)}print(len(held) >> 20)"
    ran = run_python(program, limits=SMALL, isolation=isolation, cgroup="required")
    assert (0, "60\n", "") == (ran.code, ran.stdout, ran.stderr)
    assert [] == groups()


@REAL
@ALL
def test_threads_are_counted(isolation):
    program = (
        "import threading, time\n"
        "made = 0\n"
        "try:\n"
        "    while made < 50:\n"
        "        threading.Thread(target=time.sleep, args=(1,), daemon=True).start(); made += 1\n"
        "except RuntimeError: print(made < 8, flush=True)\n"
        "import os; os._exit(0)\n"
    )
    ran = run_python(program, limits=SMALL, isolation=isolation, cgroup="required")
    assert "True\n" == ran.stdout


@REAL
def test_a_group_kills_what_is_in_it():
    made = cgroup.make(HOME.path, memory=2**27, tasks=8)
    code = f"import os, time; os.write({made.joining}, b'0'); print(1, flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code]
    child = subprocess.Popen(command, pass_fds=(made.joining,), stdout=subprocess.PIPE)
    assert b"1\n" == child.stdout.readline()
    assert [str(child.pid)] == (made.path / "cgroup.procs").read_text().split()
    made.close()
    assert -9 == child.wait(10)
    child.stdout.close()
    assert [] == groups()


@REAL
def test_the_next_one_removes_what_a_killed_one_has_left():
    code = (
        "import os, signal\nfrom rlflow.rewards import cgroup\n"
        "made = cgroup.make(cgroup.find().path, memory=2**27, tasks=8)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert -9 == subprocess.run([sys.executable, "-c", code], check=False).returncode
    assert 1 == len(groups())
    held = cgroup.make(HOME.path, memory=2**27, tasks=8)
    assert [held.path] == groups()
    cgroup.remove_stale_groups(HOME.path)
    assert [held.path] == groups(), "a group that is in use stays"
    held.close()


@REAL
def test_a_group_that_cannot_be_made_is_an_error_and_not_a_weaker_jail(monkeypatch):
    walls_here("namespaces", "required")
    monkeypatch.setattr(cgroup, "PREFIX", "no/such/folder/")
    with pytest.raises(RewardError) as caught:
        run_python("print(1)", isolation="namespaces", cgroup="required")
    assert "E284" == caught.value.findings[0].code
