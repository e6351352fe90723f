"""The directory of one run: plain files that any tool reads, and a lock.

    runs/grpo-20250131T142501Z/
      run.json  config.json  graph.json  plan.txt  plan.json      what was run
      metrics.jsonl  devices.jsonl  spans/  logs/  tensorboard/   what happened
      records/  trackers.json  profiles/                          rows, other trackers, kernels
      checkpoints/                                                where to continue
      lock                                                        pid and host of its process

One process holds a run directory at a time; a run is never written over another. This file
does not know what a graph or a plan is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import socket
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Self

from rlflow.errors import Finding, RunDirError, near_names
from rlflow.runtime.record.durable import (
    JSON,
    PRIVATE,
    disk_errors,
    exact_json,
    exact_value,
    is_leftover,
    register_atomic_faults,
    write_atomic,
)
from rlflow.runtime.record.edges.secrets import hidden_facts, hidden_values
from rlflow.runtime.record.identity.ownership import require_own_files
from rlflow.runtime.record.identity.provenance import git_state, package_versions

RUNS = Path("runs")
PEAKS_FILE = "peaks.json"
RUN_FILE = "run.json"
LOCK_FILE = "lock"
# Descriptors of locks of this process, which a forked copy would hold as long as it lives.
_LOCKS: set[int] = set()
FILE_POINTS = register_atomic_faults("rundir:file")


class RunDir:
    """A run directory. Make one with `create`, `open` (both lock it) or `view` (does not).

    `path` is what a user calls it, `home` the same from the root on: a function of theirs may
    change the working directory of this process.

    The lock goes with `close`, the end of a `with` block, or the process. Every method
    raises `RunDirError` when the disk refuses.
    """

    def __init__(self, path: Path, lock: int | None) -> None:
        self.path = path
        self.home = home = path.absolute()
        self.checkpoints = home / "checkpoints"
        self.spans = home / "spans"
        self.logs = home / "logs"
        self.metrics = home / "metrics.jsonl"
        self._lock = lock

    @classmethod
    def create(
        cls,
        path: Path,
        name: str,
        *,
        pipeline: str,
        command: Sequence[str],
        again: Sequence[str] = (),
    ) -> Self:
        """Make the directory of a new run, lock it and write its run.json.

        `name` is the pipeline's name, `pipeline` what a user types after `rlflow run`, `command`
        the whole command line, `again` the words after `rlflow` that go on with the run, but for
        its directory and its end.
        Raises `RunDirError` if the directory is in use, holds a run, or holds other files.
        """
        with disk_errors(RunDirError, f"make the run directory {path}", path.parent):
            path.mkdir(parents=True, exist_ok=True)
            if not (path / RUN_FILE).exists() and (strays := _strays(path)):
                raise _foreign(path, strays)
            run = cls(path, _lock(path))
            try:
                if (path / RUN_FILE).exists():
                    raise run_in_the_way(path, pipeline)
                try:
                    run._start(name, pipeline, command, again)
                except BaseException:
                    run.remove()
                    raise
            except BaseException:
                run.close()
                raise
        return run

    @classmethod
    def open(cls, path: Path) -> Self:
        """Lock a run's directory to continue it; `RunDirError` if it is in use, none or damaged."""
        run = cls.view(path)
        run.read_run()
        with disk_errors(RunDirError, f"open the run directory {path}", path):
            run._lock = _lock(path)
            for entry in path.iterdir():
                if is_leftover(entry.name) and not entry.is_dir():  # which no writer leaves
                    entry.unlink()
        return run

    @classmethod
    def view(cls, path: Path) -> Self:
        """A run directory to read from, in use or not.

        Raises `RunDirError` if it is none, and if what is in it lies elsewhere.
        """
        with disk_errors(RunDirError, f"open the run directory {path}", path):
            if not (path / RUN_FILE).is_file():
                raise _not_a_run(path)
            require_own_files(path)
        return cls(path, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock; safe to repeat."""
        if self._lock is not None:
            _LOCKS.discard(self._lock)
            with contextlib.suppress(OSError):  # a function of a user's has closed it
                os.close(self._lock)
            self._lock = None

    def remove(self) -> None:
        """Delete a directory in which no run has begun, and the folder of runs if it is empty.

        Its run.json last: killed meanwhile, it is still a run that another command continues.
        """
        with contextlib.suppress(OSError):
            for entry in self.home.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                elif entry.name not in {RUN_FILE, LOCK_FILE}:
                    entry.unlink(missing_ok=True)
        shutil.rmtree(self.home, ignore_errors=True)
        if self.home.parent.name == RUNS.name:
            with contextlib.suppress(OSError):
                self.home.parent.rmdir()

    def read_run(self) -> Mapping[str, JSON]:
        """What run.json says. Raises `RunDirError` if it is damaged."""
        return _read_run(self.home)

    def write_config(self, config: Mapping[str, JSON]) -> None:
        """Write config.json, the resolved values; those named like a key are hidden."""
        self._write_json("config.json", hidden_values(config))

    def write_graph(self, graph: Mapping[str, JSON]) -> None:
        """Write graph.json, keys hidden; one that differs from it stays as graphs/NUMBER.json."""
        text, file = exact_json(hidden_values(graph)), self.home / "graph.json"
        with disk_errors(RunDirError, f"keep {file}", self.path):
            before = file.read_bytes() if file.exists() else text.encode()
            if before != text.encode():
                earlier = self.home / "graphs"
                earlier.mkdir(exist_ok=True)
                number = len(list(earlier.iterdir())) + 1
                write_atomic(earlier / f"{number}.json", before, FILE_POINTS, mode=PRIVATE)
        self._write("graph.json", text)

    def graphs(self) -> list[str]:
        """The texts of graph.json and of the graphs before it."""
        files = [self.home / "graph.json", *sorted((self.home / "graphs").glob("*.json"))]
        with disk_errors(RunDirError, f"read the graphs of {self.path}", self.path):
            return [file.read_text("utf-8", errors="replace") for file in files if file.exists()]

    def note(self, **facts: JSON) -> None:
        """Add to run.json; words of commands without what is named like a key."""
        self._write_json(RUN_FILE, hidden_facts({**self.read_run(), **facts}))

    def note_resumed(self, entry: Mapping[str, JSON], again: Sequence[str]) -> None:
        """Add to run.json that the run goes on, with which changes, and the words that do so."""
        before = self.read_run().get("resumed")
        added = {"at": datetime.now(UTC).isoformat(timespec="microseconds"), **entry}
        self.note(resumed=[*(before if isinstance(before, list) else []), added], again=list(again))

    def write_plan(self, text: str, plan: Mapping[str, JSON]) -> None:
        """Write plan.txt, the printed form, and plan.json, keys hidden."""
        self._write("plan.txt", text)
        self._write_json("plan.json", hidden_values(plan))

    def write_peaks(self, peaks: Mapping[str, JSON]) -> None:
        """Write what utilisation is measured against: peaks of the device, parameters of models."""
        self._write_json(PEAKS_FILE, peaks)

    def _start(
        self, name: str, pipeline: str, command: Sequence[str], again: Sequence[str]
    ) -> None:
        for directory in (self.checkpoints, self.spans, self.logs):
            directory.mkdir(exist_ok=True)
        facts: dict[str, JSON] = {
            "id": uuid.uuid4().hex,
            "name": name,
            "pipeline": pipeline,
            "command": list(command),
            "again": list(again) or ["run", pipeline],
            "started": datetime.now(UTC).isoformat(timespec="microseconds"),
            "host": socket.gethostname(),
            "git": git_state(),
            "versions": package_versions(),
        }
        self._write_json(RUN_FILE, hidden_facts(facts))

    def _write_json(self, name: str, value: Mapping[str, JSON]) -> None:
        self._write(name, exact_json(value))

    def _write(self, name: str, text: str) -> None:
        with disk_errors(RunDirError, f"write {self.path / name}", self.path):
            write_atomic(self.home / name, text.encode(), FILE_POINTS, mode=PRIVATE)


def words_again(run: Mapping[str, JSON]) -> list[str]:
    """The words after `rlflow` that go on with a run, but for its directory and its end."""
    words = run.get("again")
    return [str(w) for w in words] if isinstance(words, list) else ["run", str(run["pipeline"])]


def latest_run(parent: Path = RUNS, pipeline: str | None = None) -> Path:
    """The run directory in `parent` that was started last, of `pipeline` if that is given.

    `pipeline` is its name, or what was typed after `rlflow run`. Raises `RunDirError` if
    there is none.
    """
    with disk_errors(RunDirError, f"list the runs in {parent}", parent):
        found = sorted(parent.iterdir()) if parent.is_dir() else []
    runs = [(_read_run(path), path) for path in found if (path / RUN_FILE).is_file()]
    chosen = [
        (run, path)
        for run, path in runs
        if pipeline in {None, str(run["name"]), str(run["pipeline"])}
    ]
    if not chosen:
        names = sorted({str(run["name"]) for run, _ in runs})
        raise RunDirError(
            Finding(
                code="E713",
                what=f"no run of {pipeline or 'any pipeline'} in {parent} to continue",
                got=f"runs of {', '.join(names)}" if names else "no run at all",
                near=near_names(pipeline or "", names),
                fix="name the run directory: --resume RUN",
            )
        )
    return max(chosen, key=lambda item: (str(item[0]["started"]), item[1].name))[1]


def _strays(path: Path) -> list[str]:
    """What is in a directory beyond the traces of a `create` that died before run.json."""
    return sorted(
        entry.name
        for entry in path.iterdir()
        if entry.name != LOCK_FILE
        and not is_leftover(entry.name)
        and not (entry.is_dir() and not any(entry.iterdir()))
    )


def fresh_path(parent: Path, name: str) -> Path:
    """Make `parent/<name>-<UTC time>`, which nobody else has, even of the same second.

    Raises `RunDirError` when the disk refuses.
    """
    with disk_errors(RunDirError, f"make a run directory in {parent}", parent):
        parent.mkdir(parents=True, exist_ok=True)
        stem = f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        for number in count(1):
            path = parent / (stem if number == 1 else f"{stem}-{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
    raise AssertionError("count() does not end")


def _lock(path: Path) -> int:
    """Take the lock of a run directory; the kernel drops it when the process dies."""
    file = path / LOCK_FILE
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise _in_use(path) from error
    except OSError:
        os.close(descriptor)
        raise
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
    _LOCKS.add(descriptor)
    return descriptor


def _close_locks() -> None:
    """In a copy of this process: the locks are the run's alone."""
    for descriptor in _LOCKS:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _LOCKS.clear()


os.register_at_fork(after_in_child=_close_locks)


def _in_use(path: Path) -> RunDirError:
    holder = (path / LOCK_FILE).read_text().strip() or "another process"
    return RunDirError(
        Finding(
            code="E710",
            what=f"the run directory {path} is in use by {holder}",
            fix=f"wait for it or stop it, or choose another: {_typed('--run-dir', _other(path))}",
        )
    )


def run_in_the_way(path: Path, pipeline: str) -> RunDirError:
    """What is wrong with a directory for a new run that holds one (E711)."""
    run = _read_run(path)
    return RunDirError(
        Finding(
            code="E711",
            what=f"{path} holds a run of {run['name']}, started {run['started']}",
            fix=f"{_typed('rlflow', *words_again(run), '--resume', path)}\n"
            f"{_typed('rlflow', 'run', pipeline, '--run-dir', _other(path))}",
        )
    )


def _foreign(path: Path, names: Sequence[str]) -> RunDirError:
    return RunDirError(
        Finding(
            code="E712",
            what=f"{path} holds other files and no run",
            got=", ".join(names[:5]),
            expected="an empty directory, or one that does not exist",
            fix=f"{_typed('--run-dir', _other(path))}",
        )
    )


def _not_a_run(path: Path) -> RunDirError:
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    runs = [entry.name for entry in beside if (entry / RUN_FILE).is_file()]
    return RunDirError(
        Finding(
            code="E712",
            what=f"{path} is not a run directory",
            got="no such directory" if not path.exists() else f"no {RUN_FILE} in it",
            near=near_names(path.name, runs),
        )
    )


def _typed(*words: object) -> str:
    """Words as they are typed into a shell."""
    return shlex.join(map(str, words))


def _other(path: Path) -> Path:
    """The first free name beside `path`."""
    return next(p for n in count(2) if not (p := path.with_name(f"{path.name}-{n}")).exists())


def _read_run(path: Path) -> Mapping[str, JSON]:
    file = path / RUN_FILE
    with disk_errors(RunDirError, f"read {file}", path):
        data = file.read_bytes()
    try:
        run = exact_value(json.loads(data))
    except ValueError as error:
        run = str(error)
    if not isinstance(run, Mapping) or not {"name", "pipeline", "started"} <= run.keys():
        raise RunDirError(
            Finding(
                code="E714",
                what=f"{file} is damaged",
                got=repr(data[:60].decode(errors="replace")),
                fix=f"move {path} away, or name another run",
            )
        )
    return run
