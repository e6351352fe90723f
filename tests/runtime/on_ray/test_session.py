"""Sessions: an embedded cluster on the loopback that leaves nothing behind, however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from ray import cloudpickle

from rlflow.errors import RunError, UsageError
from rlflow.runtime.ray.cluster import clusters, reaper
from rlflow.runtime.ray.cluster.deadline import wait
from rlflow.runtime.ray.cluster.process_lifetime import session_processes
from rlflow.runtime.ray.cluster.session import Session
from tests.conftest import ROOT
from tests.runtime.on_ray.driver import STOPPED

pytestmark = pytest.mark.ray
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it

DRIVER = Path(__file__).with_name("driver.py")
LISTEN = "0A"
LOOPBACKS = {"0100007F", "0000000000000000FFFF00000100007F"}  # IPv4, and IPv4 within IPv6


@pytest.fixture
def start():
    """Start sessions; all are closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def begin(**options):
            words = {"address": None, "cpus": 1, **options}
            return stack.enter_context(contextlib.closing(Session.start(**words)))

        yield begin


@ray.remote
class Sleeper:
    def ready(self):
        return os.getpid()

    def niceness(self):
        return os.getpriority(os.PRIO_PROCESS, 0)

    def sleep(self):
        time.sleep(300)


def command_lines(session):
    found = {}
    for pid in session_processes(session.id, session.directory):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            found[pid] = b" ".join(words).decode()
    return found


def listening(pids):
    """Addresses of this machine at which processes listen, as /proc has them."""
    sockets = {
        str(descriptor.readlink())
        for pid in pids
        for descriptor in Path(f"/proc/{pid}/fd").iterdir()
        if descriptor.is_symlink()
    }
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    return {
        line[1].partition(":")[0]
        for line in lines
        if line[3] == LISTEN and f"socket:[{line[9]}]" in sockets
    }


def test_an_embedded_cluster_has_one_node_on_the_loopback(start, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    before = dict(os.environ)

    session = start(cpus=3)

    (node,) = session.nodes()
    assert ("127.0.0.1", True) == (node.address, node.alive)
    assert (3.0, 3.0) == (node.total["CPU"], node.free["CPU"])
    assert socket.gethostname() == node.hostname
    found = listening({os.getpid(), *session_processes(session.id, session.directory)})
    assert found
    assert found <= LOOPBACKS
    running = command_lines(session).values()
    assert not [line for line in running if "dashboard.py" in line or "monitor.py" in line]
    session.close()
    assert set() == session_processes(session.id, session.directory)
    assert not session.directory.exists()
    assert [] == list(tmp_path.iterdir())
    assert before == dict(os.environ)


@pytest.mark.slow
def test_a_second_session_needs_the_first_one_closed(start):
    first = start()

    with pytest.raises(RunError, match="E770"):
        start()
    first.close()
    first.close()
    second = start()

    assert first.id != second.id
    assert 1 == len(second.nodes())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")  # Ray's own
def test_a_cluster_that_dies_is_reported_and_can_still_be_closed(start):
    session = start()
    sleeper = Sleeper.options(num_cpus=0).remote()
    assert os.getpriority(os.PRIO_PROCESS, 0) + 5 == ray.get(sleeper.niceness.remote())
    wait([sleeper.ready.remote()], 60, doing="starting")
    head = [pid for pid, line in command_lines(session).items() if "gcs_server" in line.split()[0]]

    os.kill(head[0], signal.SIGKILL)
    with pytest.raises(RunError) as raised:
        wait([sleeper.sleep.remote()], 60, doing="sleeping")

    assert "E777" == raised.value.findings[0].code
    assert f"gcs_server ended (process {head[0]}" in raised.value.findings[0].got
    session.close()
    assert set() == session_processes(session.id, session.directory)


class Driver:
    """A controller in a process of its own, with workers that cannot let go by themselves."""

    def __init__(self, address, end):
        self.end = end
        self.process = subprocess.Popen(
            [sys.executable, str(DRIVER), address],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def finish(self):
        """End it in its way once its workers are up; its session, directory and processes."""
        session, directory, *pids = self.process.stdout.readline().split()
        self.process.send_signal(getattr(signal, self.end))
        self.process.communicate(timeout=60)
        return session, Path(directory), set(map(int, pids))


@pytest.fixture(scope="module")
def drivers(two_nodes):
    """Controllers by cluster and end; they start side by side."""
    embedded = {("-", end): Driver("-", end) for end in ("SIGKILL", "SIGTERM")}
    started = embedded | {("two nodes", "SIGKILL"): Driver(two_nodes, "SIGKILL")}
    yield started
    for driver in started.values():
        driver.process.kill()
        driver.process.communicate()


def living(pids):
    return {pid for pid in pids if reaper.parent_of(pid) is not None}


def left_after(seconds, look):
    """What `look` still finds after so long; nothing as soon as it finds nothing."""
    end = time.monotonic() + seconds
    while (left := look()) and time.monotonic() < end:
        time.sleep(0.1)
    return left


@pytest.mark.slow
@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM"])
def test_nothing_is_left_of_an_embedded_cluster_however_its_controller_ends(end, drivers):
    driver = drivers["-", end]

    session, directory, pids = driver.finish()

    codes = {"SIGKILL": -signal.SIGKILL, "SIGTERM": STOPPED}
    assert codes[end] == driver.process.returncode
    assert 3 == len(pids)
    assert set() == left_after(15, lambda: session_processes(session, directory) | living(pids))
    assert not left_after(15, directory.exists)


@pytest.mark.slow
def test_workers_on_a_running_cluster_end_with_their_controller(drivers):
    _, directory, pids = drivers["two nodes", "SIGKILL"].finish()

    assert Path("None") == directory
    assert 3 == len(pids)
    assert set() == left_after(15, lambda: living(pids))


def test_leaving_a_running_cluster_releases_what_was_taken_and_no_more(join):
    session = join()
    nodes = session.nodes()
    sleeper = Sleeper.options(num_cpus=2).remote()
    (pid,) = wait([sleeper.ready.remote()], 60, doing="starting")

    session.close()

    assert set() == left_after(15, lambda: living({pid}))
    again = join()
    assert [node.id for node in nodes] == [node.id for node in again.nodes()]
    free = lambda: [node for node in again.nodes() if node.free.get("CPU") != 2.0]  # noqa: E731
    assert [] == left_after(10, free)


def test_an_address_without_a_cluster_is_an_error(start):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        with pytest.raises(RunError, match="E771"):
            start(address=f"127.0.0.1:{held.getsockname()[1]}")
    with pytest.raises(UsageError, match="E771"):
        start(address="somewhere")

    assert not ray.is_initialized()


def test_the_object_store_fits_the_shared_memory():
    assert 2e9 == clusters.store_size(10e9, 100e9)
    assert 1.6e9 == clusters.store_size(10e9, 2e9)
    assert 2e9 == clusters.store_size(10e9, 64e6)
    assert 64e9 == clusters.store_size(2e12, 1e12)
