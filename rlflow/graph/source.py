"""Where the user wrote it: the line of a declaration, and the line that an error passed through."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType

from rlflow.errors import Source

PACKAGE = str(Path(__file__).resolve().parents[1])


def declared_at() -> Source | None:
    """The nearest line of the call stack that is not rlflow's own or a library's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        library = "site-packages" in path or path.startswith("<")
        if not path.startswith(PACKAGE) and not library:
            text = linecache.getline(path, frame.f_lineno).strip()
            return Source(path=short_path(path), line=frame.f_lineno, text=text)
        frame = frame.f_back
    return None


def raised_at(error: BaseException, path: Path | None) -> Source | None:
    """The deepest line of a user's file that an error passed through."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if path is not None and Path(name).resolve() == path.resolve():
            text = linecache.getline(name, trace.tb_lineno).strip()
            found = Source(path=short_path(name), line=trace.tb_lineno, text=text)
        trace = trace.tb_next
    return found


def short_path(path: str | Path) -> str:
    """A path as the user would type it: relative to the working directory where it is below it."""
    full = Path(path)
    try:
        return str(full.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(full)
