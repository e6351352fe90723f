"""From the options of `rlflow launch` to the job: planned, sized, and with paths of the hosts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any, Literal

from rlflow.cli.commands import (
    Declared,
    Planned,
    Target,
    cluster_of,
    data_findings,
    declare,
    plan_declared,
)
from rlflow.cli.config import named_placement
from rlflow.cli.continuing import existing_run
from rlflow.cli.launching.hosts import host_need
from rlflow.cli.launching.job import LaunchJob, title_of
from rlflow.cli.launching.shipped import (
    ShippedCode,
    code_root,
    require_shipped,
    shipped_code,
)
from rlflow.cli.launching.variables import read_variables, require_no_key
from rlflow.cli.machines import require_one_kind
from rlflow.cli.options import run_words
from rlflow.cli.stages.parts import require_trained
from rlflow.errors import Finding, UsageError
from rlflow.runtime.record.rundir import RUN_FILE, RUNS, run_in_the_way
from rlflow.scheduler.devices.declared import is_device_file, parse_bytes

Where = Literal["slurm", "k8s", "ssh"]
NOTHING = "Nothing was submitted."
RESTARTS = 10
# What a run is told once: where it is, and how it begins.
ONCE: dict[str, Any] = {
    "run_dir": None,
    "resume": None,
    "from_weights": None,
    "allow_changes": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedLaunch:
    """A launch as it was asked for: its job, and the code that goes with it, if any does."""

    where: Where
    job: LaunchJob
    shipped: ShippedCode | None
    archive: bytes | None


def asked_launch(
    where: Where, options: Mapping[str, Any], site: Mapping[str, Any], *, folder: str | None
) -> AskedLaunch:
    """Everything that a launch needs, checked; nothing is written.

    `options` are those of a run, `site` those of a launch. Code is unpacked in `folder` on the
    hosts, or beside the run directory. Raises the errors of plans, and UsageError E380 to E386.
    """
    variables = read_variables(site["env"], here=where != "k8s")
    for name in ("setup", "lines"):
        for text in site[name]:
            require_no_key(text.split(), f"--{name.removesuffix('s')} has")
    planned, hosts = _planned(where, options, site)
    declared, plan = planned.declared, planned.compiled.plan
    require_trained(options["from_weights"], plan)
    said = site["memory"]
    need = host_need(planned, hosts, None if said is None else parse_bytes(said, "--memory"))
    run = _run_dir(options, site, planned)
    beside = _beside(where, run)
    shipped = _shipped(site, declared)
    unpacked = folder or f"{beside}/code"
    path = _required_path(declared)
    root = code_root(path) if shipped is None else shipped.root
    code = site["code_at"] or unpacked
    words = _words(options, planned, root, code)
    require_no_key(words, "the run is told")
    job = LaunchJob(
        name=plan.graph.name,
        title=title_of(plan.graph.name, plan.placement, version("rlflow-engine"), need),
        launched=site["launched"],
        words=words,
        first=_option("--from-weights", options["from_weights"]),
        again=("--allow-changes", options["allow_changes"]) if options["allow_changes"] else (),
        run_dir=run,
        beside=beside,
        unpacked="" if shipped is None else unpacked,
        code=_inner(code, root),
        programs="" if where == "k8s" or site["setup"] else str(Path(sys.executable).parent),
        setup=site["setup"],
        variables=variables,
        need=need,
        restarts=RESTARTS if site["restarts"] is None else site["restarts"],
        time=site["time"],
        raw=site["lines"],
    )
    archive = None if shipped is None else shipped.archive()
    return AskedLaunch(where=where, job=job, shipped=shipped, archive=archive)


def _planned(
    where: Where, options: Mapping[str, Any], site: Mapping[str, Any]
) -> tuple[Planned, int]:
    """The plan on as many hosts as are asked for, or as servers of the kind hold the devices."""
    if options["devices"] is None:
        raise UsageError(
            Finding(
                code="E380",
                what="the devices of another machine are not known here",
                expected="what the hosts have, all of them together",
                fix="--devices h100:8",
            ),
            summary=NOTHING,
        )
    target = Target(**{key: options[key] for key in options.keys() & Target.__slots__})
    declared = declare(target)
    findings = data_findings(declared.graph)
    if findings:
        raise UsageError(*findings, summary=NOTHING)
    cluster = cluster_of(target, 1)
    _, placement = named_placement(declared.pipeline, options["placement"])
    needed = placement.at(cluster.count).num_devices()
    servers = 1 if cluster.is_cpu else -(-needed // cluster.kind.per_host)
    hosts = site["hosts"] or servers
    if hosts > needed:
        raise UsageError(
            Finding(
                code="E381",
                what=f"{hosts} hosts share {needed} devices of the placement",
                expected="a device for each host at least",
                fix=f"--hosts {needed}, or a placement of more devices",
            ),
            summary=NOTHING,
        )
    spread = target
    if hosts > 1:
        spread = replace(target, rooms=(-(-needed // hosts),) * hosts)
    if hosts > 1 or where == "k8s":
        spread = replace(spread, backend="ray")
    planned = plan_declared(declared, spread)
    require_one_kind(planned)
    return planned, hosts


def _run_dir(options: Mapping[str, Any], site: Mapping[str, Any], planned: Planned) -> str:
    """The directory of the run, absolute; that of a run only where it is to go on."""
    if options["resume"]:
        found = existing_run(options["resume"], options["run_dir"], planned.target.named)
        return str(found.absolute())
    name = f"{planned.compiled.plan.graph.name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    volumes = site["volumes"]
    parent = Path(volumes[0][1]) / RUNS if volumes else RUNS
    path = Path(options["run_dir"] or parent / name).absolute()
    if (path / RUN_FILE).exists():
        raise run_in_the_way(path, planned.target.named)
    return str(path)


def _beside(where: Where, run: str) -> str:
    """A folder of this launch alone, beside the run's; of pods, whose runs are elsewhere, here."""
    base = Path(run) if where != "k8s" else (RUNS / Path(run).name).absolute()
    named = (f"{base}.launch{f'-{n}' if n > 1 else ''}" for n in count(1))
    return next(name for name in named if not Path(name).exists())


