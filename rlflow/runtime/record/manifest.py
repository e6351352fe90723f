"""What a checkpoint says about itself, and whether it is still true.

Holds the manifest, its text with a seal over itself, and the checks of a directory against
it. This file does not know how a checkpoint is saved, chosen or deleted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rlflow.errors import CheckpointError, Finding
from rlflow.runtime.record.durable import JSON, FileRecord, exact_json, exact_value, read_record
from rlflow.runtime.record.shards.places import ShardOf, parse_piece

# In format 1 every component is one file, and what is trained in float32 may be there twice.
FORMAT = 2
FORMATS = (1, FORMAT)
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a complete checkpoint says about itself; `files` by file name.

    `shards` says what those files hold that are a part of a component only.
    """

    iteration: int
    parent: str | None
    files: Mapping[str, FileRecord]
    state: Mapping[str, JSON]
    identity: Mapping[str, str]
    shards: Mapping[str, ShardOf] = field(default_factory=dict)


def checkpoint_name(iteration: int) -> str:
    """The directory name of the checkpoint of `iteration`."""
    return f"iteration-{iteration:06d}"


def manifest_text(manifest: Manifest) -> str:
    """A manifest as it is on disk, with a sha256 over the rest of it as its `seal`.

    Raises `CheckpointError` for a state that JSON would change.
    """
    body: dict[str, JSON] = {
        "iteration": manifest.iteration,
        "parent": manifest.parent,
        "files": {
            name: {"size": record.size, "sha256": record.sha256}
            for name, record in manifest.files.items()
        },
        "shards": {
            name: {
                "component": shard.component,
                "pieces": {key: place.text() for key, place in shard.pieces.items()},
            }
            for name, shard in manifest.shards.items()
        },
        "state": manifest.state,
        "identity": dict(manifest.identity),
    }
    try:
        return _sealed(body, FORMAT)
    except TypeError as error:
        raise CheckpointError(
            Finding(
                code="E723",
                what=f"the state cannot be written exactly: {error}",
                expected="None, bool, int, float, str, lists and dicts with str keys",
            )
        ) from error


def _sealed(content: Mapping[str, JSON], form: int) -> str:
    body: dict[str, JSON] = {**content, "format": form}
    seal = hashlib.sha256(exact_json(body).encode()).hexdigest()
    return exact_json({**body, "seal": seal})


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(Finding(code="E720", what=f"{path.name}: {reason}"))


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint; raise `CheckpointError` unless its seal holds."""
    file = path / MANIFEST
    try:
        if path.is_symlink() or file.is_symlink() or not file.is_file():
            raise _damaged(path, f"no {MANIFEST}")
        text = file.read_bytes().decode()
        body = exact_value(json.loads(text))
        form = body.pop("format", None) if isinstance(body, dict) else None
        if not isinstance(body, dict) or form not in FORMATS:
            raise _damaged(path, f"{MANIFEST} is not of format {FORMAT}")
        body.pop("seal", None)
        if _sealed(body, cast("int", form)) != text:
            raise _damaged(path, f"{MANIFEST} is not the text that was written")
        shards = _shards(cast("dict[str, Any]", body.get("shards", {})))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise _damaged(path, f"{MANIFEST} cannot be read ({error})") from error
    found = cast("dict[str, Any]", body)
    if checkpoint_name(found["iteration"]) != path.name:
        raise _damaged(path, f"{MANIFEST} is of iteration {found['iteration']}")
    return Manifest(
        iteration=found["iteration"],
        parent=found["parent"],
        files={name: FileRecord(**record) for name, record in found["files"].items()},
        state=found["state"],
        identity=found["identity"],
        shards=shards,
    )


def _shards(found: Mapping[str, Any]) -> dict[str, ShardOf]:
    """What files hold that are a part of a component."""
    return {
        name: ShardOf(
            component=shard["component"],
            pieces={key: parse_piece(text) for key, text in shard["pieces"].items()},
        )
        for name, shard in found.items()
    }


def check_files(path: Path, manifest: Manifest, *, sizes_only: bool) -> None:
    """Raise `CheckpointError` unless the directory holds exactly the manifest's files.

    With `sizes_only` their bytes are not read.
    """
    try:
        found = {entry.name: entry for entry in path.iterdir()}
        expected = {*manifest.files, MANIFEST}
        if missing := expected - found.keys():
            raise _damaged(path, f"{', '.join(sorted(missing))} is missing")
        if extra := found.keys() - expected:
            raise _damaged(path, f"{', '.join(sorted(extra))} does not belong to it")
        for name, record in sorted(manifest.files.items()):
            _check_file(path, found[name], record, sizes_only=sizes_only)
    except OSError as error:
        raise _damaged(path, str(error)) from error


def _check_file(path: Path, file: Path, record: FileRecord, *, sizes_only: bool) -> None:
    if file.is_symlink() or not file.is_file():
        raise _damaged(path, f"{file.name} is not a plain file")
    size = file.stat().st_size
    if size != record.size:
        raise _damaged(path, f"{file.name} has {size:,} bytes, {record.size:,} were written")
    if not sizes_only and read_record(file) != record:
        raise _damaged(path, f"{file.name} holds other bytes than were written (sha256)")


def verify_checkpoint(path: Path) -> Manifest:
    """Read every byte of a checkpoint directory; raise `CheckpointError` if one is not as written.

    Returns its manifest. Symbolic links are refused: a checkpoint is all inside its directory.
    """
    manifest = read_manifest(path)
    check_files(path, manifest, sizes_only=False)
    return manifest
