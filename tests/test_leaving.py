"""Signals at any moment of a command: it ends with its own exit code, once it has cleaned up."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT

BEGIN = "import os, signal, sys\n"
HIT = "os.kill(os.getpid(), signal.{})\n"
COMMAND = "from rlflow.cli.shell.leaving import leave, said_if_ended, stop_on_signals\n"
LEAVING = """
import atexit, threading
stop_on_signals()
atexit.register(lambda: (os.kill(os.getpid(), signal.{0}), print("cleaned")))
threading.Thread(target=threading.Event().wait, daemon=True).start()
try:
    os.kill(os.getpid(), signal.{0})
except KeyboardInterrupt:
    leave(130)
"""
IMPATIENT = """
stop_on_signals()
try:
    with said_if_ended(lambda: "continue with: rlflow run"):
        try:
            os.kill(os.getpid(), signal.{0})
        finally:
            os.kill(os.getpid(), signal.{0})
            print("cleaning", flush=True)
            os.kill(os.getpid(), signal.{0})
finally:
    print("never")
"""


def listening():
    """As in a terminal: a shell has what is in the background ignore Ctrl-C, `nohup` SIGHUP."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def run(program, preexec_fn=listening):
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=preexec_fn,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.rows(5)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU"])
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ('sys.argv[0] = "/usr/bin/rlflow"\nimport rlflow.cli.shell.early\n' + HIT, "nothing had"),
        (COMMAND + LEAVING, "cleaned"),
        (COMMAND + IMPATIENT, "cleaning"),
    ],
    ids=["while it is imported", "while it cleans up", "thrice"],
)
def test_a_signal_ends_a_command_with_130(program, said, name):
    code, out, err = run(program.replace("{}", name).replace("{0}", name))

    assert 130 == code, err
    assert said in out + err
    assert "Traceback" not in err
    assert "never" not in out
    if said == "cleaning":
        assert "stopped at once; continue with: rlflow run" in err


def test_a_program_that_imports_rlflow_keeps_its_own_signals():
    code, _, _ = run("import rlflow\n" + HIT.format("SIGTERM"))

    assert -signal.SIGTERM == code


def test_who_ignores_ctrl_c_from_its_start_goes_on_to_ignore_it():
    """As a shell has it for what is started in the background of a script."""
    program = COMMAND + "stop_on_signals()\n" + HIT.format("SIGINT") + 'print("goes on")\n'

    def ignoring():
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    assert (0, "goes on\n") == run(program, preexec_fn=ignoring)[:2]


def test_a_command_that_was_started_without_streams_gives_none_of_them_to_a_file():
    """What is opened next would be standard output, and what is printed would go into it."""
    program = f"""
import os, sys
sys.argv[0] = "/usr/bin/rlflow"
exec(open({str(ROOT / "rlflow/cli/shell/early.py")!r}).read())
file = os.open({str(ROOT / "LICENSE")!r}, os.O_RDONLY)
print("nobody hears this", flush=True)
sys.stderr.write("nor this")
os._exit(file)
"""
    words = ["sh", "-c", 'exec "$0" -S -c "$1" <&- >&- 2>&-', sys.executable, program]

    assert 3 == subprocess.run(words, check=False).returncode


def test_what_standard_error_does_not_take_is_no_error_of_a_command():
    program = f"""
import os, sys
sys.argv[0] = "/usr/bin/rlflow"
exec(open({str(ROOT / "rlflow/cli/shell/early.py")!r}).read())
sys.stderr.write("x" * 10**6 + "\\n")
print("goes on")
"""
    words = ["sh", "-c", 'exec "$0" -S -c "$1" 2>/dev/full', sys.executable, program]
    done = subprocess.run(words, check=False, stdout=subprocess.PIPE)

    assert (0, b"goes on\n") == (done.returncode, done.stdout)


def test_a_signal_may_say_something_while_something_is_written():
    program = f"""
import os, signal, sys
sys.argv[0] = "/usr/bin/rlflow"
exec(open({str(ROOT / "rlflow/cli/shell/early.py")!r}).read())
signal.signal(signal.SIGALRM, lambda *_: sys.stderr.write("heard\\n"))
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
for _ in range(20_000):
    sys.stderr.write("x\\n")
signal.setitimer(signal.ITIMER_REAL, 0)
"""
    words = [sys.executable, "-S", "-c", program]
    done = subprocess.run(words, check=False, stderr=subprocess.PIPE, text=True)

    assert 0 == done.returncode, done.stderr[-2000:]
    assert {"x", "heard"} <= {*done.stderr.splitlines()}


def test_what_ends_a_thread_is_said_in_letters():
    """Of a library or a user's file: its words reach the terminal as all others."""
    program = (
        COMMAND
        + """
import threading
stop_on_signals()
def work():
    raise ValueError("\\x1b[2J\\nerror[E999]: forged")
thread = threading.Thread(target=work, name="mine")
thread.start()
thread.join()
"""
    )
    code, _, err = run(program)

    assert 0 == code
    assert err.startswith("warning: thread mine has ended by an error\n  Traceback")
    assert "\x1b" not in err
    assert not [line for line in err.splitlines() if line.startswith("error[")]


def test_a_thread_that_never_ends_does_not_hold_a_command():
    program = (
        COMMAND
        + """
import threading
from rlflow.cli.shell import leaving
leaving.PATIENCE = 0.1
threading.Thread(target=threading.Event().wait, name="mine").start()
leave(3)
"""
    )
    assert (3, "", "warning: ended without thread mine, after 0.1 s\n") == run(program)
