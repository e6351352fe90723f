"""Rows of two hosts: one is lost, cut off, slow, has another clock; a full store, a new head."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from rlflow.runtime.record.spans import read_spans
from tests.chaos.hosts import APART, HEAD, HERE, STORE, Hosts
from tests.chaos.matrix import Expectation, Row
from tests.chaos.scene import SLOWER, Scene
from tests.conftest import Result
from tests.runtime.whole_runs import state

DAY = 86400
# Seconds after which Ray takes a host that does not answer for dead (five checks of 13 s), and a
# run has to be over; and those until a host that was cut off has ended what it ran.
TOLD, RETURNED = 120.0, 120.0


def iterations(scene: Scene) -> int:
    """How many iterations a run has logged."""
    file = scene.run_dir / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def begun(hosts: Hosts, *words: object, **environment: object) -> subprocess.Popen[str]:
    """A run that has a checkpoint, on the hosts."""
    started = hosts.run(*words, **environment)
    hosts.scene.wait_for(lambda: iterations(hosts.scene) >= 5, started, 180)
    return started


def told(hosts: Hosts, result: Result, within: float = 20.0) -> None:
    """One typed error and the line that goes on; nothing of the run is left on a host."""
    assert (1, 1) == (result.code, result.err.count("error[")), result.err[-3000:]
    assert re.search(r"error\[E7\d\d\]", result.err), result.err[-3000:]
    assert "continue with: rlflow run" in result.err, result.err[-3000:]
    left = hosts.only_ray(within)
    assert [] == left, left


def well(hosts: Hosts, result: Result, *words: object) -> None:
    """The run has ended as one without an accident; nothing of it is left on a host."""
    assert 0 == result.code, result.err[-3000:]
    assert hosts.scene.whole(*APART, *words) == state(hosts.scene.run_dir)
    left = hosts.only_ray()
    assert [] == left, left


def lost(scene: Scene) -> None:
    """All processes of a host are killed; it comes back, and the run goes on over both."""
    hosts = Hosts(scene)
    hosts.cluster()
    started = begun(hosts)
    hosts.kill(1)
    scene.fired += 1
    told(hosts, scene.ended(started, 30))
    hosts.ray(1)
    well(hosts, scene.ended(hosts.run(resume=True), 180))
    hosts.end()


def never_back(scene: Scene) -> None:
    """A host's cable is pulled and it dies: nothing says so, and the run is over in time."""
    hosts = Hosts(scene)
    hosts.cluster()
    started = begun(hosts)
    hosts.cut()
    hosts.kill(1)
    scene.fired += 1
    told(hosts, scene.ended(started, TOLD))
    hosts.end()
    scene.continues(*APART, like=APART)


def cut_off(seconds: float, scene: Scene) -> None:
    """A host's cable is out for so many seconds: the same bits, or an error and them after it."""
    hosts = Hosts(scene)
    hosts.cluster()
    started = begun(hosts)
    hosts.cut()
    time.sleep(1)
    before, until = iterations(scene), time.monotonic() + seconds - 1
    while started.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    assert before == iterations(scene), "the run has gone on without its other host"
    scene.fired += 1
    hosts.mend()
    result = scene.ended(started, TOLD)
    if seconds < 10 or result.code == 0:
        well(hosts, result)
        hosts.end()
        return
    told(hosts, result, RETURNED)
    hosts.end()
    scene.continues(*APART, like=APART)


def slow(scene: Scene) -> None:
    """20 ms each way, 20 megabits a second: the same bits, later."""
    hosts, few = Hosts(scene), ("--iterations", 6)
    wire = hosts.outside_started(sys.executable, HERE / "wire.py", 20, 20)
    assert wire.stdout is not None
    assert "made\n" == wire.stdout.readline()
    hosts.cluster()
    result = scene.ended(hosts.run(*few), 300)
    said = hosts.outside("ip", "-s", "link", "show", "here").split()
    assert int(said[said.index("TX:") + 7]) > 1e6, "little has gone over the cable"
    scene.fired += 1
    well(hosts, result, *few)
    hosts.end()
    wire.kill()


def ahead(scene: Scene) -> None:
    """A host began a day before the other: clocks of two are never compared."""
    hosts = Hosts(scene)
    hosts.cluster("unshare", "--time", "--monotonic", str(DAY), "--boottime", str(DAY))
    started = begun(hosts)
    own = Path(f"/proc/{hosts.running(1)[-1]}/timens_offsets").read_text().split()
    assert ["monotonic", str(DAY)] == own[:2]
    scene.fired += 1
    well(hosts, scene.ended(started, 120))
    hosts.end()


