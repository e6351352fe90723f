"""What actions took in earlier runs, kept in one JSON file, and looked up by what they did.

A record has a key (hardware, backend, op, model, layout, rows, lengths or bytes), the setting
it was measured in (pipeline, devices side by side, staleness) and the medians of the last runs.
Where the file is, `RLFLOW_COSTS` says; `off` leaves everything to estimates. Knows no spans.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal

VARIABLE = "RLFLOW_COSTS"
OFF = "off"
VERSION = 1
MOST_RUNS = 5
MOST_RECORDS = 2000

FIGURES = ("seconds", "wait", "length", "longest", "trips", "held", "accepted")

# What a sample is of: a run, `rlflow profile`, or a run of fewer than three iterations, whose first
# one has begun everything. The earlier one is believed before the later.
Origin = Literal["run", "profile", "short"]
ORIGINS: tuple[Origin, ...] = ("run", "profile", "short")


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """Beside what an action ran: the pipeline, how many devices, the staleness."""

    pipeline: str
    devices: int
    staleness: int

    def likeness(self, other: Setting) -> tuple[bool, bool, bool]:
        """How well another setting stands for this one: larger is better."""
        return (
            self.pipeline == other.pipeline,
            self.devices == other.devices,
            self.staleness == other.staleness,
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """Medians of one action over one run: seconds it took, seconds until it was started.

    `count` spans are behind it; `length` and `longest` are tokens of the responses that a
    rollout made, in the mean over its iterations, 0 where it made none; `trips` are those
    through a loop in the mean over `count` iterations, 0 where it is of none; `held` is the most
    bytes that an engine kept of a device while it slept, or the tokens of its pool, 0 where it is
    of neither; `accepted` is how often a drafted token was where those before it were.
    """

    origin: Origin
    count: int
    seconds: float
    wait: float
    length: float = 0.0
    longest: float = 0.0
    trips: float = 0.0
    held: float = 0.0
    accepted: float = 0.0


@dataclass(frozen=True, slots=True)
class Record:
    """The last samples of one key in one setting, the newest last; `serial` of that one."""

    key: str
    setting: Setting
    serial: int
    samples: tuple[Sample, ...]

    @property
    def chosen(self) -> tuple[Sample, ...]:
        """The samples of runs, else those of `rlflow profile`, else of runs that hardly began."""
        found = (tuple(s for s in self.samples if s.origin == origin) for origin in ORIGINS)
        return next(each for each in found if each)

    @property
    def seconds(self) -> float:
        """The median over runs of the median seconds."""
        return median(sample.seconds for sample in self.chosen)

    @property
    def wait(self) -> float:
        """The median over runs of the median seconds until it was started."""
        return median(sample.wait for sample in self.chosen)

    @property
    def trips(self) -> float:
        """The mean trips through a loop, over all iterations of the runs."""
        chosen = self.chosen
        count = sum(sample.count for sample in chosen)
        return sum(sample.trips * sample.count for sample in chosen) / max(count, 1)

    @property
    def accepted(self) -> float:
        """How often a drafted token was accepted: the mean over all iterations of the runs."""
        chosen = self.chosen
        count = sum(sample.count for sample in chosen)
        return sum(sample.accepted * sample.count for sample in chosen) / max(count, 1)

    @property
    def held(self) -> float:
        """The most bytes that were kept asleep, or tokens that a pool had, in any of the runs."""
        return max(sample.held for sample in self.chosen)

    @property
    def source(self) -> str:
        """The printed source: `measured, 3 runs`, `measured, 1 short run` or `profile`."""
        chosen = self.chosen
        if chosen[0].origin == "profile":
            return "profile"
        kind = "short run" if chosen[0].origin == "short" else "run"
        return f"measured, {len(chosen)} {kind}{'s' if len(chosen) > 1 else ''}"

    def source_for(self, setting: Setting) -> str:
        """The printed form, with what it was measured in where that is another setting."""
        source, then = self.source, self.setting
        if then.pipeline != setting.pipeline:
            source += f" of {then.pipeline}"
        if then.devices != setting.devices:
            source += f" on {then.devices} device{'s' if then.devices > 1 else ''}"
        if then.staleness != setting.staleness:
            source += f" at staleness {then.staleness}"
        return source


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """All records, and what was wrong with the file, if anything: then there are none."""

    records: tuple[Record, ...] = ()
    serial: int = 0
    problem: str = ""
    path: Path | None = field(default=None, compare=False)

    @cached_property
    def _by_key(self) -> Mapping[str, list[Record]]:
        found: dict[str, list[Record]] = {}
        for record in self.records:
            found.setdefault(record.key, []).append(record)
        return found

    def find(self, key: str, setting: Setting) -> Record | None:
        """The record of a key whose setting is the most alike; of equals, the newest."""
        found = self._by_key.get(key, ())
        return max(found, key=lambda r: (r.setting.likeness(setting), r.serial), default=None)

    def all(self, key: str) -> tuple[Record, ...]:
        """The records of a key in every setting."""
        return tuple(self._by_key.get(key, ()))

    def adding(self, samples: Iterable[tuple[str, Setting, Sample]]) -> MeasuredCosts:
        """With one run more: each key keeps its last few samples, the file its newest records."""
        serial = self.serial + 1
        records = {(record.key, record.setting): record for record in self.records}
        for key, setting, sample in samples:
            known = records.pop((key, setting), None)
            kept = with_sample(known.samples if known else (), sample)[-MOST_RUNS:]
            records[key, setting] = Record(key, setting, serial, kept)
        kept_records = tuple(records.values())[-MOST_RECORDS:]
        return replace(self, records=kept_records, serial=serial, problem="")

    def to_json(self) -> dict[str, Any]:
        """Plain data, as it lies in the file."""
        return {
            "version": VERSION,
            "serial": self.serial,
            "records": [
                {
                    "key": r.key,
                    "setting": [r.setting.pipeline, r.setting.devices, r.setting.staleness],
                    "serial": r.serial,
                    "samples": [
                        [s.origin, s.count, *(getattr(s, name) for name in FIGURES)]
                        for s in r.samples
                    ],
                }
                for r in self.records
            ],
        }


def with_sample(known: tuple[Sample, ...], sample: Sample) -> tuple[Sample, ...]:
    """Samples with a newer one; those of short runs go as soon as there is a better one."""
    better = tuple(each for each in known if each.origin != "short")
    if sample.origin != "short":
        return (*better, sample)
    return better or (*known, sample)


NOTHING = MeasuredCosts()


def costs_path() -> Path | None:
    """Where measured costs are kept; None where `RLFLOW_COSTS` is `off`."""
    said = os.environ.get(VARIABLE, "")
    if said == OFF:
        return None
    if said:
        return Path(said)
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "rlflow" / "costs.json"


def load_measured(path: Path | None = None) -> MeasuredCosts:
    """What the file holds, the one of `RLFLOW_COSTS` if none is named; nothing without a file.

    A file that cannot be read or is damaged counts as empty, with a `problem` that says why.
    """
    where = costs_path() if path is None else path
    if where is None:
        return NOTHING
    try:
        text = where.read_text(encoding="utf-8")
    except FileNotFoundError:
        return MeasuredCosts(path=where)
    except (OSError, UnicodeDecodeError) as error:
        return MeasuredCosts(path=where, problem=f"{where} cannot be read: {error}")
    try:
        return replace(_parsed(json.loads(text)), path=where)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return MeasuredCosts(path=where, problem=f"{where} is damaged: {error}")


def _parsed(found: Any) -> MeasuredCosts:
    """The records of a file's content. Raises ValueError, KeyError or TypeError if it is none."""
    if found["version"] != VERSION:
        raise ValueError(f"version {found['version']!r}, expected {VERSION}")
    return MeasuredCosts(
        records=tuple(_record(row) for row in found["records"]), serial=int(found["serial"])
    )


