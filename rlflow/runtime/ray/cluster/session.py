"""A session: a Ray cluster that this process uses, its own or one that is running already.

An embedded cluster ends with its session, and with this process however that ends; of a
running one only what the session started is released. There is one session at a time in a
process. This file knows nodes and their resources, no plan and no actors.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray._private.state
import ray._private.worker

from rlflow.errors import Finding, RunError
from rlflow.runtime.ray.cluster import alive, clusters
from rlflow.runtime.ray.cluster.causes import cause_of
from rlflow.runtime.ray.cluster.environment import ray_settings, variables
from rlflow.runtime.ray.cluster.joining import listens, require_head
from rlflow.runtime.ray.cluster.process_lifetime import Reaper, a_word_if_gone
from rlflow.runtime.ray.places import address_key
from rlflow.runtime.record.stages import stage

LONGEST_TEMP = 40
ASK_SECONDS = 10.0
CLOSE_SECONDS = 15.0
PROBES = 3
# Ray ends a driver that has not reached the head node for so long; we say what happened first.
# Who has set it has a head that keeps what it knows on disk, and comes back: it is waited for.
PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
LONGEST_AWAY = 600.0
ENDED = (
    "this process ended while it connected: it was killed, or Ray ended it as a process of its "
    "cluster had died"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A machine of the cluster, or what Ray takes for one; resources in total and free.

    Its own process of Ray listens at `manager`, `host:port`.
    """

    id: str
    address: str
    manager: str
    hostname: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    alive: bool


class Session:
    """Made by `start`; closing it twice, or after the cluster has died, does no harm."""

    def __init__(self, address: str | None) -> None:
        self.id = secrets.token_hex(8)
        self.address = address
        self.directory = None if address is not None else _directory()
        self._reaper = None if self.directory is None else Reaper(self.id, self.directory)
        self._settings = contextlib.ExitStack()
        self._away = Away(_patience())
        self._keeper: Keeper | None = None
        self._closed = False

    @property
    def embedded(self) -> bool:
        """Whether the cluster was started for this session."""
        return self.address is None

    @classmethod
    def start(
        cls, *, address: str | None, cpus: int, gpus: int = 0, deadline: float = 30.0
    ) -> Session:
        """Join the cluster at `host:port`, or start one of so many CPUs and GPUs.

        Returns within `deadline` seconds. Raises UsageError for what is no address, RunError
        where no Ray cluster answers there or none could be started.
        """
        end = time.monotonic() + deadline
        if ray.is_initialized():
            raise RunError(
                Finding(
                    code="E770",
                    what="this process uses a Ray cluster already",
                    expected="one session at a time",
                    fix="ray.shutdown()",
                )
            )
        if address is not None:
            require_head(address, deadline / 2)
        session = cls(address)
        try:
            with stage("starting Ray" if address is None else f"joining Ray at {address}"):
                session._begin(cpus, gpus, end - time.monotonic())
        except BaseException:
            session.close()
            raise
        alive.watch(session._gone)
        return session

    def nodes(self) -> tuple[RayNode, ...]:
        """The nodes of the cluster by address, the dead among them; raises RunError if it is."""
        alive.require_cluster()
        return alive.bounded(_nodes, ASK_SECONDS, doing="asking Ray for its nodes")

    def close(self) -> None:
        """Let go of the cluster; an embedded one ends, and no process of it is left."""
        if self._closed:
            return
        self._closed = True
        alive.forget(self._gone)
        if self._keeper is not None:
            self._keeper.end(CLOSE_SECONDS)
        if self._reaper is not None:
            self._reaper.finish(CLOSE_SECONDS)
        self._settings.close()

    def _begin(self, cpus: int, gpus: int, seconds: float) -> None:
        """Connect in a thread of its own, and wait for that."""
        settings, marks = {PATIENCE: f"{max(LONGEST_AWAY, 2 * self._away.patience):.0f}"}, {}
        if self.directory is not None:
            directory = self.directory
            settings |= clusters.key_variables()
            marks = clusters.marks(self.id)
            self._keeper = Keeper(lambda: clusters.start(directory, cpus=cpus, gpus=gpus))
        else:
            address = str(self.address)
            self._keeper = Keeper(lambda: clusters.connect(address))
        self._settings.enter_context(ray_settings(settings))
        # Who has the marks is killed with the session; whoever says what became of it has none.
        with a_word_if_gone(self._refusal(ENDED).render() + "\n"), variables(marks):
            self._keeper.begin(self._refusal, seconds)
        _restore_signals()

    def _refusal(self, got: str) -> RunError:
        if self.embedded:
            what, code, fix = "no Ray cluster could be started on this machine", "E770", ""
        else:
            what, code = f"the Ray cluster at {self.address} cannot be joined", "E771"
            fix = "ray status --address " + str(self.address)
        return RunError(
            Finding(code=code, what=what, got=got, expected="a cluster in time", fix=fix)
        )

    def _gone(self) -> str:
        """What of the cluster is dead, in words; nothing if it lives."""
        if self.address is None:
            return _dead_parts()
        for attempt in range(PROBES):
            if listens(self.address, ASK_SECONDS / PROBES):
                self._away.back()
                return ""
            time.sleep(0.5 * (attempt < PROBES - 1))
        if self._away.may_return(time.monotonic()):
            return ""
        return f"nothing answers at {self.address} any more"


