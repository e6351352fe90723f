"""How this process gets to a Ray cluster: an embedded one of a single node, or a running one.

`ray.init` alone starts seven processes, five of them Python, and takes twice as long: the
dashboard, the autoscaler's monitor and the log monitor do nothing for a run. They are left
out by replacing what starts them; where a version of Ray has no such part, nothing is
replaced and the start is slower. Knows nothing of pools or plans.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

from rlflow.runtime.ray.cluster.environment import kept_variables
from rlflow.runtime.ray.cluster.niceness import NICENESS, VARIABLE
from rlflow.runtime.ray.cluster.reaper import MARK
from rlflow.scheduler.devices.cluster import machine_memory

LOOPBACK = "127.0.0.1"
STORE_SHARE = 0.2
STORE_LEAST = 100e6
STORE_MOST = 64e9
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where Ray keeps its objects
POLL = 0.01
REGISTERED_SECONDS = 10.0


def marks(session: str) -> dict[str, str]:
    """Variables that every process of the cluster inherits, and this one has only meanwhile."""
    return {
        MARK: session,
        "OMP_NUM_THREADS": "1",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_task_events_report_interval_ms": "0",
        VARIABLE: os.environ.get(VARIABLE, NICENESS),
    }


def key_variables() -> dict[str, str]:
    """Variables that hold the key to the cluster, made for it and written nowhere."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def start(directory: Path, *, cpus: int, gpus: int) -> None:
    """Start a cluster on the loopback and connect to it; its files are below `directory`.

    The kernel ends the cluster with the thread that calls this.
    """
    with lean(), quiet():
        ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=gpus,
            object_store_memory=store_size(machine_memory(), shared_memory()),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address=LOOPBACK,
            _temp_dir=str(directory),
        )


def connect(address: str) -> None:
    """Connect to a running cluster."""
    with quiet():
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")


def store_size(memory: float, shared: float) -> int:
    """Bytes of the object store: a share of the memory, within the shared memory there is."""
    wanted = min(STORE_SHARE * memory, STORE_MOST)
    fits = 0.8 * shared
    return int(max(STORE_LEAST, min(wanted, fits) if fits >= STORE_LEAST else wanted))


def shared_memory() -> float:
    """Bytes of shared memory that are free; 0 where there is none."""
    try:
        return float(shutil.disk_usage(SHARED_MEMORY).free)
    except OSError:
        return 0.0


@contextlib.contextmanager
def lean() -> Iterator[None]:
    """Within it, nodes start without the parts that a run has no use for."""
    import ray._private.node
    import ray._private.ray_constants

    node = ray._private.node.Node
    starts = getattr(node, "start_ray_processes", _nothing)
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (node, "start_api_server", _no_dashboard),
            (node, "start_monitor", _nothing),
            (node, "start_log_monitor", _nothing),
            (node, "start_ray_processes", _until_registered(starts)),
            # Without this Ray replaces a loopback address by one that others can reach.
            (ray._private.ray_constants, "ENABLE_RAY_CLUSTER", False),
        ):
            stack.enter_context(_replaced(owner, name, value))
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within it, a driver connects that prints nothing about workers and keeps its debugger."""
    import ray._private.worker

    silent = _replaced(ray._private.worker, "listen_error_messages", _nothing)
    with silent, kept_variables("PYTHONBREAKPOINT"):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    if not hasattr(owner, name):
        yield
        return
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for a part that is left out."""


def _no_dashboard(node: Any, **_: Any) -> None:
    node._webui_url = ""


def _until_registered(start: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wait for the node in steps of milliseconds; Ray itself looks once a second."""

    def started(node: Any) -> None:
        start(node)
        end = time.monotonic() + REGISTERED_SECONDS
        while time.monotonic() < end:
            known = node.get_gcs_client().get_all_node_info(timeout=REGISTERED_SECONDS)
            if node.node_id in {found.hex() for found in known}:
                return
            time.sleep(POLL)

    return started
