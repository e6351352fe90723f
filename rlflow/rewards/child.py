"""The other end of `workers`: reads calls from standard input, answers on standard output.

What a function prints goes to standard error. It ends with its parent.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
from typing import Any, BinaryIO

HEADER = 8
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer calls until the input ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "wb")
    calls = os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    _write(answers, b"ready")
    functions: dict[str, Any] = {}
    while header := calls.read(HEADER):
        key, blob, keywords = pickle.loads(  # noqa: S301  from our own parent
            calls.read(int.from_bytes(header, "little"))
        )
        _write(answers, _answer(functions, key, blob, keywords))


def _answer(functions: dict[str, Any], key: str, blob: bytes | None, keywords: Any) -> bytes:
    try:
        if blob is not None:
            functions[key] = pickle.loads(blob)  # noqa: S301  from our own parent
        return pickle.dumps((True, functions[key](**keywords)))
    except (Exception, SystemExit) as error:
        return _raised(error)


def _raised(error: BaseException) -> bytes:
    """The error itself where it survives the way, else its text."""
    try:
        if not isinstance(error, Exception):
            raise TypeError("it would end the parent too")
        body = pickle.dumps((False, error))
        pickle.loads(body)  # noqa: S301  made here
        return body
    except Exception:
        return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))


def _write(pipe: BinaryIO, body: bytes) -> None:
    pipe.write(len(body).to_bytes(HEADER, "little") + body)
    pipe.flush()


if __name__ == "__main__":
    main()