def _shipped(site: Mapping[str, Any], declared: Declared) -> ShippedCode | None:
    if site["code_at"]:
        return None
    code = shipped_code(_required_path(declared), site["ship"])
    require_shipped(code, declared)
    return code


def _required_path(declared: Declared) -> Path:
    path = declared.pipeline.path
    assert path is not None, "a pipeline of a command line has a file"
    return path


def _words(options: Mapping[str, Any], planned: Planned, root: Path, code: str) -> tuple[str, ...]:
    """The words after `rlflow`, with the files that they name where the hosts have them."""
    pipeline, colon, name = options["pipeline"].partition(":")
    values = {**options, **ONCE, "dry_run": False}
    values["pipeline"] = f"{_on_hosts(pipeline, root, code)}{colon}{name}"
    values["threads"] = planned.cluster.threads
    values["backend"] = planned.target.backend
    placement, devices = options["placement"], options["devices"]
    if placement is None:
        placement = named_placement(planned.declared.pipeline, None)[0]
    if placement.endswith(".py"):
        placement = _on_hosts(placement, root, code)
    if is_device_file(devices):
        devices = _on_hosts(devices, root, code)
    values |= {"placement": placement, "devices": devices}
    if options["lengths"] is not None:  # A file of them, or a run, is read here.
        values["lengths"] = str(planned.declared.graph.lengths)
    sources = (text.rpartition(":") for text in options["from_"])
    values["from_"] = tuple(f"{Path(run).absolute()}:{node}" for run, _, node in sources)
    return ("run", *run_words(values))


def _on_hosts(text: str, root: Path, code: str) -> str:
    """A file of this machine as the hosts have it. Raises UsageError E383 for one outside."""
    path = Path(text).resolve()
    if not path.is_relative_to(root):
        raise UsageError(
            Finding(
                code="E383",
                what=f"{text} is not shipped",
                got=str(path),
                expected=f"a file below {root}",
            ),
            summary=NOTHING,
        )
    return f"{code}/{path.relative_to(root)}"


def _inner(code: str, root: Path) -> str:
    """The folder in which the run starts: where this command was typed, if that is shipped."""
    here = Path.cwd().resolve()
    inner = here.relative_to(root) if here.is_relative_to(root) else Path()
    return str(Path(code) / inner)


def _option(name: str, path: str | None) -> tuple[str, ...]:
    return (name, str(Path(path).absolute())) if path else ()
