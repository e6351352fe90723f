"""What was found to break out of a jail's limits, one test each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlflow.rewards import jail
from rlflow.rewards.sandbox import run_python
from rlflow.rewards.walls import Limits, sweep_jails
from tests.rewards.jails import JAILED

WAITS = (
    "import os, sys\n"
    "command = [sys.executable, '-I', '-S', '-c', 'import time; time.sleep(60)', '{mark}']\n"
    "os.execv(sys.executable, command)\n"
)
CALLS = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
SMALL = Limits(cpu=10, wall=10, memory=256)


def running(mark):
    """Processes with a mark on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            parts = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in parts:
            found.append(int(path.parent.name))
    return found


def until(holds, seconds=10.0):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


def started(mark, wall, isolation, **environment):
    """A process that runs a waiting program in a jail, once the program runs."""
    code = (
        "from rlflow.rewards.sandbox import Limits, run_python\n"
        f"run_python({WAITS.format(mark=mark)!r}, limits=Limits(wall={wall}), "
        f"isolation={isolation!r})\n"
    )
    outside = subprocess.Popen([sys.executable, "-c", code], env=os.environ | environment)
    assert until(lambda: running(mark))
    return outside


@JAILED
def test_a_program_dies_with_a_run_that_is_killed(isolation, tmp_path):
    """Its folder has no owner then, and goes with the next sweep, which leaves what is held."""
    mark = f"rlflow-{os.getpid()}-killed"
    outside = started(mark, 60, isolation, TMPDIR=str(tmp_path))
    (folder,) = tmp_path.iterdir()
    sweep_jails.__wrapped__(str(tmp_path))
    assert folder.exists()
    outside.kill()
    outside.wait()
    assert until(lambda: not running(mark), 3.0)
    sweep_jails.__wrapped__(str(tmp_path))
    assert [] == list(tmp_path.iterdir())


@pytest.mark.slow
@JAILED
def test_the_wall_clock_holds_where_nobody_outside_looks(isolation, tmp_path):
    mark = f"rlflow-{os.getpid()}-stopped"
    outside = started(mark, 1, isolation, TMPDIR=str(tmp_path))
    os.kill(outside.pid, signal.SIGSTOP)
    try:
        assert until(lambda: not running(mark), 5.0)
    finally:
        outside.kill()
        outside.wait()


@pytest.mark.rows(5)
@JAILED
@pytest.mark.parametrize(
    "call",
    [
        "libc.shmget(0, 1 << 28, 0o1600)",
        "libc.memfd_create(b'x', 0)",
        "libc.unshare(0x10000000)",
        "libc.unshare(0x8000000)",
        f"libc.syscall({jail.CLONE[os.uname().machine]}, 0x10000011, 0, 0, 0, 0)",
        "libc.syscall(425, 8, 0)",
        "libc.syscall(0x40000000 | 39)",
    ],
)
def test_memory_and_namespaces_that_no_limit_counts_cannot_be_had(isolation, call):
    refused = "-1 Operation not permitted\n"
    program = f"{CALLS}print({call}, os.strerror(ctypes.get_errno()))"
    assert refused == run_python(program, limits=SMALL, isolation=isolation).stdout


@JAILED
def test_clone_of_the_new_kind_falls_back(isolation):
    program = f"{CALLS}print(libc.syscall(435, 0, 0), os.strerror(ctypes.get_errno()))\n"
    program += "import threading; t = threading.Thread(target=print, args=('ran',))\n"
    program += "t.start(); t.join()\nprint(os.waitpid(os.fork() or os._exit(3), 0)[1] >> 8)"
    assert (
        "-1 Function not implemented\nran\n3\n"
        == run_python(program, limits=SMALL, isolation=isolation).stdout
    )


@pytest.mark.rows(1)
@JAILED
def test_many_processes_have_no_more_memory_than_one(isolation):
    """Each below the limit of a process, all together above it."""
    program = (
        "import os, time\n"
        "for _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        held = bytearray(b'x') * (120 << 20)\n"
        "        time.sleep(30)\n"
        "time.sleep(30)\n"
    )
    began = time.monotonic()
    limits = Limits(wall=20, memory=256)
    ran = run_python(program, limits=limits, isolation=isolation, cgroup="none")
    assert (137, "") == (ran.code, ran.cut)
    assert "ended: past 256 MiB of memory" in ran.stderr
    assert time.monotonic() - began < 10


@JAILED
def test_memory_that_copies_share_counts_once(isolation):
    program = (
        "import os, time\n"
        "held = bytearray(b'x') * (120 << 20)\n"
        "made = [os.fork() or (time.sleep(0.3), os._exit(0)) for _ in range(4)]\n"
        "print([os.waitpid(copy, 0)[1] for copy in made])\n"
    )
    assert "[0, 0, 0, 0]\n" == run_python(program, limits=SMALL, isolation=isolation).stdout


@JAILED
def test_empty_files_are_counted(isolation):
    program = (
        "made = 0\n"
        "try:\n"
        "    while made < 1_000_000:\n"
        "        open(f'f{made}', 'w').close(); made += 1\n"
        "except OSError as error: print(made < 5000, error.strerror)\n"
    )
    ran = run_python(program, limits=SMALL, isolation=isolation)
    ended = {
        "namespaces": "True No space left on device\n",
        "bubblewrap": "\nended: past 4096 files\n",
    }
    assert ended[isolation] == ran.stdout + ran.stderr


@pytest.mark.rows(2)
@JAILED
@pytest.mark.parametrize(
    "act",
    [
        "os.kill(1, signal.SIGSTOP); os.kill(1, signal.SIGKILL); print('no effect')",
        "open('/proc/1/mem', 'r+b')",
        "print(libc.syscall(311, 1, 0, 0, 0, 0, 0))",
    ],
)
def test_the_first_process_keeps_watching(isolation, act):
    """It is of the same user as the program in bubblewrap, and must neither stop nor be written."""
    program = f"{CALLS}import signal, time\ntry:\n    {act}\nexcept Exception: pass\n"
    program += "held = bytearray(b'x') * (120 << 20)\n"
    program += "for _ in range(3): os.fork()\nheld[:] = b'y' * len(held)\ntime.sleep(9)"
    ran = run_python(program, limits=SMALL, isolation=isolation, cgroup="none")
    assert ran.stderr.endswith("ended: past 256 MiB of memory\n")


def test_memory_is_counted_where_the_kernel_tells_no_parts_of_it(monkeypatch):
    """Without CONFIG_PROC_PAGE_MONITOR there is no smaps_rollup; nothing would be counted."""
    own = str(os.getpid())
    told = {(own, "statm"): "9000 5000 100"}
    monkeypatch.setattr(jail, "_read", lambda process, file: told.get((process, file), ""))
    assert 5000 * os.sysconf("SC_PAGESIZE") == jail._share(own)
