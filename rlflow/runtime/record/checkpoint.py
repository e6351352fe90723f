"""Checkpoints: safetensors and JSON in one directory each, complete or not there at all.

    checkpoints/
      LATEST                              "iteration-000040"
      iteration-000040/
        actor.safetensors                 a component that one process holds
        critic-00001-of-00002.safetensors     one of several: each writes what it holds, the
        critic-00002-of-00002.safetensors     places of the pieces are in the manifest
        manifest.json       sizes, sha256, places, state, identity, parent, own seal
      iteration-000060.tmp-4f1c.../       a save that died; the next save removes it

Saving: every file written and fsynced in a `.tmp-` directory, the manifest last; the
directory renamed; LATEST replaced; only then older ones deleted. So at every instant after
the first save a complete checkpoint is there. Loading: the newest one of which every byte
is the byte that was written. There is no pickle: a checkpoint cannot run code.

One process writes into a checkpoint directory at a time (the run directory's lock sees to
that). This file does not know what a component or the state means.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlflow.errors import CheckpointError, Finding
from rlflow.runtime.record.durable import (
    JSON,
    FileRecord,
    check_space,
    disk_errors,
    fault,
    fsync_dir,
    is_leftover,
    register_atomic_faults,
    register_faults,
    register_file_faults,
    temporary_name,
    write_atomic,
    write_file,
)
from rlflow.runtime.record.manifest import (
    MANIFEST,
    Manifest,
    check_files,
    checkpoint_name,
    manifest_text,
    read_manifest,
    verify_checkpoint,
)
from rlflow.runtime.record.shards.places import SUFFIX, ShardOf, StoredFile
from rlflow.runtime.record.tensorfile import file_parts, header_of

if TYPE_CHECKING:
    from rlflow.runtime.record.tensorfile import AnyTensor

LATEST = "LATEST"
NAME_FORM = re.compile(r"iteration-(\d{6,})", re.ASCII)
SPACE_MARGIN = 1 << 20

COMPONENT_POINTS = register_file_faults("ckpt:component")
MANIFEST_POINTS = register_file_faults("ckpt:manifest")
LATEST_POINTS = register_atomic_faults("ckpt:latest")
register_faults(
    "ckpt:sweep",
    "ckpt:mkdir",
    "ckpt:reported",
    "ckpt:dirsync",
    "ckpt:aside",
    "ckpt:rename",
    "ckpt:rootsync",
    "ckpt:delete:rename",
    "ckpt:delete:unlink",
)


class Snapshots(Protocol):
    """Components as they were at one moment, held by the processes that are to write them."""

    @property
    def size(self) -> int:
        """Bytes of all files."""

    @property
    def shards(self) -> Mapping[str, ShardOf]:
        """What files will hold that are a part of a component, by their names."""

    def write(self, directory: Path) -> Mapping[str, FileRecord]:
        """Write and sync all files; each one's size and digest. Returns when every one is there."""

    def give_up(self) -> None:
        """Have a write that runs in another thread end soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A checkpoint, or LATEST, that could not be used, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint of which every byte was verified: the files of components, and the state.

    `rejected` lists what was tried before it, newest first; the caller warns about them.
    """

    iteration: int
    files: Mapping[str, tuple[StoredFile, ...]]
    state: Mapping[str, JSON]
    identity: Mapping[str, str]
    path: Path
    rejected: tuple[Rejected, ...]

    def warnings(self) -> list[str]:
        """A line for every newer checkpoint that this one stands in for."""
        return [f"checkpoint {each.name} cannot be used: {each.reason}" for each in self.rejected]


def list_checkpoints(root: Path) -> tuple[Path, ...]:
    """The checkpoint directories of `root`, oldest first, not verified; empty without `root`.

    Raises `CheckpointError` when `root` cannot be read.
    """
    with disk_errors(CheckpointError, f"list the checkpoints in {root}", root):
        names = [path.name for path in root.iterdir()] if root.exists() else []
    found = [(int(match[1]), name) for name in names if (match := NAME_FORM.fullmatch(name))]
    return tuple(root / name for _, name in sorted(found))


def list_iterations(root: Path) -> list[int]:
    """The iterations of those, in their order."""
    return [int(path.name.rpartition("-")[2]) for path in list_checkpoints(root)]


