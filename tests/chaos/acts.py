"""What a reward function does wrong: each is called once, with the value it should return."""

# ruff: noqa: T201  rewards print

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, NoReturn


def raises(error: BaseException) -> Any:
    """An act that raises."""

    def act(value: float) -> NoReturn:
        raise error

    return act


def returns(found: Any) -> Any:
    """An act that returns something else."""
    return lambda value: found


ValueError_ = raises(ValueError("bad"))
MemoryError_ = raises(MemoryError())
SystemExit_ = raises(SystemExit(0))
KeyboardInterrupt_ = raises(KeyboardInterrupt())
GeneratorExit_ = raises(GeneratorExit())
beside_Exception = raises(type("Odd", (BaseException,), {})("bad"))
without_words = raises(type("Mute", (Exception,), {"__str__": property()})())
FORGED = "\x1b[2J\x1b]0;mine\x07\rerror[E999]: forged\nerror[E999]: forged\x85error[E999]: forged"
forges_an_error = raises(ValueError(FORGED))
not_a_number = returns(float("nan"))
infinite = returns(float("inf"))
too_large = returns(10**400)
beyond_float32 = returns(1e300)
nothing = returns(None)
text = returns("1")
complex_number = returns(1j)
several = returns([1.0, 2.0])


def recurses(value: float) -> float:
    return recurses(value)


def exits_0(value: float) -> NoReturn:
    os._exit(0)


def exits_3(value: float) -> NoReturn:
    os._exit(3)


def crashes(value: float) -> float:
    os.kill(os.getpid(), signal.SIGSEGV)
    return value


def is_killed(value: float) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return value


def freezes(value: float) -> float:
    os.kill(os.getpid(), signal.SIGSTOP)
    return value


def sleeps(value: float) -> float:
    time.sleep(600)
    return value


def spins(value: float) -> float:
    while True:
        value += 1


def holds_the_interpreter(value: float) -> float:
    return value + pow(3, 10**9) % 2


def reads_input(value: float) -> float:
    return value + len(sys.stdin.read())


def waits_for_itself(value: float) -> float:
    lock = threading.Lock()
    with lock, lock:
        return value


def leaves_a_child(value: float) -> float:
    """A grandchild in a session of its own, and then a hang: both are to be gone."""
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    time.sleep(600)
    return value


def forks(value: float) -> float:
    """A copy of the whole process comes back as well."""
    os.fork()
    return value


def prints_much(value: float) -> float:
    """Ten million characters; the value is right."""
    for _ in range(1000):
        print("x" * 10_000)
    return value


def fills_the_disk(value: float) -> float:
    """All that is free and more, without a block: as far as the system lets it."""
    with tempfile.TemporaryFile() as file:
        file.truncate(shutil.disk_usage(".").free + 1)
    return value


def forges_lines(value: float) -> float:
    print("\x1b[2J\x1b[1;31merror[E999]: forged\x1b[0m\rwarning: forged")
    return value


def disturbs(value: float) -> float:
    """Seeds every generator, changes directory, environment, handlers and threads."""
    import numpy as np
    import torch

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    os.chdir("/")
    os.environ["LANG"] = "xx"
    sys.setrecursionlimit(5000)
    return value
