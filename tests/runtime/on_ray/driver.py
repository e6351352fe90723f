"""A controller for tests to end: `python driver.py ADDRESS`, or `-` for a cluster of its own.

Prints its session and who works for it. They cannot let go by themselves: one has
started a process in a session of its own and holds the interpreter's lock, one is stopped.
SIGTERM is taken for Ctrl-C, and closes the session.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import ray

from rlflow.runtime.ray.cluster.deadline import wait
from rlflow.runtime.ray.cluster.process_lifetime import die_with_parent
from rlflow.runtime.ray.cluster.session import Session

STOPPED = 7


class Stubborn:
    """A worker."""

    def __init__(self) -> None:
        die_with_parent()

    def pid(self) -> int:
        return os.getpid()

    def hold_the_lock(self) -> int:
        return pow(3, 10**9)

    def start_a_child(self) -> int:
        return subprocess.Popen(["sleep", "300"], start_new_session=True).pid


def main(address: str) -> None:
    """Start a session and workers, print processes, and wait to be ended."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    where = None if address == "-" else address
    with contextlib.closing(Session.start(address=where, cpus=2, deadline=120)) as session:
        actors = [ray.remote(Stubborn).options(num_cpus=0).remote() for _ in range(2)]
        pids = wait([actor.pid.remote() for actor in actors], 60, doing="starting")
        pids += wait([actors[0].start_a_child.remote()], 60, doing="starting")
        busy = actors[0].hold_the_lock.remote()
        os.kill(pids[1], signal.SIGSTOP)
        sys.stdout.write(f"{session.id} {session.directory} {' '.join(map(str, pids))}\n")
        sys.stdout.flush()
        wait([busy], 300, doing="holding the lock")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(STOPPED)
