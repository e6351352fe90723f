"""What a run was started with: the versions of packages, and the state of the working directory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

from rlflow.runtime.record.durable import JSON

PACKAGES = ("rlflow-engine", "torch", "transformers", "tensordict", "safetensors", "numpy")
GIT_SECONDS = 5.0


def package_versions() -> dict[str, JSON]:
    """The version of Python and of each package, None where it is not installed."""
    found: dict[str, JSON] = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def git_state() -> dict[str, JSON] | None:
    """Commit of the working directory and whether tracked files differ; None outside git."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git("--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    """What git prints; None without git, outside a repository, or if it takes too long."""
    program = shutil.which("git")
    if program is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 - a fixed program with fixed arguments
            [program, *arguments], capture_output=True, text=True, timeout=GIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
