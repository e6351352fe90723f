"""How the weights of a staging reach an engine: through memory, a file or a broadcast.

Each way asks the engine for the update and waits for the version that it then reports. This file
knows neither what becomes of an engine that is lost nor what a version is good for.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlflow.engines.hf.weights.in_files import Entry
from rlflow.engines.process.client.group import EngineGroup
from rlflow.engines.process.client.link import Link, LostError
from rlflow.engines.process.client.shared_weights import SharedWeights
from rlflow.errors import Finding, RunError

BUCKET_BYTES = 256 << 20
# The names of dtypes in safetensors files.
SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Weights of `version` for the engine of `link`, whose `facts` are those of its start.

    Of a model with adapters the `whole` is brought where what lies below them has changed. SGLang
    answers for its first rank alone: `prove` compares what all have with the staging, and raises
    RefusedError where one differs.
    """

    link: Link
    version: int
    facts: Mapping[str, Any]
    prove: Callable[[], None]
    whole: bool = False


class Way(Protocol):
    """Brings all weights of a staging to an engine."""

    def bring(self, update: Update) -> str:
        """Have the engine take them; the version that it reports.

        Has it prove them where a rank may not have got what the first one got. Raises LostError
        and RefusedError as requests do.
        """


class InMemory:
    """The staging itself, which the engine has mapped."""

    def bring(self, update: Update) -> str:
        """See `Way`; the ranks wait for each other after each bucket."""
        more = {"whole": True} if update.whole else {}
        return str(update.link.ask("update", {"version": update.version, **more}).result())


class Disk:
    """A safetensors file, which is there until all `ranks` have read it.

    It is written to a directory of its own in `directory`, or in the engine's, which goes with
    the engine. Of several ranks one may find no file there, or an old one, so that what they hold
    is compared every time. Raises RunError E673 where nothing can be written there.
    """

    def __init__(self, staging: SharedWeights, directory: str | None, *, ranks: int) -> None:
        try:
            if directory is not None:
                tempfile.TemporaryFile(dir=directory).close()
        except OSError as error:
            raise not_written(str(directory), error) from error
        self._staging = staging
        self._directory = directory
        self._ranks = ranks

    def bring(self, update: Update) -> str:
        """See `Way`; raises RunError E673 where the file cannot be written."""
        assert not update.whole, "adapters go through memory"
        base, link = self._directory or update.facts["directory"], update.link
        written = None
        try:
            # No two updates share a name, which a host may have read and remembered.
            written = tempfile.mkdtemp(prefix=f"version-{update.version}-", dir=base)
            write_weights(Path(written) / "model.safetensors", self._staging)
            fields = {"version": update.version, "path": written}
            told = str(link.ask("update", fields).result())
            if self._ranks > 1:
                update.prove()
            return told
        except OSError as error:
            if link.lost.is_set():
                raise LostError(link.reason) from error
            raise not_written(base, error) from error
        finally:
            if written is not None:
                shutil.rmtree(written, ignore_errors=True)


class Broadcast:
    """A broadcast in a group of this process and the engine's `ranks`, met at `address`.

    What several ranks hold is compared after the first one: that all are in the group.
    """

    def __init__(self, staging: SharedWeights, *, ranks: int, address: str) -> None:
        self._staging = staging
        self._ranks = ranks
        self._address = address
        self._buckets = buckets(staging.table)
        self._groups: weakref.WeakKeyDictionary[Link, EngineGroup] = weakref.WeakKeyDictionary()

    def bring(self, update: Update) -> str:
        """See `Way`; an engine that is met for the first time has joined a group before."""
        assert not update.whole, "adapters go through memory"
        link = update.link
        known = self._groups.get(link)
        peers = known or self._met(link)

        def send() -> None:
            for bucket in self._buckets:
                peers.broadcast(self._staging.piece(bucket))

        # A broadcast does not wait for long, and rows in flight may take any time.
        link.ask("drain", {}).result()
        call = link.ask("update", {"version": update.version, "buckets": self._buckets})
        sending = beside(link, send)
        told = str(call.result())
        sending.join()
        if known is None and self._ranks > 1:
            update.prove()
        return told

    def _met(self, link: Link) -> EngineGroup:
        """A group with the ranks of an engine that is in none."""
        peers = EngineGroup(self._address, self._ranks, seconds=link.patience)
        meeting = beside(link, peers.meet)
        link.ask("join", {"address": self._address, "port": peers.port}).result()
        meeting.join()
        self._groups[link] = peers
        return peers


def beside(link: Link, work: Callable[[], None]) -> threading.Thread:
    """Do something in a thread; the engine is lost where that fails.

    It fails when the engine ends, so the thread ends then too.
    """

    def run() -> None:
        try:
            work()
        except Exception as error:
            link.lose(f"the group that weights reach it through failed: {error}")

    thread = threading.Thread(target=run, name="rlflow-weights", daemon=True)
    thread.start()
    return thread


def buckets(table: Sequence[Entry], limit: int = BUCKET_BYTES) -> list[list[Entry]]:
    """A table in parts of about so many bytes and of one dtype each, one weight at the least."""
    found: list[list[Entry]] = []
    for entry in table:
        last = found[-1] if found else []
        if not last or last[0][1] != entry[1] or entry[3] - last[0][3] >= limit:
            found.append([])
        found[-1].append(entry)
    return found


def write_weights(path: Path, staging: SharedWeights) -> None:
    """Write a staging as a safetensors file, without a copy of it. Raises OSError."""
    header, end = {}, 0
    for name, dtype, shape, _ in staging.table:
        begin, end = end, end + staging.stored[name].nbytes
        header[name] = {
            "dtype": SAFETENSORS[dtype],
            "shape": shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in staging.table:
            file.write(staging.piece([entry]).numpy().data)


def not_written(directory: str, error: OSError) -> RunError:
    """What to raise where weights cannot be written."""
    return RunError(
        Finding(
            code="E673",
            what=f"weights cannot be written to {directory}",
            got=error.strerror or str(error),
            expected="a directory with room for the weights of each replica",
            fix='rf.SGLang(updates="disk", updates_dir=...)',
        )
    )
