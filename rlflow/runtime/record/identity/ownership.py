"""Whether the files of a run are its own: a link leads elsewhere, and a pipe waits for ever."""

from __future__ import annotations

import stat
from pathlib import Path

from rlflow.errors import Finding, RunDirError

# What a run writes by itself. Trackers keep links of their own in theirs, and checkpoints are
# looked at where they are read.
FOLDERS = ("spans", "logs", "records", "graphs", "profiles")
FILES = frozenset(
    (
        *("run.json", "config.json", "graph.json", "plan.json", "plan.txt", "peaks.json", "lock"),
        *("metrics.jsonl", "devices.jsonl", "devices.earlier.jsonl", "trackers.json"),
        *("checkpoints", *FOLDERS),
    )
)


def require_own_files(path: Path) -> None:
    """Raise RunDirError (E715) where a run's own file or folder is a link, a pipe or a device.

    What is appended there would land elsewhere, and what is read there is not the run's.
    """
    inside = [entry for name in FOLDERS for entry in _in(path / name)]
    own = [entry for entry in _in(path) if entry.name in FILES]
    names = [str(each.relative_to(path)) for each in (*own, *inside) if _leads_away(each)]
    if names:
        raise RunDirError(
            Finding(
                code="E715",
                what=f"the run directory {path} has links, pipes or devices in the place of files",
                got=", ".join(names[:5]),
                expected="files and directories of its own; the run directory itself may be a link",
                fix="put what links lead to in their place, and take the others away",
            )
        )


def _leads_away(path: Path) -> bool:
    """Whether it is neither a file nor a directory of its own."""
    kind = path.lstat().st_mode
    return not (stat.S_ISREG(kind) or stat.S_ISDIR(kind))


def _in(path: Path) -> list[Path]:
    """What is in a directory; nothing where there is none."""
    return sorted(path.iterdir()) if path.is_dir() else []
