"""Removing what a process has written where its worker is gone, which would do it otherwise.

It needs the standard library alone, and starts no Python.
"""

from __future__ import annotations

import os

PREFIX = "rlflow-"
# Variables that name a directory: of temporary files, and of the model that an engine reads.
MADE = ("TMPDIR", "RLFLOW_MODEL_DIRECTORY")


def sweep() -> None:
    """Have the directories made for this engine removed, by a process that outlives this group.

    Only such as a worker has made: their names say so.
    """
    found = [os.environ.get(name, "") for name in MADE]
    made = [directory for directory in found if directory.rpartition("/")[2].startswith(PREFIX)]
    if made:
        words = ["rm", "-rf", "--", *made]
        os.posix_spawnp("rm", words, {"PATH": os.environ.get("PATH", "")}, setsid=True)
