"""The script that starts an engine's script and ends its whole process group when it is time.

That is when the worker which started it is gone, or the engine. It runs in the engine's
interpreter, needs the standard library alone, and knows neither rlflow nor the engine.
Arguments: the socket's descriptor, the worker's process id, the engine's script.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from typing import NoReturn

from rlflow_engine_process.sweeping import note_held, shared_names, sweep  # type: ignore[import-not-found]

PR_SET_PDEATHSIG = 1
SECONDS = 1.0


def on_parents_death(number: int) -> None:
    """Have the kernel send this process a signal when its parent is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def guard(engine: int, worker: int) -> NoReturn:
    """Wait until the worker or the engine is gone, then end every process of this group.

    Standard input ends with the worker, the descriptor `engine` with the engine. A guardian
    that is stopped goes on when its worker dies. Meanwhile it keeps what shared memory is the
    group's, for whoever is left to remove it.
    """
    on_parents_death(signal.SIGCONT)
    directory, group, there = os.environ.get("TMPDIR", ""), os.getpgrp(), shared_names()
    while os.getppid() == worker:
        ended = select.select([sys.stdin.fileno(), engine], [], [], SECONDS)[0]
        if ended or there != shared_names():
            there = shared_names()
            note_held(directory, group)
        if sys.stdin.fileno() in ended:
            sweep()
        if ended:
            break
    else:
        sweep()
    os.killpg(os.getpgrp(), signal.SIGKILL)
    raise AssertionError("killed")


def main() -> None:
    """Fork: the child becomes the engine, and dies with this process at the latest."""
    connection, worker, script = sys.argv[1:4]
    guardian = os.getpid()
    alive, held = os.pipe()
    if os.fork():
        os.close(int(connection))
        os.close(held)
        guard(alive, int(worker))
    on_parents_death(signal.SIGKILL)
    if os.getppid() != guardian:
        return
    os.set_inheritable(held, True)
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    os.execv(sys.executable, [sys.executable, script, connection, str(held)])  # noqa: S606


if __name__ == "__main__":
    main()
