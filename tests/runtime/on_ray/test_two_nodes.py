"""Pools over two nodes: stable ranks, clear refusals, and a node that dies."""

from __future__ import annotations

import os
import sys
import time

import pytest
import ray
from ray import cloudpickle

from rlflow.errors import PlanError, RunError
from rlflow.runtime.ray.cluster.deadline import wait
from rlflow.runtime.ray.pools import own_report, reserve, stable_order

pytestmark = pytest.mark.ray
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it


@ray.remote
class Rank:
    def report(self):
        return own_report()

    def sleep(self):
        time.sleep(300)


def started(slots):
    return [
        Rank.options(scheduling_strategy=slot.strategy, num_cpus=slot.cpus).remote()
        for slot in slots
    ]


@pytest.mark.slow
def test_ranks_come_out_in_the_same_order_whatever_started_first(join):
    session = join()
    assert ["127.0.0.2", "127.0.0.10"] == [node.address for node in session.nodes()]
    reservation = reserve(session, 4, kind="cpu", threads=1, deadline=20)

    slots = reservation.slots
    backwards = slots[::-1]
    reports = wait([rank.report.remote() for rank in started(backwards)], 120, doing="asking")

    by_node = ["127.0.0.2", "127.0.0.2", "127.0.0.10", "127.0.0.10"]
    assert by_node == [slot.address for slot in slots]
    assert by_node[::-1] == [found.address for found in reports]
    order = stable_order(reports, [slot.bundle for slot in backwards])
    assert (3, 2, 1, 0) == order
    reservation.release()


def test_a_pool_stays_on_the_first_node_that_has_room_for_all_of_it(join):
    session = join()
    one = reserve(session, 1, kind="cpu", threads=1, deadline=20)
    two = reserve(session, 2, kind="cpu", threads=1, deadline=20)

    assert ["127.0.0.2"] == [slot.address for slot in one.slots]
    assert ["127.0.0.10"] * 2 == [slot.address for slot in two.slots]
    with pytest.raises(RunError) as raised:
        reserve(session, 2, kind="cpu", threads=1, deadline=0.3)

    got = raised.value.findings[0].got.splitlines()
    assert got[0].startswith("node 127.0.0.2")
    assert got[0].endswith("1 free")
    assert got[1].startswith("node 127.0.0.10")
    assert got[1].endswith("0 free")
    holder = f"held by placement group 'rlflow {os.getpid()}@"
    assert [True, True] == [line.startswith(holder) for line in got[2:]]
    one.release()
    two.release()


def test_more_than_both_nodes_have_and_a_kind_that_neither_has(join):
    session = join()

    with pytest.raises(PlanError) as too_many:
        reserve(session, 5, kind="cpu", threads=1, deadline=3600)
    with pytest.raises(PlanError) as too_wide:
        reserve(session, 2, kind="cpu", threads=3, deadline=3600)
    with pytest.raises(PlanError) as no_such:
        reserve(session, 1, kind="h100", threads=1, deadline=3600)

    assert "room for 4" in too_many.value.findings[0].what
    assert "room for 0" in too_wide.value.findings[0].what
    (finding,) = no_such.value.findings
    assert "E773" == finding.code
    assert "no node of the Ray cluster has a device of kind 'h100'" in finding.what
    assert "127.0.0.2" in finding.got
    assert "127.0.0.10" in finding.got


@pytest.mark.slow
def test_a_worker_whose_node_dies_is_lost_with_its_node(nodes, join):
    nodes.ask("start 127.0.0.30")
    session = join()
    mortal = next(node for node in session.nodes() if node.address == "127.0.0.30")
    there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(mortal.id, soft=False)
    rank = Rank.options(num_cpus=0, scheduling_strategy=there).remote()
    (found,) = wait([rank.report.remote()], 60, doing="asking")
    assert "127.0.0.30" == found.address

    sleeping = rank.sleep.remote()
    nodes.ask("kill 127.0.0.30")
    with pytest.raises(RunError) as raised:
        wait([sleeping], 60, doing="sleeping", who={0: "rank 0"})

    (finding,) = raised.value.findings
    assert "E776" == finding.code
    assert f"its process {found.pid} on node 127.0.0.30" in finding.got
    assert 2 == sum(node.alive for node in session.nodes() if node.id != mortal.id)
