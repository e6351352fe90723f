"""The other end of `workers`: reads calls from standard input, answers on standard output.

What a function prints goes back line by line, before the answer. It ends with its parent. Every
answer carries the number of its call, and only the process that was asked answers: a copy that a
function forked and that comes back here ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import pickle
import resource
import shutil
import signal
import sys
import threading
import traceback
from typing import Any, BinaryIO, NoReturn

from rlflow.errors import error_text

HEADER = 8
PR_SET_PDEATHSIG = 1
# Letters of a printed line that travel: the parent holds no more of a function that never ends one.
LONGEST = 64 * 2**10
# Of the machine's memory, what this process may take, and of the disk's free space, what one file
# may have that it writes. How readily the kernel ends it, of 1000, where no memory is left: the run
# itself is worth more.
SHARE, EXPENDABLE = 0.5, "500"
WRITING = threading.RLock()


def main() -> None:
    """Answer calls until the input ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _bound()
    answers = os.fdopen(os.dup(1), "wb")
    calls = os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    _write(answers, b"ready")
    functions: dict[str, Any] = {}
    asked = os.getpid()
    sys.stdout = _Told(answers)
    while header := calls.read(HEADER):
        number, key, blob, keywords = pickle.loads(  # noqa: S301  from our own parent
            calls.read(int.from_bytes(header, "little"))
        )
        worked, value = _called(functions, key, blob, keywords)
        if os.getpid() != asked:
            _end_copy(worked, value)
        _write(answers, _answer(number, worked, value))


def _bound() -> None:
    """Leave memory and disk of the machine to the run: a function that takes them fails, alone."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    rooms = {resource.RLIMIT_DATA: pages * size}
    with contextlib.suppress(OSError):  # the working directory may be gone
        rooms[resource.RLIMIT_FSIZE] = shutil.disk_usage(".").free
    for limit, there in rooms.items():
        most, (_, hard) = int(SHARE * there), resource.getrlimit(limit)
        if hard == resource.RLIM_INFINITY or most <= hard:
            resource.setrlimit(limit, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    try:
        with open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123  one line, at each start
            file.write(EXPENDABLE)
    except OSError:  # a container may not let it
        return


class _Told(io.TextIOBase):
    """What is printed, as lines that go to the parent; those of a forked copy to standard error."""

    def __init__(self, answers: BinaryIO) -> None:
        super().__init__()
        self._answers, self._own, self._begun = answers, os.getpid(), ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if os.getpid() != self._own:
            return sys.stderr.write(text)
        with WRITING:
            *lines, self._begun = (self._begun + text).split("\n")
            if len(self._begun) > LONGEST:
                lines, self._begun = [*lines, self._begun], ""
            for line in lines:
                _write(self._answers, pickle.dumps(line[: LONGEST + 1]))
        return len(text)


def _called(
    functions: dict[str, Any], key: str, blob: bytes | None, keywords: Any
) -> tuple[bool, Any]:
    try:
        if blob is not None:
            functions[key] = pickle.loads(blob)  # noqa: S301  from our own parent
        return True, functions[key](**keywords)
    except BaseException as error:  # nobody presses Ctrl-C here: the function has raised it
        return False, error


def _end_copy(worked: bool, value: Any) -> NoReturn:
    """End a forked copy of this process, as it would have ended alone."""
    code = 0 if worked else 1
    if isinstance(value, SystemExit):
        code = value.code if isinstance(value.code, int) else int(value.code is not None)
    elif not worked:
        traceback.print_exception(value)
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _answer(number: int, worked: bool, value: Any) -> bytes:
    if worked:
        try:
            return pickle.dumps((number, True, value))
        except Exception as error:
            value = error
    return _raised(number, value)


def _raised(number: int, error: BaseException) -> bytes:
    """The error itself where it survives the way, else its text."""
    try:
        if not isinstance(error, Exception):
            raise TypeError("it would end the parent too")
        body = pickle.dumps((number, False, error))
        pickle.loads(body)  # noqa: S301  made here
        return body
    except Exception:
        told = RuntimeError(error_text(error))
        return pickle.dumps((number, False, told))


def _write(pipe: BinaryIO, body: bytes) -> None:
    with WRITING:
        pipe.write(len(body).to_bytes(HEADER, "little") + body)
        pipe.flush()


if __name__ == "__main__":
    main()
