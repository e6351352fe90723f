"""Which files go with a launched run: those of the pipeline's folder, as an archive.

Of a git repository what git does not ignore, else everything but hidden files, caches and virtual
environments; of both no runs. Knows no cluster.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlflow.cli.commands import Declared
from rlflow.errors import Finding, UsageError
from rlflow.graph.roles import Drawn
from rlflow.modelfiles.directories import hub_snapshot, model_directory
from rlflow.runtime.record.rundir import RUN_FILE, RUNS
from rlflow.scheduler.devices.cluster import amount
from rlflow.userfiles import package_of

MOST_BYTES = 512_000_000
MOST_FILES = 20_000
SKIPPED = ("__pycache__", "node_modules")
LAUNCHED = re.compile(r".+\.launch(?:-\d+)?")
GIT_SECONDS = 30.0
SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedCode:
    """The `files` below `root` that are shipped, relative to it, and their `size` in bytes."""

    root: Path
    files: tuple[Path, ...]
    size: int

    def holds(self, path: Path) -> bool:
        """Whether a file, or anything of a folder, is among them."""
        inner = path.resolve().relative_to(self.root)
        return any(file == inner or inner in file.parents for file in self.files)

    def archive(self) -> bytes:
        """The files as a gzipped tar; the same bytes for the same files."""
        packed = io.BytesIO()
        with (
            gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as stream,
            tarfile.open(fileobj=stream, mode="w") as tar,
        ):
            for file in self.files:
                tar.add(self.root / file, arcname=str(file), recursive=False, filter=_plain)
        return packed.getvalue()

    def line(self) -> str:
        """How much of what is shipped."""
        return f"{len(self.files)} files of {self.root}, {amount(self.size)}"

    def largest(self) -> str:
        """The largest of the files, with their sizes."""
        sizes = sorted(((_size(self.root / file), str(file)) for file in self.files), reverse=True)
        return ", ".join(f"{name} ({amount(size)})" for size, name in sizes[:SHOWN])


def shipped_code(pipeline: Path, more: Sequence[str]) -> ShippedCode:
    """The files that go with a pipeline file, and `more` files and folders that git ignores.

    Raises UsageError E383 where they are too many.
    """
    root = code_root(pipeline)
    found = _of_git(root)
    files = set(_below(root, root, kept=_is_code) if found is None else found)
    for text in more:
        path = Path(text).resolve()
        if not path.exists() or not path.is_relative_to(root):
            raise UsageError(_not_there(text, root))
        named = _below(path, root, kept=_is_no_cache) if path.is_dir() else [path.relative_to(root)]
        files |= set(named)
    code = ShippedCode(
        root=root,
        files=tuple(sorted(files)),
        size=sum(_size(root / file) for file in files),
    )
    if code.size > MOST_BYTES or len(code.files) > MOST_FILES:
        raise UsageError(too_much(code, f"{amount(MOST_BYTES)} in {MOST_FILES} files"))
    return code


def code_root(pipeline: Path) -> Path:
    """The folder that is shipped: its git repository, this one, or its package's."""
    top = _git(pipeline.resolve().parent, "rev-parse", "--show-toplevel")
    if top is not None:
        return Path(top.strip()).resolve()
    here = Path.cwd().resolve()
    return here if pipeline.resolve().is_relative_to(here) else package_of(pipeline)[0]


def require_shipped(code: ShippedCode, declared: Declared) -> None:
    """Raise UsageError E384 for models and data of the graph that the hosts would not find."""
    near, findings = declared.pipeline.path, []
    for model in declared.graph.models:
        found = model_directory(model.path, near)
        if found is not None and found != hub_snapshot(model.path):
            findings += _unshipped(code, f"model {model.path!r}", model.path, found)
    for _, drawn in declared.graph.having(Drawn):
        path, file = getattr(drawn.data, "path", None), getattr(drawn.data, "found", None)
        if isinstance(path, str) and isinstance(file, Path):
            findings += _unshipped(code, f"data {path!r}", path, file)
    if findings:
        raise UsageError(*dict.fromkeys(findings), summary="Nothing was submitted.")


def too_much(code: ShippedCode, most: str) -> Finding:
    """What is wrong with files that are too many to ship."""
    return Finding(
        code="E383",
        what=f"{code.line()}, are too much to ship",
        got=code.largest(),
        expected=most,
        fix="--code-at DIR, where the hosts have the code already; or ignore files by .gitignore",
    )


def _unshipped(code: ShippedCode, what: str, said: str, found: Path) -> list[Finding]:
    """A finding where a path is not shipped and no absolute one."""
    inside = found.resolve().is_relative_to(code.root)
    if Path(said).expanduser().is_absolute() or (inside and code.holds(found)):
        return []
    return [
        Finding(
            code="E384",
            what=f"{what} is not shipped",
            got=f"{found}: " + ("git ignores it" if inside else f"not below {code.root}"),
            expected="a file that is shipped, or an absolute path that all hosts have",
            fix=f"--ship {said}" if inside else f"{str(found.resolve())!r} in the pipeline",
        )
    ]


def _not_there(text: str, root: Path) -> Finding:
    return Finding(
        code="E383",
        what=f"--ship {text} cannot be shipped",
        got="no such file" if not Path(text).exists() else "it lies elsewhere",
        expected=f"a file or folder below {root}",
    )


def _of_git(root: Path) -> list[Path] | None:
    """The files of a repository that git does not ignore; None outside of one."""
    listed = _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    if listed is None:
        return None
    files = sorted({Path(name) for name in listed.split("\0") if name})
    runs = {file.parent for file in files if file.name == RUN_FILE}
    kept = [file for file in files if not any(_is_left(folder, runs) for folder in file.parents)]
    return [file for file in kept if (root / file).is_symlink() or (root / file).is_file()]


def _is_left(folder: Path, runs: Collection[Path]) -> bool:
    return folder.name in SKIPPED or _is_of_runs(folder, runs)


def _is_of_runs(folder: Path, runs: Collection[Path]) -> bool:
    """Whether a folder is a run, one of runs or one of a launch: no cluster wants it again."""
    return folder.name == RUNS.name or folder in runs or bool(LAUNCHED.fullmatch(folder.name))


def _below(folder: Path, root: Path, kept: Callable[[Path], bool]) -> Iterator[Path]:
    """The files below a folder, relative to the root; stops where they are too many anyway."""
    count = 0
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if kept(Path(here) / name))
        for name in sorted(names):
            if not name.startswith("."):
                yield (Path(here) / name).relative_to(root)
                count += 1
        if count > 2 * MOST_FILES:
            return


def _is_code(folder: Path) -> bool:
    runs = {folder} if (folder / RUN_FILE).is_file() else ()
    return _is_no_cache(folder) and not _is_of_runs(folder, runs)


def _is_no_cache(folder: Path) -> bool:
    hidden = folder.name.startswith(".") or folder.name in SKIPPED
    return not hidden and not (folder / "pyvenv.cfg").exists()


def _git(folder: Path, *words: str) -> str | None:
    """What git prints of a folder; None without git, or outside a repository."""
    program = shutil.which("git")
    if program is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 - a fixed program with fixed arguments
            [program, "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def _size(path: Path) -> int:
    return path.lstat().st_size


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """An entry that says nothing of who packed it, or when."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    return entry