class Away:
    """Since when a head node does not answer, and whether one that is away so long may return."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._since: float | None = None

    def back(self) -> None:
        """It answers."""
        self._since = None

    def may_return(self, now: float) -> bool:
        """It does not answer, now; False where it has not for as long as it is waited for."""
        self._since = now if self._since is None else self._since
        return now - self._since < self.patience


class Keeper(threading.Thread):
    """Connects to Ray and disconnects from it in one thread that lives as long as the session.

    The kernel ends the processes of an embedded cluster together with the thread that
    started them. And a wait for Ray in a thread is one that can be given up.
    """

    def __init__(self, connect: Callable[[], None]) -> None:
        super().__init__(name="ray session", daemon=True)
        self._connect = connect
        self._error: BaseException | None = None
        self._connected = threading.Event()
        self._closing = threading.Event()

    def begin(self, refusal: Callable[[str], RunError], seconds: float) -> None:
        """Connect within so many seconds, or raise the refusal for the reason."""
        self.start()
        if not self._connected.wait(max(0.0, seconds)):
            raise refusal(f"no answer from Ray within {seconds:.0f} s")
        if self._error is not None:
            raise refusal(cause_of(self._error)) from self._error

    def end(self, seconds: float) -> None:
        """Disconnect, waiting no longer than this; a thread that hangs is left behind."""
        self._closing.set()
        if self.ident is not None:
            self.join(seconds)

    def run(self) -> None:
        """Connect, stay until told to end, disconnect."""
        try:
            self._connect()
        except BaseException as error:  # handed to the thread that waits
            self._error = error
        self._connected.set()
        if self._error is None:
            self._closing.wait()
        with contextlib.suppress(Exception):
            ray.shutdown()


def _patience() -> float:
    """Seconds that a head node may be away by the environment; 0 where nothing is said."""
    said = os.environ.get(PATIENCE, "")
    return float(said) if said.isdigit() else 0.0


def _directory() -> Path:
    """A directory of a session, short because a socket's path has at most 107 bytes."""
    usual = tempfile.gettempdir()
    root = usual if len(usual) <= LONGEST_TEMP else "/tmp"  # noqa: S108  made with a random name
    return Path(tempfile.mkdtemp(prefix="rlflow-", dir=root))


def _nodes() -> tuple[RayNode, ...]:
    ask: Callable[[], Mapping[str, Any]] = getattr(
        ray._private.state, "available_resources_per_node", dict
    )
    free = ask()
    found = [
        RayNode(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            manager=_listening(node["NodeManagerAddress"], node["NodeManagerPort"]),
            hostname=node["NodeManagerHostname"],
            total=dict(node["Resources"]),
            free=dict(free.get(node["NodeID"], {} if free else node["Resources"])),
            alive=node["Alive"],
        )
        for node in ray.nodes()
    ]
    return tuple(sorted(found, key=lambda n: (address_key(n.address), n.hostname, n.id)))


def _listening(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _dead_parts() -> str:
    """The processes of an embedded cluster that have ended."""
    node = ray._private.worker._global_node
    if node is None:
        return "this process has disconnected from it"
    dead = [
        f"its {kind} ended (process {info.process.pid}, status {info.process.returncode})"
        for kind, running in node.all_processes.items()
        for info in running
        if kind in ("gcs_server", "raylet") and info.process.poll() is not None
    ]
    return ", ".join(dead)


def _restore_signals() -> None:
    """Put this process's own handler of SIGTERM back: Ray's prints a stack trace."""
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
