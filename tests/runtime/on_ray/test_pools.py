"""Pools: devices reserved or a clear error, and one order of ranks whatever came first."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle

from rlflow.errors import PlanError, RunError
from rlflow.runtime.ray.cluster.deadline import wait
from rlflow.runtime.ray.pools import (
    Report,
    device_map,
    own_report,
    reserve,
    stable_order,
)

pytestmark = pytest.mark.ray
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it


@ray.remote
class Rank:
    def report(self):
        return own_report()

    def visible(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.fixture
def take(session):
    """Reserve devices of the embedded cluster; released at the end of the test."""
    with contextlib.ExitStack() as stack:

        def reserved(count, kind="cpu", threads=1, deadline=20):
            made = reserve(session, count, kind=kind, threads=threads, deadline=deadline)
            stack.callback(made.release)
            return made

        yield reserved


def started(reservation):
    """A process in every slot."""
    return [
        Rank.options(
            scheduling_strategy=slot.strategy, num_cpus=slot.cpus, num_gpus=slot.gpus
        ).remote()
        for slot in reservation.slots
    ]


def asked(actors, verb):
    return wait([getattr(actor, verb).remote() for actor in actors], 60, doing="asking")


@pytest.mark.slow
def test_a_slot_is_a_bundle_of_threads_on_a_node(take):
    reservation = take(2, threads=2)

    assert [("127.0.0.1", 0, 2.0, 0.0), ("127.0.0.1", 1, 2.0, 0.0)] == [
        (slot.address, slot.bundle, slot.cpus, slot.gpus) for slot in reservation.slots
    ]
    reports = asked(started(reservation), "report")
    assert 2 == len({each.pid for each in reports})
    assert {("127.0.0.1", socket.gethostname(), "")} == {
        (each.address, each.hostname, each.device) for each in reports
    }


@pytest.mark.slow
def test_accelerators_come_one_a_process_and_are_numbered_by_their_id(take):
    reservation = take(2, kind="h100")

    actors = started(reservation)

    reports = asked(actors, "report")
    assert {"0", "1"} == {each.device for each in reports}
    assert [each.device for each in reports] == asked(actors, "visible")
    order = stable_order(reports, [slot.bundle for slot in reservation.slots])
    assert ["0", "1"] == [reports[place].device for place in order]


def test_an_accelerator_comes_with_the_cores_of_its_threads(take):
    reservation = take(2, kind="h100", threads=2)

    assert [(2.0, 1.0)] * 2 == [(slot.cpus, slot.gpus) for slot in reservation.slots]


def test_released_devices_can_be_taken_again(take):
    for _ in range(3):
        reservation = take(4)
        reservation.release()
        reservation.release()

    assert 4 == len(take(4).slots)


def test_more_than_the_cluster_has_is_refused_at_once(take):
    with pytest.raises(PlanError) as raised:
        take(5, deadline=3600)

    (finding,) = raised.value.findings
    assert "E772" == finding.code
    assert "need 5 cpu devices, the Ray cluster has room for 4" in finding.what
    assert "node 127.0.0.1" in finding.got
    assert "--devices cpu:4" == finding.fix
    with pytest.raises(PlanError, match="E772"):
        take(1, threads=5, deadline=3600)
    with pytest.raises(PlanError, match="E772"):
        take(3, kind="h100", deadline=3600)


def test_devices_that_stay_taken_name_who_holds_them(take):
    take(3)

    with pytest.raises(RunError) as raised:
        take(2, deadline=0.3)

    (finding,) = raised.value.findings
    assert "E774" == finding.code
    assert "2 cpu devices were not free within 0.3 s" == finding.what
    assert "4 CPU + 2 GPU): 1 free" in finding.got
    assert f"held by placement group 'rlflow {os.getpid()}@" in finding.got
    assert "3 times 1 CPU, on 127.0.0.1" in finding.got
    assert "--devices cpu:1" == finding.fix


addresses = st.one_of(
    st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map(str), st.sampled_from(["node-a", "b"])
)
reports = st.builds(
    Report,
    address=addresses,
    hostname=st.sampled_from(["vm", "vm-2", "vm-10"]),
    device=st.sampled_from(["", "0", "1", "2", "10", "0,1", "GPU-1a"]),
    pid=st.integers(1, 10**6),
)
places = st.tuples(reports, st.integers(0, 9))


@pytest.mark.slow
@given(st.lists(places, unique_by=lambda place: place[0].pid), st.randoms(use_true_random=False))
def test_the_order_does_not_depend_on_the_order_of_asking(found, random):
    shuffled = random.sample(found, len(found))

    ranked = [
        [asked[place] for place in stable_order(*zip(*asked, strict=True))] if asked else []
        for asked in (found, shuffled)
    ]

    assert ranked[0] == ranked[1]
    assert sorted(found, key=repr) == sorted(ranked[0], key=repr)


@given(st.lists(st.integers(0, 2**32 - 1), unique=True), st.lists(st.integers(0, 15), unique=True))
def test_ranks_go_by_node_and_then_by_device(nodes, devices):
    given = [
        Report(address=f"{n >> 24}.{n >> 16 & 255}.{n >> 8 & 255}.{n & 255}", hostname="vm",
               device=str(d), pid=n)
        for n in nodes
        for d in devices
    ]  # fmt: skip

    order = stable_order(given, [0] * len(given))

    found = [(given[place].pid, int(given[place].device)) for place in order]
    assert sorted((n, d) for n in nodes for d in devices) == found


def test_the_map_shows_a_line_a_rank():
    found = [
        Report(address="10.0.0.10", hostname="b", device="0", pid=7),
        Report(address="10.0.0.9", hostname="a", device="", pid=12345),
    ]

    assert [
        "rank  device  node       host  process",
        "0     cpu     10.0.0.9   a     12345",
        "1     0       10.0.0.10  b     7",
    ] == device_map(found, stable_order(found, [0, 0]))
