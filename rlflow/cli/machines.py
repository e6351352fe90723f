"""Where the actions of a run are carried out: in this process, or in one a device on Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from rlflow.cli.commands import NOTHING, Target, cluster_of
from rlflow.cli.interpreters import missing_engines
from rlflow.errors import Finding, PlanError, RlflowError, UsageError
from rlflow.scheduler.devices.declared import RESERVED
from rlflow.scheduler.devices.machine import Gpu

if TYPE_CHECKING:
    from rlflow.cli.commands import Planned
    from rlflow.runtime.local import LocalMachine
    from rlflow.runtime.ray.machine import RayMachine
    from rlflow.runtime.record.devices.profiled import ProfiledActions
    from rlflow.runtime.record.edges.choice import Recording
    from rlflow.scheduler.devices.cluster import Cluster
    from rlflow.scheduler.plan.plan import Plan

POLL_SECONDS = 1.0


@contextmanager
def machine_of(
    planned: Planned,
    options: Mapping[str, Any],
    profiled: ProfiledActions | None = None,
    recording: Recording | None = None,
) -> Iterator[LocalMachine | RayMachine]:
    """Where the plan runs, with its models loaded; closed whatever happens.

    The kernels of what is `profiled` are recorded, and the rows that `recording` says.
    """
    from rlflow.runtime.record.durable import check_armed
    from rlflow.runtime.worker.allocator import keep_freed_memory

    plan, near = planned.compiled.plan, planned.declared.pipeline.path
    seed, threads = planned.declared.config.seed, planned.cluster.threads
    machine: LocalMachine | RayMachine
    if plan.backend == "local":
        from rlflow.runtime.local import LocalMachine
        from rlflow.runtime.record.edges.recorder import Recorder
        from rlflow.runtime.worker.worker import Worker

        check_armed()
        keep_freed_memory()
        device, proven = local_device(planned.cluster.kind.chip), options["check_sync"]
        worker = Worker(plan, seed=seed, near=near, device=device, check_sync=proven)
        worker.recorder = Recorder(recording, plan)
        limit = options["deadline"]
        machine = LocalMachine(plan, worker, threads=threads, deadline=limit, profiled=profiled)
    else:
        from rlflow.runtime.ray.machine import Options, RayMachine

        check_armed()  # the points of failure of ranks are known once they are imported
        machine = RayMachine(
            plan,
            Options(
                kind=planned.cluster.kind.chip,
                threads=threads,
                seed=seed,
                near=near,
                deadline=options["deadline"],
                check_sync=options["check_sync"],
                address=options["address"],
                profiled=profiled,
                recording=recording,
            ),
        )
    try:
        yield machine
    finally:
        machine.close()


def local_device(kind: str) -> str:
    """The torch device of a plan for one device of a kind: the CPU, or the first accelerator.

    A kind that a file declares without a base is whatever there is. Raises PlanError where torch
    has no accelerator, or one of another kind of the table.
    """
    if kind == "cpu":
        return "cpu"
    import torch

    found = f"torch {torch.__version__} has no accelerator"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        own = Gpu(name=properties.name, memory=float(properties.total_memory)).kind
        if own is None or kind in (own.chip, RESERVED):
            return "cuda:0"
        found = f"{properties.name}, of kind {own.chip!r}"
    finding = Finding(
        code="E406",
        what=f"this process has no device of kind {kind!r}",
        got=found,
        expected="a GPU of that kind that torch sees",
        fix="--devices cpu:1, or leave it out for the devices of this machine",
    )
    raise PlanError(finding)


def backend_joining(backend: str | None, address: str) -> str:
    """The backend of a run that joins a cluster."""
    if backend == "local":
        raise UsageError(
            Finding(
                code="E222",
                what=f"--address {address} joins a Ray cluster, --backend local uses none",
                fix="leave out one of the two",
            )
        )
    return "ray"


def require_one_kind(planned: Planned) -> None:
    """Raise UsageError for devices of several kinds: they are planned for, and not reserved."""
    if planned.cluster.groups:
        raise UsageError(
            Finding(
                code="E235",
                what=f"a run takes devices of one kind, --devices {planned.target.devices} has "
                f"{len(planned.cluster.groups)}",
                expected="one kind; plan, simulate and tune take several",
            )
        )


def require_engines(plan: Plan, address: str | None) -> None:
    """Raise UsageError where an engine's interpreter has no engine; on other machines, they say."""
    engines = {engine.name: engine.engine_plan.settings for engine in plan.engines}
    findings = missing_engines(engines) if address is None else []
    if findings:
        raise UsageError(*findings, summary=NOTHING)


def rooms_at(address: str, target: Target, *, wait: float) -> tuple[int, ...]:
    """How many devices each node of a running cluster has room for.

    A cluster that does not answer yet, or has too little room, is asked again for `wait` seconds.
    Raises the last error of a cluster that does not answer, or has no such device.
    """
    from rlflow.runtime.ray.cluster.joining import listens

    end = time.monotonic() + wait
    needed = 1 if target.devices is None else cluster_of(target, 1).count
    while True:
        late = time.monotonic() >= end
        if not late and not listens(address, POLL_SECONDS):
            time.sleep(POLL_SECONDS)
            continue
        try:
            found = _rooms_now(address, target)
        except RlflowError:
            if late:
                raise
        else:
            if late or sum(found) >= needed:
                return found
        time.sleep(POLL_SECONDS)


def _rooms_now(address: str, target: Target) -> tuple[int, ...]:
    from rlflow.runtime.ray.cluster.session import Session
    from rlflow.runtime.ray.pools import rooms

    kind = "cpu" if target.devices is None else cluster_of(target, 1).kind.chip
    with closing(Session.start(address=address, cpus=0)) as session:
        return rooms(session, kind=kind, threads=target.threads or 1)


def answering_at(address: str, cluster: Cluster) -> tuple[int, int]:
    """Devices of a running cluster's nodes that answer, and how many of those are free.

    Raises the error of a cluster that does not answer.
    """
    from rlflow.runtime.ray.cluster.session import Session
    from rlflow.runtime.ray.pools import answering_room

    with closing(Session.start(address=address, cpus=0)) as session:
        return answering_room(session, kind=cluster.kind.chip, threads=cluster.threads)
