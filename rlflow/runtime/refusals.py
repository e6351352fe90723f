"""What the system refuses a command, in our words: a file, memory, a device that is full."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from rlflow.errors import LONGEST_NAME, Finding, RlflowError, RunError, UsageError
from rlflow.runtime.record.durable import disk_errors

# What a device says that takes no more: what is under standard output, for one.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE}

# What the loader of libraries says then.
NO_ROOM = "failed to map segment from shared object"
# What Python says where the system starts no thread: its stack has no room, or too many run.
NO_THREAD = "can't start new thread"
# Addresses that a run of a model of nearly no size maps, measured with torch for CPUs. Below it
# libraries fail where they please, some by ending the process.
LEAST_ADDRESSES = 1600 * 2**20


def require_addresses() -> None:
    """Raise RunError (E768) where `ulimit -v` leaves no room for the libraries of a run."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY and most < LEAST_ADDRESSES:
        what = "this process may map too little memory for the libraries of a run"
        raise RunError(
            Finding(
                code="E768",
                what=what,
                got=f"{most / 2**20:,.0f} MiB of addresses (ulimit -v {most // 2**10})",
                expected=f"{LEAST_ADDRESSES / 2**20:,.0f} MiB at least",
                fix="ulimit -v unlimited",
            )
        )


def _unloaded(error: BaseException) -> bool:
    """Whether a library, of torch for one, or the stack of a thread found no room."""
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, ImportError | OSError):
        return NO_ROOM in str(error)
    return isinstance(error, RuntimeError) and str(error) == NO_THREAD


def _is_somewhere() -> bool:
    """Whether the working directory is there, from which paths are read."""
    try:
        return bool(Path.cwd())
    except FileNotFoundError:
        return False


def refusal(error: BaseException) -> RlflowError | None:
    """An error for what the system refused; None for what else is raised.

    The last to be asked: who knows what a file is for says more.
    """
    if isinstance(error, MemoryError) or _unloaded(error):
        what = "no memory is left on this machine, or of what this process may have"
        return RunError(Finding(code="E768", what=what, fix="free -h; ulimit -v; ulimit -u"))
    if not isinstance(error, OSError):
        return None
    if isinstance(error, FileNotFoundError) and not _is_somewhere():
        what = "the working directory is not there any more"
        return UsageError(Finding(code="E705", what=what, got=str(error), fix="cd to another one"))
    said, what, folder = error.filename, "write the output", Path()
    if isinstance(said, str | bytes):
        file = Path(os.fsdecode(said))
        what, folder = f"reach {str(file)[:LONGEST_NAME]}", file.parent
    elif error.errno not in FULL:
        return None
    try:
        with disk_errors(UsageError, what, folder):
            raise error
    except UsageError as told:
        return told