def jumps(point: str, by: int, words: tuple[object, ...], scene: Scene) -> None:
    """The wall clock of a process jumps: the same bits, and no action ends before it began."""
    said = {"RLFLOW_FAULT": f"{point}=clock:{by}@3", "RLFLOW_FAULT_RANK": 1}
    started = scene.command(*words, **said)
    seen: set[str] = set()
    until = time.monotonic() + 180 * SLOWER
    # What ranks say lies in the session of Ray, which ends with the run.
    while started.poll() is None and time.monotonic() < until:
        seen.update(clocks(point, map(read, scene.temporary.rglob("worker-*.err"))))
        time.sleep(0.05)
    result = scene.ended(started, 20)
    assert 0 == result.code, result.err[-3000:]
    seen.update(clocks(point, [result.err]))
    jumped = [time.mktime(time.strptime(each)) - time.time() for each in seen]
    assert any(abs(each - by) < DAY / 2 for each in jumped), seen
    scene.fired += 1
    assert scene.whole(*words) == state(scene.run_dir)
    spans = read_spans(scene.run_dir / "spans")
    assert all(0 <= span.start <= span.end < DAY / 2 for span in spans)


def clocks(point: str, texts: Iterable[str]) -> list[str]:
    """What the clocks of processes say that have passed a failpoint."""
    return re.findall(rf"failpoint {point}: the clock says (.*)", "\n".join(texts))


def read(file: Path) -> str:
    """What a file holds that may be gone."""
    try:
        return file.read_text(errors="replace")
    except FileNotFoundError:
        return ""


FILL = f"""
import numpy, ray, time
ray.init(address="{HEAD}", logging_level="ERROR", log_to_driver=False)
held = [ray.get(ray.put(numpy.ones(9_000_000, dtype=numpy.uint8))) for _ in range(20)]
print(sum(each.nbytes for each in held), flush=True)
time.sleep(600)
"""


def full(scene: Scene) -> None:
    """Another has taken all of a host's object store, and holds it: what is put goes to disk."""
    hosts = Hosts(scene)
    hosts.cluster()
    other = hosts.on(1, sys.executable, "-c", FILL)
    assert other.stdout is not None
    held = other.stdout.readline()
    assert held, other.communicate()
    assert int(held) > 2 * STORE, "the store is not full"
    scene.fired += 1
    well(hosts, scene.ended(hosts.run(), 240))
    hosts.end()


def new_head(scene: Scene) -> None:
    """The head's GCS is killed and another is there, which knows nothing: one error in time."""
    hosts = Hosts(scene)
    hosts.cluster()
    started = begun(hosts)
    mine = scene.processes()
    (gcs,) = [pid for pid in hosts.running(0) if "/gcs/gcs_server" in mine[pid]]
    os.kill(gcs, signal.SIGKILL)
    scene.fired += 1
    time.sleep(1)
    hosts.ray(0)
    told(hosts, scene.ended(started, TOLD), RETURNED)
    hosts.end()
    scene.continues(*APART, like=APART)


def same_head(scene: Scene) -> None:
    """The head's GCS is killed and is back after 5 s with what it kept on disk: the same bits."""
    hosts = Hosts(scene)
    kept = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(scene.folder / "kept")}
    hosts.ray(0, **kept)
    hosts.ray(1)
    started = begun(hosts, RAY_gcs_rpc_server_reconnect_timeout_s=int(60 * SLOWER))
    mine = scene.processes()
    (gcs,) = [pid for pid in hosts.running(0) if "/gcs/gcs_server" in mine[pid]]
    words = Path(f"/proc/{gcs}/cmdline").read_text().split("\0")[:-1]
    os.kill(gcs, signal.SIGKILL)
    scene.fired += 1
    time.sleep(5)
    assert started.poll() is None, started.communicate()[1][-3000:]
    hosts.on(0, *words, **kept)
    well(hosts, scene.ended(started, 240))
    hosts.end()


def host_rows() -> Iterator[Row]:
    """All rows of this file."""
    made: tuple[tuple[str, str, Expectation, Callable[[Scene], None]], ...] = (
        ("K11 lost", "all of a host is killed; it comes back", "error", lost),
        ("K11 silent", "a host is cut off and dies", "error", never_back),
        ("K11 cut 5", "a host is cut off for 5 s", "goes on", partial(cut_off, 5)),
        ("K11 cut 60", "a host is cut off for 60 s", "error", partial(cut_off, 60)),
        ("K11 slow", "20 ms and 20 megabits a second between hosts", "goes on", slow),
        ("K11 new head", "the head's GCS is killed, another is there", "error", new_head),
        ("K11 same head", "the head's GCS is killed, with its store on disk", "goes on", same_head),
        ("K16 hosts", "the clock of a host is a day ahead of the other's", "goes on", ahead),
        ("N6 store", "the object store of a host is full", "goes on", full),
    )
    for name, fault, expect, inject in made:
        yield Row(id=name, fault=fault, expect=expect, inject=inject, seconds=600, needs="hosts")
    for by in (DAY, -DAY):
        yield Row(
            id=f"K16 driver {by}",
            fault=f"the wall clock of the driver jumps by {by} s",
            expect="goes on",
            inject=partial(jumps, "run:iteration", by, ()),
        )
    yield Row(
        id="K16 rank",
        fault=f"the wall clock of a rank jumps by {-DAY} s",
        expect="goes on",
        seconds=180,
        inject=partial(jumps, "rank:run", -DAY, APART[:4]),
        needs="ray",
    )
