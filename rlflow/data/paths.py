"""Finding a user's files, and the line of the user's file that asked for them.

This file knows nothing about what the files hold.
"""

from __future__ import annotations

import linecache
import sys
from pathlib import Path

from rlflow.errors import Finding, Source, UsageError, known_names, near_names

PACKAGE = __name__.partition(".")[0]


def declared_here() -> Source | None:
    """The nearest caller outside this package; None where it is not in a file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    path = frame.f_code.co_filename
    if not Path(path).is_file():
        return None
    text = linecache.getline(path, frame.f_lineno).strip()
    return Source(path=shown(Path(path)), line=frame.f_lineno, text=text)


def _is_ours(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


def find_path(path: str | Path, near: Path | None = None) -> Path | None:
    """The file or folder that `path` names, or None.

    A relative path is looked for in the working directory, then in the folder of the
    pipeline file `near` and in each folder above that one.
    """
    asked = Path(path).expanduser()
    folders = [Path.cwd(), *(near.resolve().parents if near is not None else ())]
    found = (folder / asked for folder in folders)
    return next((candidate for candidate in found if candidate.exists()), None)


def resolve_path(path: str | Path, near: Path | None = None, where: Source | None = None) -> Path:
    """The file or folder that `path` names; `where` is the line that asked for it.

    Raises `UsageError` (E601) with the names nearest to it in the folder it should be in.
    """
    found = find_path(path, near)
    if found is None:
        raise UsageError(missing_file(path, near, where))
    return found


def missing_file(path: str | Path, near: Path | None, where: Source | None) -> Finding:
    """What is wrong, where it was looked for, and which files there have a similar name."""
    asked = Path(path).expanduser()
    folder = find_path(asked.parent, near)
    if folder is None or not folder.is_dir():
        got = f"no folder {asked.parent}"
        names: list[str] = []
    else:
        names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
        got = f"{shown(folder)} holds {known_names(names)}"
    looked = "the working directory or a folder above the pipeline file"
    return Finding(
        code="E601",
        what=f"no file {str(path)!r}",
        where=where,
        got=got,
        expected="a file at this path" if asked.is_absolute() else f"a file below {looked}",
        near=tuple(str(asked.parent / name) for name in near_names(asked.name, names)),
    )


def shown(path: Path) -> str:
    """The path as messages print it: relative to the working directory where it is below."""
    full = path.absolute()
    return str(full.relative_to(Path.cwd())) if full.is_relative_to(Path.cwd()) else str(full)
