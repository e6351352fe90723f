"""How a command ends early: with its exit code, whatever its threads are doing.

A thread inside of native code that the interpreter wants to end takes the process with it, by
SIGABRT: so where such threads are left, the process ends without asking them.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

# Seconds for what is registered to run at the end, before the process ends in any case.
PATIENCE = 10.0


def stop_on_terminate() -> None:
    """Have SIGTERM stop a command as Ctrl-C does, from its first import on."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)


def leave(ended: str | int | None) -> NoReturn:
    """End the process with an exit code; at once where threads are left that nobody can end."""
    left = [t for t in threading.enumerate() if t.daemon and t is not threading.current_thread()]
    if not left or not isinstance(ended, int):
        raise SystemExit(ended) from None
    code = ended
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    last = threading.Timer(PATIENCE, os._exit, (code,))
    last.daemon = True
    last.start()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
