"""Devices that a file declares: `--devices my.toml`, as `rlflow doctor --measure` writes it.

    devices = "mine:8,h100:8"   # as --devices says it, of kinds of this file and of the table

    [host]                      # each of them, left out where it is this machine
    memory = 1.5e12
    cores = 96                  # of CPU devices

    [kinds.mine]
    base = "h100"               # what is left out is as there
    memory = 96e9

Figures are those of `Kind`, in bytes, flop/s, B/s and seconds. A kind that is called as one of the
table stands for it; `cpu` is this machine's, with rates of `threads` threads. Knows no clusters.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from rlflow.errors import Finding, UsageError, known_names, near_names
from rlflow.graph.strict_model import Strict
from rlflow.scheduler.devices.curves import curves_of
from rlflow.scheduler.devices.hardware import KINDS, Kind, accelerator

SUFFIX = ".toml"
NAME = re.compile(r"[a-z][a-z0-9]*")
RESERVED = "gpu"
# Without a base these have to be said; all others have the values that accelerators have.
NEEDED = ("memory", "flops", "flops32", "bandwidth", "link", "nic", "host_link")
# Of CPU devices others are asked of the machine, or shared out by --devices.
CPU_FIGURES = (
    "flops",
    "flops32",
    "bandwidth",
    "link",
    "bus",
    "nic",
    "host_link",
    "launch",
    "latency",
    "hop",
    "far_hop",
    "weights",
)
PER_THREAD = ("flops", "flops32", "weights")
SHARE = re.compile(r"(\d+(?:\.\d+)?)(%)?")
BYTES = re.compile(r"(\d+(?:\.\d+)?)(?:([MGT])B)?")
SCALES = {None: 1.0, "M": 1e6, "G": 1e9, "T": 1e12}


class MeasuredFigure(Strict):
    """One measurement behind a kind's figures: `rate` in the unit of `what`, at a size."""

    what: str
    size: float = Field(ge=0)
    rate: float = Field(gt=0)
    seconds: float = Field(gt=0)


class DeclaredKind(Strict):
    """A kind as a file has it: figures of `Kind`, all of them optional where it has a base."""

    base: str | None = None
    source: str = ""
    threads: int | None = Field(None, ge=1)
    memory: float | None = Field(None, gt=0)
    flops: float | None = Field(None, gt=0)
    flops32: float | None = Field(None, gt=0)
    flops_tf32: float | None = Field(None, gt=0)
    flops64: float | None = Field(None, gt=0)
    bandwidth: float | None = Field(None, gt=0)
    link: float | None = Field(None, gt=0)
    bus: float | None = Field(None, gt=0)
    nic: float | None = Field(None, gt=0)
    host_link: float | None = Field(None, gt=0)
    launch: float | None = Field(None, ge=0)
    replayed: float | None = Field(None, ge=0)
    latency: float | None = Field(None, ge=0)
    hop: float | None = Field(None, ge=0)
    far_hop: float | None = Field(None, ge=0)
    reached: float | None = Field(None, gt=0, le=1)
    sustained: float | None = Field(None, gt=0, le=1)
    weights: float | None = Field(None, gt=0)
    engine: float | None = Field(None, ge=0)
    per_host: int | None = Field(None, ge=1)
    host_sharing: int | None = Field(None, ge=1)
    linked: int | None = Field(None, ge=0)
    reserve: float | None = Field(None, ge=0, lt=1)
    measured: tuple[MeasuredFigure, ...] = ()

    def figures(self) -> dict[str, Any]:
        """What is said of the figures of `Kind`."""
        beside = {"base", "source", "threads", "measured"}
        return self.model_dump(exclude_none=True, exclude=beside)


class DeclaredHost(Strict):
    """A host as a file has it: bytes of memory for what sleeps there, and cores."""

    memory: float | None = Field(None, gt=0)
    cores: int | None = Field(None, ge=1)


class DeviceFile(Strict):
    """All that a file says."""

    devices: str
    host: DeclaredHost = DeclaredHost()
    kinds: Mapping[str, DeclaredKind] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredDevices:
    """What a file declares: devices as `--devices` names them, the kinds, the host's figures.

    `cpu` is what it says of CPU devices, None where it says nothing.
    """

    devices: str
    kinds: Mapping[str, Kind]
    cpu: DeclaredKind | None = None
    host_memory: float | None = None
    cores: int | None = None


def is_device_file(text: str) -> bool:
    """Whether `--devices` names a file."""
    return text.endswith(SUFFIX)


