"""Files of a launch written, and handed to sbatch or kubectl."""

from __future__ import annotations

import io
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

from rlflow.errors import Finding, RunError, UsageError

SUBMIT_SECONDS = 120.0


def require_program(name: str) -> None:
    """Raise UsageError E385 where a program that submits is not on this machine."""
    if shutil.which(name) is None:
        raise UsageError(
            Finding(
                code="E385",
                what=f"{name} is not on this machine",
                expected=f"a machine that submits; {name} on the PATH",
                fix="--dry-run, which prints what would be submitted",
            ),
            summary="Nothing was submitted.",
        )


def unpack_code(archive: bytes, folder: Path) -> None:
    """Unpack shipped code into a new folder."""
    folder.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        tar.extractall(folder, filter="fully_trusted")  # noqa: S202 - packed by this process


def submit(words: Sequence[str]) -> str:
    """What a program that submits prints. Raises RunError E385 where it refuses."""
    try:
        done = subprocess.run(  # noqa: S603 - sbatch or kubectl, with a file that was just written
            [*words], capture_output=True, text=True, timeout=SUBMIT_SECONDS, check=False
        )
        said, code = done.stderr.strip() or done.stdout.strip(), done.returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        said, code = str(error), 1
    if code:
        raise RunError(
            Finding(
                code="E385",
                what=f"{words[0]} refuses the job",
                got=said or f"exit code {code}",
                fix=shlex.join(words),
            ),
            summary="What would run is written, and is not submitted.",
        )
    return done.stdout.strip()
