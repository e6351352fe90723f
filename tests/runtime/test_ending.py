"""The last words of a run, also where nothing can be written any more."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rlflow.errors import Finding, NumericsError, RunError
from rlflow.runtime.ending import last_words

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
LINE = "rlflow run mine.py --resume out"


@pytest.mark.parametrize("error", [FULL, NumericsError(Finding(code="E650", what="not finite"))])
def test_a_full_disk_takes_no_log_and_costs_neither_the_error_nor_the_line(error):
    found = last_words(error, Path("/dev/full"), LINE)

    code = "E701" if error is FULL else "E650"
    assert f"error[{code}]" in str(found)
    assert "the traceback could not be written to /dev/full: No space left on device" in str(found)
    assert f"continue with: {LINE}" in str(found)
    assert isinstance(found, RunError)


def test_the_traceback_is_kept_where_there_is_room(tmp_path):
    found = last_words(ValueError("bad"), tmp_path / "error.txt", LINE)

    assert "E751" in str(found)
    assert "ValueError: bad" in (tmp_path / "error.txt").read_text()