def read_devices(path: Path) -> DeclaredDevices:
    """What a file declares. Raises UsageError E252 with all that is wrong with it."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = near_names(path.name, [each.name for each in path.parent.glob(f"*{SUFFIX}")])
        fix = f"rlflow doctor --measure -o {path}"
        raise UsageError(_finding(path, "there is no such file", near=near, fix=fix)) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(_finding(path, f"is not TOML: {error}")) from None
    try:
        said = DeviceFile.model_validate(found)
    except ValidationError as error:
        raise UsageError(*_refused(path, error)) from None
    findings = [
        finding for name, kind in said.kinds.items() for finding in _wrong(path, name, kind)
    ]
    if said.host.cores and not said.devices.startswith("cpu"):
        expected = "cores of a host of CPU devices"
        findings.append(_finding(path, f"host.cores: {said.devices!r} has none", expected=expected))
    if findings:
        raise UsageError(*findings)
    return DeclaredDevices(
        devices=said.devices,
        kinds={n: _made(path, n, kind) for n, kind in said.kinds.items() if n != "cpu"},
        cpu=said.kinds.get("cpu"),
        host_memory=said.host.memory,
        cores=said.host.cores,
    )


def check_device_path(path: Path) -> None:
    """Raise UsageError E252 for a file that could not be written, or not be read back."""
    fix = f"-o {path.with_suffix(SUFFIX)}"
    if path.suffix != SUFFIX:
        what = f"-o {path}: --devices takes files that end in {SUFFIX}"
        raise UsageError(Finding(code="E252", what=what, fix=fix))
    if not path.parent.is_dir():
        what = f"-o {path}: there is no folder {path.parent}"
        raise UsageError(Finding(code="E252", what=what, fix=f"-o {path.name}"))


def parse_bytes(text: str, option: str) -> float:
    """Bytes as `1.5TB`, `512GB` or a number says them. Raises UsageError E202 for another."""
    match = BYTES.fullmatch(text)
    if match is None or not float(match[1]):
        raise UsageError(
            Finding(
                code="E202",
                what=f"{option} {text} is no amount of memory",
                expected="bytes, or a number of MB, GB or TB",
                fix=f"{option} 512GB",
            )
        )
    return float(match[1]) * SCALES[match[2]]


def parse_share(text: str, option: str) -> float:
    """A share as `8%` or `0.08` says it. Raises UsageError E202 for another, and from 1 on."""
    match = SHARE.fullmatch(text)
    share = float(match[1]) / (100 if match[2] else 1) if match is not None else 1.0
    if share >= 1:
        raise UsageError(
            Finding(
                code="E202",
                what=f"{option} {text} is no share of a device's memory",
                expected="a percentage, or a number below 1",
                fix=f"{option} 8%",
            )
        )
    return share


def measured_cpu(kind: Kind, said: DeclaredKind, threads: int) -> Kind:
    """A CPU device of so many threads as a file declares it; what is left out is as it was.

    Rates of threads grow with them. All threads of a device read its weights no faster than its
    memory.
    """
    share = threads / (said.threads or threads)
    found = {
        name: value * share if name in PER_THREAD else value
        for name, value in said.figures().items()
    }
    source = said.source or kind.source
    made = replace(kind, **found, source=source, curves=curves_of(said.measured))
    return replace(made, weights=min(made.weights, made.bandwidth))


def _made(path: Path, name: str, said: DeclaredKind) -> Kind:
    """A kind of a file, which stands on its base."""
    base = said.base or (name if name in KINDS else None)
    figures = {**said.figures(), "curves": curves_of(said.measured)}
    source = said.source or f"declared in {path.name}"
    if base is not None:
        if "link" in figures:
            figures.setdefault("bus", figures["link"])
        return replace(KINDS[base], **figures, name=name, family=base, source=source)
    figures.setdefault("bus", figures["link"])
    return replace(accelerator(name, source), **figures, family=RESERVED)


def _wrong(path: Path, name: str, said: DeclaredKind) -> Iterator[Finding]:
    """What is wrong with a kind that is well formed."""
    where = f"kinds.{name}"
    if not NAME.fullmatch(name) or name == RESERVED:
        expected = f"small letters and digits, a letter first, and not {RESERVED}"
        yield _finding(path, f"{where} is no name of a kind", expected=expected)
    if said.base is not None and (said.base not in KINDS or name == "cpu"):
        yield _finding(
            path,
            f"{where}.base: no kind {said.base!r} that it could stand on",
            expected="nothing" if name == "cpu" else known_names(tuple(KINDS)),
            near=near_names(said.base, KINDS),
        )
        return
    figures = said.figures()
    if name == "cpu":
        extra = [key for key in figures if key not in CPU_FIGURES]
        if extra:
            what = f"{where}.{extra[0]}: CPU devices have it of --devices or of this machine"
            yield _finding(path, what, expected=known_names(CPU_FIGURES))
        if said.threads is None:
            what = f"{where}.threads is missing"
            yield _finding(path, what, expected="of how many threads the rates are")
        return
    if said.threads is not None:
        yield _finding(path, f"{where}.threads: it is of cpu alone", expected="no such key")
    missing = [key for key in NEEDED if key not in figures]
    if missing and said.base is None and name not in KINDS:
        expected = f"{', '.join(NEEDED)}, or base = one of {', '.join(KINDS)}"
        yield _finding(path, f"{where} lacks {', '.join(missing)}", expected=expected)


def _refused(path: Path, error: ValidationError) -> Iterator[Finding]:
    """What is not of the form of a file, one finding a key."""
    tables: dict[int, type[Strict]] = {1: DeviceFile, 2: DeclaredHost, 3: DeclaredKind}
    for problem in error.errors():
        keys = [str(part) for part in problem["loc"]]
        shown = ".".join(keys)
        if problem["type"] == "extra_forbidden":
            table = MeasuredFigure if "measured" in keys else tables[len(keys)]
            known = tuple(table.model_fields)
            near = near_names(keys[-1], known)
            expected = known_names(known)
            yield _finding(path, f"{shown} is not a key here", expected=expected, near=near)
            continue
        got = "" if problem["type"] == "missing" else f"{problem['input']!r:.80}"
        message = problem["msg"].removeprefix("Value error, ")
        yield _finding(path, shown, got=got, expected=message)


def _finding(
    path: Path,
    what: str,
    *,
    got: str = "",
    expected: str = "",
    near: tuple[str, ...] = (),
    fix: str = "",
) -> Finding:
    said = f"--devices {path}: {what}"
    return Finding(code="E252", what=said, got=got, expected=expected, near=near, fix=fix)