def _record(row: Any) -> Record:
    pipeline, devices, staleness = row["setting"]
    samples = tuple(_sample(*values) for values in row["samples"])
    if not samples:
        raise ValueError(f"no samples of {row['key']!r}")
    setting = Setting(str(pipeline), int(devices), int(staleness))
    return Record(str(row["key"]), setting, int(row["serial"]), samples)


def _sample(origin: Origin, count: int, *seconds: float) -> Sample:
    took, wait, length, longest, *rest = (float(value) for value in seconds)
    trips, held, accepted = (*rest, *(0.0, 0.0, 0.0)[len(rest) :])
    if origin not in ORIGINS or not 0 <= took < float("inf"):
        raise ValueError(f"a sample of {took} seconds from {origin!r}")
    if not 0 <= trips < float("inf") or not 0 <= held < float("inf"):
        raise ValueError(f"a sample of {trips} trips and {held} bytes")
    if not 0 <= accepted <= 1:
        raise ValueError(f"a sample of which {accepted} is accepted")
    return Sample(origin, int(count), took, wait, length, longest, trips, held, accepted)


def add_to_file(path: Path, samples: Iterable[tuple[str, Setting, Sample]]) -> MeasuredCosts:
    """Add one run's samples to a file and return what it then holds.

    Atomic, and one process at a time. A damaged file is begun anew. Raises OSError where the
    disk refuses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        made = load_measured(path).adding(samples)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.write_text(json.dumps(made.to_json()) + "\n", encoding="utf-8")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    return made


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock beside a file; the kernel drops it when the process dies."""
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