def save_checkpoint(
    root: Path,
    iteration: int,
    components: Mapping[str, Mapping[str, AnyTensor]] | Snapshots,
    state: Mapping[str, JSON],
    identity: Mapping[str, str],
    keep: int = 2,
    spare: Collection[int] = (),
) -> Path:
    """Write one complete, durable checkpoint and return its directory.

    Components are tensors by name, torch or numpy, which nobody changes meanwhile, or those that
    processes have snapshots of; the checkpoint is committed when every one has written its own.
    `state` is JSON whose floats come back bit for bit; `identity` holds the hashes a resumed
    run must share. The newest `keep` (at least 1) complete checkpoints stay, and those after the
    iterations of `spare`. A damaged
    checkpoint of the same iteration is replaced, a good one is not. Raises `CheckpointError`,
    with the previous checkpoints as they were and nothing half-written.
    """
    assert keep >= 1
    taken = _Here(components) if isinstance(components, Mapping) else components
    with disk_errors(CheckpointError, f"save iteration {iteration} in {root}", root):
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        check_space(root, taken.size + SPACE_MARGIN, CheckpointError)
        final = root / checkpoint_name(iteration)
        aside = _refuse_complete(final)
        older = [path.name for path in list_checkpoints(root) if path != final]
        temporary = temporary_name(final)
        try:
            temporary.mkdir()
            fault("ckpt:mkdir")
            files = taken.write(temporary)
            fault("ckpt:reported")
            manifest = Manifest(
                iteration=iteration,
                parent=older[-1] if older else None,
                files=files,
                state=state,
                identity=identity,
                shards=taken.shards,
            )
            write_file(temporary / MANIFEST, [manifest_text(manifest).encode()], MANIFEST_POINTS)
            fsync_dir(temporary)
            fault("ckpt:dirsync")
            _publish(temporary, final, aside)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _retire(root, keep, {checkpoint_name(each) for each in spare})
    return final


def _sweep(root: Path) -> None:
    """Remove what saves that died have left."""
    for path in root.iterdir():
        if is_leftover(path.name):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            fault("ckpt:sweep")


def _refuse_complete(final: Path) -> bool:
    """Whether a damaged checkpoint is in the way of `final`; a good one is an error."""
    if not final.exists():
        return False
    try:
        verify_checkpoint(final)
    except CheckpointError:
        return True
    raise CheckpointError(
        Finding(
            code="E722",
            what=f"{final} is already there and complete; a checkpoint is never overwritten",
            fix="continue that run with --resume, or choose another --run-dir",
        )
    )


class _Here:
    """Components whose tensors are in this process, each a file."""

    def __init__(self, components: Mapping[str, Mapping[str, AnyTensor]]) -> None:
        self.shards: Mapping[str, ShardOf] = {}
        made = {name: header_of(name, tensors) for name, tensors in components.items()}
        self._files = {name: (header, components[name]) for name, (header, _) in made.items()}
        self.size = sum(size for _, size in made.values())

    def write(self, directory: Path) -> dict[str, FileRecord]:
        return {
            name + SUFFIX: write_file(
                directory / (name + SUFFIX), file_parts(header, tensors), COMPONENT_POINTS
            )
            for name, (header, tensors) in self._files.items()
        }

    def give_up(self) -> None:
        """Nothing: the tensors are written by who has called for it."""


def _publish(temporary: Path, final: Path, aside: bool) -> None:
    """Give a complete directory its name, then point LATEST at it."""
    root = final.parent
    if aside:
        final.rename(temporary_name(final))
        fault("ckpt:aside")
    temporary.rename(final)
    fault("ckpt:rename")
    fsync_dir(root)
    fault("ckpt:rootsync")
    write_atomic(root / LATEST, f"{final.name}\n".encode(), LATEST_POINTS)


def _retire(root: Path, keep: int, spared: Collection[str]) -> None:
    """Delete what is older than the newest `keep` complete checkpoints, but for those `spared`.

    Complete means here: sealed manifest, every file there with its size. Digests are left
    to the loader, which reads each file once anyway.
    """
    complete = 0
    for path in reversed(list_checkpoints(root)):
        if complete >= keep and path.name in spared:
            continue
        if complete >= keep:
            doomed = temporary_name(path)
            path.rename(doomed)
            fault("ckpt:delete:rename")
            shutil.rmtree(doomed)
            fault("ckpt:delete:unlink")
            continue
        try:
            check_files(path, read_manifest(path), sizes_only=True)
        except CheckpointError:
            continue
        complete += 1
    _sweep(root)


