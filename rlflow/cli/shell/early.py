"""What a signal does to the command `rlflow` while it is imported: it ends, with 130, at once.

Imported first of all, for without it the process would die of the signal. A program that imports
rlflow keeps its own ways.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

STOPPED = 130


def _is_command() -> bool:
    """Whether this process is the command line: its script, or `python -m rlflow.cli.main`."""
    started = sys.argv[0] if sys.argv else ""
    return started.endswith("/rlflow") or (started == "-m" and "rlflow.cli.main" in sys.orig_argv)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"stopped at once; nothing had begun\n")
    os._exit(STOPPED)


if _is_command():
    signal.signal(signal.SIGTERM, _end)
    # A shell has what it starts in the background ignore Ctrl-C: that stays.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
