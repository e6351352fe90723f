"""How a command ends early: with its exit code, whatever its threads are doing.

A thread inside of native code that the interpreter wants to end takes the process with it, by
SIGABRT; a signal that comes while the interpreter ends kills it by that signal. So the process
ends without asking either: once all that runs at its end has run, by `os._exit`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from rlflow.cli.shell.early import STOPPED, on_stops
from rlflow.errors import printable

# Seconds for what is registered to run at the end, before the process ends in any case.
PATIENCE = 10.0
# Signals after which a command does not wait for its own cleaning up.
AT_ONCE = 3


@dataclass(slots=True)
class _Signals:
    """How many have come that end this command, and what it says where it ends uncleaned."""

    come: int = 0
    said: Callable[[], str] | None = None


_signals = _Signals()


def stop_on_signals() -> None:
    """Have Ctrl-C, SIGTERM and SIGHUP stop a command: the first raises KeyboardInterrupt.

    One more, while it cleans up, changes nothing; the third ends the process as it is.
    """
    on_stops(_stop)
    threading.excepthook = _tell_thread


@contextlib.contextmanager
def said_if_ended(text: Callable[[], str]) -> Iterator[None]:
    """Within it, what a process says that ends before it has cleaned up; asked where it ends."""
    before, _signals.said = _signals.said, text
    try:
        yield
    finally:
        _signals.said = before


def unless_stopped() -> None:
    """Raise KeyboardInterrupt where a signal has come, once more.

    What is imported meanwhile may have dropped the first, in a destructor or by a bare `except`.
    """
    if _signals.come:
        raise KeyboardInterrupt


def leave(ended: str | int | None) -> NoReturn:
    """End the process with an exit code, which no signal and no thread changes any more."""
    if isinstance(ended, str):
        sys.stderr.write(f"{ended}\n")
    code = ended if isinstance(ended, int) else int(ended is not None)

    def hurry(number: int, frame: FrameType | None) -> None:
        _signals.come += 1
        if _signals.come >= AT_ONCE:
            os._exit(code)

    on_stops(hurry)
    last = threading.Timer(PATIENCE, _leave_behind, (code,))
    last.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread can be started any more
        last.start()
    for thread in _others():
        if not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            if stream is not None:  # a user's file has taken it away
                stream.flush()
    os._exit(code)


def _leave_behind(code: int) -> NoReturn:
    """End the process with its exit code, and say which threads it has not waited for."""
    left = {each for each in _others() if not each.daemon} - {threading.main_thread()}
    names = ", ".join(sorted(each.name for each in left))
    waited = f"thread {names}" if names else "what is registered to run at the end"
    with contextlib.suppress(OSError):
        os.write(2, f"warning: ended without {waited}, after {PATIENCE:g} s\n".encode())
    os._exit(code)


def _tell_thread(ended: threading.ExceptHookArgs) -> None:
    """Say what ended a thread that is not ours, in letters alone: the command goes on."""
    name = ended.thread.name if ended.thread is not None else "without a name"
    trace = traceback.format_exception(ended.exc_type, ended.exc_value, ended.exc_traceback)
    said = printable("".join(trace)).rstrip().replace("\n", "\n  ")
    sys.stderr.write(f"warning: thread {name} has ended by an error\n  {said}\n")


def _stop(number: int, frame: FrameType | None) -> None:
    _signals.come += 1
    if _signals.come >= AT_ONCE:
        left = f"; {_signals.said()}" if _signals.said else ""
        os.write(2, f"stopped at once{left}\n".encode())
        os._exit(STOPPED)
    if _signals.come == 1:
        raise KeyboardInterrupt


def _others() -> list[threading.Thread]:
    """The threads of this process besides the one that calls."""
    return [each for each in threading.enumerate() if each is not threading.current_thread()]
