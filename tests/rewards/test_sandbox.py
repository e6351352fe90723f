"""A program in a jail: what it may use, what it may not reach, and that nothing of it stays."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rlflow.errors import RewardError
from rlflow.rewards import walls
from rlflow.rewards.sandbox import Ran, run_python, walls_here
from rlflow.rewards.walls import Limits
from tests.rewards.jails import ALL, JAILED

SHORT = Limits(cpu=1, wall=60)


@JAILED
def test_an_environment_behind_a_link_is_seen(isolation, tmp_path):
    """As in a project folder that is a link: the jail has real paths only."""
    link = tmp_path / "linked"
    link.symlink_to(sys.prefix)
    code = (
        "from rlflow.rewards.sandbox import run_python\n"
        f"print(run_python('print(6 * 7)', isolation={isolation!r}).stdout)"
    )
    python = link / Path(sys.executable).relative_to(sys.prefix)
    made = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    assert (0, "42\n\n") == (made.returncode, made.stdout), made.stderr


@pytest.mark.rows(1)
@ALL
def test_a_program_reads_its_input_and_writes_its_output(isolation):
    program = "import sys\nprint(sys.stdin.read().upper(), end='')\nprint('e', file=sys.stderr)"
    ran = run_python(program, "abc é\n", isolation=isolation)
    assert Ran(code=0, stdout="ABC É\n", stderr="e\n") == ran


@ALL
def test_much_input_that_nobody_reads(isolation):
    assert "1\n" == run_python("print(1)", "x" * 1_000_000, isolation=isolation).stdout


@pytest.mark.rows(3)
@ALL
@pytest.mark.parametrize(
    ("program", "code"),
    [("import sys; sys.exit(3)", 3), ("1/0", 1), ("import sys; sys.exit(120)", 120)],
)
def test_the_exit_code_is_that_of_the_program(isolation, program, code):
    assert code == run_python(program, isolation=isolation).code


@pytest.mark.rows(8)
@ALL
@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("x = 'a' * 2_000_000_000", "MemoryError"),
        ("open('big', 'w').write('a' * 40_000_000)", "OSError"),
        ("open('/etc/passwd').read()", "Error"),
        ("open('/usr/mark', 'w')", "Error"),
        ("open('/proc/1/environ').read()", "PermissionError"),
        ("import os; os.listdir(os.path.expanduser('~root'))", "Error"),
    ],
)
def test_what_a_program_may_not_do(isolation, program, error):
    ran = run_python(program, limits=SHORT, isolation=isolation)
    assert 1 == ran.code
    assert ran.stderr.rstrip().splitlines()[-1].partition(":")[0].endswith(error)


@pytest.mark.rows(1)
@ALL
def test_a_server_of_this_machine_is_out_of_reach(isolation):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        socket.create_connection(address).close()
        program = f"import socket; socket.create_connection({address!r}, 5)"
        ran = run_python(program, limits=SHORT, isolation=isolation)
    assert 1 == ran.code
    told = {"bubblewrap": "refused", "namespaces": "unreachable", "limits": "not allowed here"}
    assert told[isolation] in ran.stderr  # bubblewrap has a loopback device of its own


@JAILED
def test_what_is_shown_is_read_only(isolation):
    shown = ["/usr", os.path.realpath(sys.prefix)]
    program = f"import os; print([os.statvfs(path).f_flag & 1 for path in {shown!r}])"
    assert "[1, 1]\n" == run_python(program, isolation=isolation).stdout


@pytest.mark.rows(1)
@ALL
def test_a_spin_is_ended_by_processor_time(isolation):
    ran = run_python("while True: pass", limits=SHORT, isolation=isolation)
    assert ("", True) == (ran.cut, ran.code > 128)


@ALL
def test_a_program_that_waits_is_ended_by_the_wall_clock(isolation):
    limits = Limits(wall=0.3)
    program = "import threading; threading.Event().wait()"
    assert "wall clock" == run_python(program, limits=limits, isolation=isolation).cut


@pytest.mark.rows(1)
@ALL
def test_endless_output_is_cut(isolation):
    ran = run_python("while True: print('x' * 1000)", isolation=isolation)
    assert ("output", 2**20) == (ran.cut, len(ran.stdout))


@pytest.mark.rows(1)
@ALL
def test_the_environment_stays_outside(isolation, monkeypatch, tmp_path):
    monkeypatch.setenv("CANARY", "secret")
    monkeypatch.chdir(tmp_path)
    program = "import os, sys; print(os.environ.get('CANARY'), sys.path)"
    ran = run_python(program, isolation=isolation)
    assert ran.stdout.startswith("None ")
    assert str(tmp_path) not in ran.stdout


@pytest.mark.rows(1)
@ALL
def test_the_folder_is_empty_and_gone_afterwards(isolation, tmp_path, monkeypatch):
    monkeypatch.setattr(walls.tempfile, "tempdir", str(tmp_path))
    program = "import os; open('made', 'w').close(); print(sorted(os.listdir('.')))"
    for _ in range(2):
        assert "['made', 'main.py']\n" == run_python(program, isolation=isolation).stdout
    assert [] == list(tmp_path.iterdir())


@JAILED
def test_the_jail_has_its_own_processes_user_and_root(isolation):
    program = (
        "import os\n"
        "pids = [name for name in os.listdir('/proc') if name.isdigit()]\n"
        "print(os.getuid(), len(pids), os.path.exists('/home'), os.path.exists('/root/.ssh'))\n"
    )
    assert "1000 2 False False\n" == run_python(program, isolation=isolation).stdout


@JAILED
def test_signals_reach_nobody_outside(isolation):
    program = "import os\nfor pid in (1, os.getppid()): os.kill(pid, 9)\nprint('still here')"
    assert "still here\n" == run_python(program, isolation=isolation).stdout


@JAILED
def test_a_daemon_dies_with_its_jail(isolation, tmp_path):
    mark = f"rlflow-{os.getpid()}-daemon"
    program = (
        "import os, sys, threading\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        os.execv(sys.executable, [sys.executable, '-c', 'import threading; "
        f"threading.Event().wait()', '{mark}'])\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "print('started')\n"
    )
    ran = run_python(program, limits=Limits(wall=3), isolation=isolation)
    assert "started\n" == ran.stdout
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert [] == [line for line in lines if mark.encode() in line and b"fork" not in line]


@JAILED
def test_a_fork_bomb_is_contained(isolation):
    program = (
        "import os\n"
        "made = 0\n"
        "try:\n"
        "    while os.fork():\n"
        "        made += 1\n"
        "    import threading; threading.Event().wait()\n"
        "except BlockingIOError:\n"
        "    print(made < 20)\n"
    )
    assert "True\n" == run_python(program, limits=Limits(processes=16), isolation=isolation).stdout


@JAILED
def test_privileges_cannot_be_had(isolation):
    program = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.mount(b'x', b'/sandbox', b'tmpfs', 0, b''), os.strerror(ctypes.get_errno()))\n"
        "print(libc.umount2(b'/usr', 2), os.strerror(ctypes.get_errno()))\n"
    )
    refused = "-1 Operation not permitted\n"
    assert refused * 2 == run_python(program, isolation=isolation).stdout


def test_a_jail_that_cannot_be_made_is_an_error_and_not_a_weaker_one(monkeypatch):
    monkeypatch.setattr(walls, "visible_paths", lambda: ["/usr", "/no/such/folder"])
    walls_here.cache_clear()
    with pytest.raises(RewardError) as caught:
        run_python("print(1)")
    walls_here.cache_clear()
    assert "E284" == caught.value.findings[0].code
    assert "FileNotFoundError" in caught.value.findings[0].got


def test_the_jail_and_its_guard_import_nothing_of_rlflow():
    for file in (walls.JAIL, walls.GUARD):
        program = f"import runpy, sys; sys.argv = ['x']\ntry:\n    runpy.run_path({str(file)!r})\n"
        program += "finally:\n    print([name for name in sys.modules if 'rlflow' in name])"
        command = [sys.executable, "-I", "-S", "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "[]\n" == done.stdout, done.stderr