def set_aside(root: Path, iteration: int) -> Path | None:
    """Take the checkpoint of an iteration out of those that a run goes on from; where it lies now.

    None where no older one is there. At every instant LATEST names one that is there.
    """
    path = root / checkpoint_name(iteration)
    found = list_checkpoints(root)
    older = [each for each in found if each.name < path.name]
    if path not in found or not older:
        return None
    aside = root / f"diverged-{iteration:06d}"
    with disk_errors(CheckpointError, f"set {path} aside", root):
        write_atomic(root / LATEST, f"{older[-1].name}\n".encode(), LATEST_POINTS)
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        fsync_dir(root)
    return aside


def find_checkpoint(root: Path, *, identity: Mapping[str, str] | None = None) -> Found | None:
    """The newest checkpoint of `root` that verifies, its tensors not loaded.

    None if no save has ever completed there (no checkpoint, no LATEST). Raises
    `CheckpointError` if there are checkpoints and none verifies, or if `identity` is given
    and differs from the one saved.
    """
    found = list_checkpoints(root)
    rejected = _doubt_latest(root, found)
    if not found and not rejected:
        return None
    for path in reversed(found):
        try:
            manifest = verify_checkpoint(path)
        except CheckpointError as error:
            reason = error.findings[0].what.removeprefix(f"{path.name}: ")
            rejected.append(Rejected(name=path.name, reason=reason))
            continue
        if identity is not None:
            _check_identity(path, manifest.identity, identity)
        return Found(
            iteration=manifest.iteration,
            files=stored_files(path, manifest),
            state=manifest.state,
            identity=manifest.identity,
            path=path,
            rejected=tuple(rejected),
        )
    raise _nothing_usable(root, rejected)


def stored_files(path: Path, manifest: Manifest) -> dict[str, tuple[StoredFile, ...]]:
    """The files of a checkpoint by the component that they are, or are a part of."""
    found: dict[str, tuple[StoredFile, ...]] = {}
    for name in manifest.files:
        shard = manifest.shards.get(name)
        component = name.removesuffix(SUFFIX) if shard is None else shard.component
        file = StoredFile(path=path / name, pieces={} if shard is None else shard.pieces)
        found[component] = (*found.get(component, ()), file)
    return found


def _doubt_latest(root: Path, found: Sequence[Path]) -> list[Rejected]:
    """What is wrong with LATEST: it witnesses a save, so that none can vanish unseen."""
    file = root / LATEST
    if not file.is_symlink() and not file.exists():
        return []
    try:
        name = file.read_bytes().decode("ascii").removesuffix("\n")
    except (OSError, ValueError) as error:
        return [Rejected(name=LATEST, reason=f"cannot be read ({error})")]
    if not NAME_FORM.fullmatch(name):
        return [Rejected(name=LATEST, reason=f"does not name a checkpoint: {name[:40]!r}")]
    if name not in {path.name for path in found}:
        return [Rejected(name=LATEST, reason=f"names {name}, which is not here")]
    return []


def _check_identity(path: Path, saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    changed = [key for key in sorted({*saved, *now}) if saved.get(key) != now.get(key)]
    if changed:
        raise CheckpointError(
            Finding(
                code="E721",
                what=f"{path} was saved by another run: {', '.join(changed)} changed",
                got="\n".join(f"{key}: {now.get(key, 'nothing')}" for key in changed),
                expected="\n".join(f"{key}: {saved.get(key, 'nothing')}" for key in changed),
                fix="go back to what was saved, or start a new run in another --run-dir",
            )
        )


def _nothing_usable(root: Path, rejected: Sequence[Rejected]) -> CheckpointError:
    return CheckpointError(
        *(Finding(code="E720", what=f"{root / item.name}: {item.reason}") for item in rejected),
        summary=f"No checkpoint in {root} can be used, and a run is never started afresh over "
        "one.\nTo begin again, choose another --run-dir.",
    )
