"""What the system refuses a command, in our words: a file, memory, a device that is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from rlflow.errors import LONGEST_NAME, Finding, RlflowError, RunError, UsageError
from rlflow.runtime.record.durable import disk_errors

# What a device says that takes no more: what is under standard output, for one.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE}

# What the loader of libraries says then.
NO_ROOM = "failed to map segment from shared object"


def _unloaded(error: BaseException) -> bool:
    """Whether it is a library, of torch for one, that found no room in the address space."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, ImportError) and NO_ROOM in str(error)


def refusal(error: BaseException) -> RlflowError | None:
    """An error for what the system refused; None for what else is raised.

    The last to be asked: who knows what a file is for says more.
    """
    if isinstance(error, MemoryError) or _unloaded(error):
        what = "no memory is left on this machine, or of what this process may have"
        return RunError(Finding(code="E768", what=what, fix="free -h; ulimit -v"))
    if not isinstance(error, OSError):
        return None
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
