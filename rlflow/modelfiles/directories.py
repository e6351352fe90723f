"""Where the files of a model are: in a directory, or in the local cache of the hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlflow.errors import Finding, UsageError, near_names

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def model_directory(path: str, near: Path | None = None) -> Path | None:
    """Where a model's files are: the working directory, above the pipeline file, the hub cache.

    Returns None for a hub name that is not in the cache. Raises UsageError for a path
    that is not there.
    """
    bases = [Path.cwd(), *(near.resolve().parents if near is not None else ())]
    for base in bases:
        found = base / path
        if (found / "config.json").is_file():
            return found
    cached = hub_snapshot(path)
    if cached is not None:
        return cached
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    folder = Path(path).parent
    exists_near = any((base / folder).is_dir() for base in bases) and str(folder) != "."
    if looks_local or exists_near or not HUB_NAME.fullmatch(path):
        raise UsageError(_no_model(path, bases))
    return None


def _no_model(path: str, bases: list[Path]) -> Finding:
    for base in bases:
        folder = (base / path).parent
        if folder.is_dir():
            names = [entry.name for entry in folder.iterdir() if (entry / "config.json").is_file()]
            near = near_names(Path(path).name, names)
            return Finding(
                code="E204",
                what=f"there is no model at {path!r}",
                got=f"models in {folder}: {', '.join(sorted(names)) or 'none'}",
                expected="a directory with config.json, or the name of a hub model",
                near=tuple(str(Path(path).parent / name) for name in near),
            )
    return Finding(
        code="E204",
        what=f"there is no model at {path!r}",
        expected="a directory with config.json, or the name of a hub model",
    )


def hub_cache() -> Path:
    """Where huggingface_hub keeps what it has downloaded."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub"))


def cached_models() -> list[str]:
    """The names of the hub's models that are in the local cache."""
    return [
        entry.name.removeprefix("models--").replace("--", "/")
        for entry in sorted(hub_cache().glob("models--*"))
    ]


def hub_snapshot(name: str) -> Path | None:
    """Where the files of a hub's model are in the local cache; None where they are not."""
    snapshots = hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots"
    if not snapshots.is_dir():
        return None
    found = [entry for entry in sorted(snapshots.iterdir()) if (entry / "config.json").is_file()]
    return found[-1] if found else None
