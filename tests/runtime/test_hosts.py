"""Replicas of engines over hosts: where their parts are, and what is refused."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph
from rlflow.graph.user.engines import VLLM, SGLang
from rlflow.runtime.worker.hosts import Site, replica_hosts
from rlflow.runtime.worker.world import World
from rlflow.scheduler.plan.instance import Instance
from rlflow.scheduler.plan.plan import Plan

pytestmark = pytest.mark.torch

MODEL = rf.Model("actor", "nowhere")
ADAPTED = rf.Model("actor", "nowhere", optimizer=rf.AdamW(lr=1e-3), lora=rf.LoRA(rank=2))


def engine(devices, tp, options=None):
    return Instance(
        name="actor@gen",
        model="actor",
        pool="gen",
        devices=tuple(devices),
        uses=("rollout",),
        trained=False,
        tp=tp,
        options=options or SGLang(),
    )


def sites(hosts):
    """A site for each device, by the name of its host."""
    return {d: Site(address=host, number=hosts[:d].count(host)) for d, host in enumerate(hosts)}


@pytest.mark.parametrize(
    ("hosts", "devices", "tp", "wanted"),
    [
        ("aaaa", [0, 1, 2, 3], 4, [[(0, 1, 2, 3)]]),
        ("aabb", [0, 1, 2, 3], 2, [[(0, 1)], [(2, 3)]]),
        ("aabb", [0, 1, 2, 3], 4, [[(0, 1), (2, 3)]]),
        ("aaabbb", [1, 2, 3, 4], 4, [[(1, 2), (3, 4)]]),
        ("aabbccdd", [*range(8)], 4, [[(0, 1), (2, 3)], [(4, 5), (6, 7)]]),
    ],
)
def test_the_parts_of_a_replica(hosts, devices, tp, wanted):
    assert wanted == replica_hosts(engine(devices, tp), MODEL, sites([*hosts]))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3))
def test_even_parts_have_all_devices_in_order(each, hosts, replicas, before):
    shared = [f"{replica}.{host}" for replica in range(replicas) for host in range(hosts)]
    names = ["before"] * before + [name for name in shared for _ in range(each)]
    devices = range(before, len(names))
    found = replica_hosts(engine(devices, each * hosts), MODEL, sites(names))
    assert [*devices] == [device for replica in found for part in replica for device in part]
    assert replicas == len(found)
    assert {each} == {len(part) for replica in found for part in replica}


@pytest.mark.parametrize(
    ("options", "hosts", "tp", "code"),
    [
        (SGLang(), "aaab", 4, "E674"),
        (SGLang(updates="memory"), "aabb", 4, "E671"),
        (SGLang(updates="disk"), "aabb", 4, "E671"),
        (VLLM(), "aabb", 4, "E672"),
    ],
)
def test_what_cannot_lie_so(options, hosts, tp, code):
    with pytest.raises(PlanError) as caught:
        replica_hosts(engine(range(4), tp, options), MODEL, sites([*hosts]))
    assert [code] == [finding.code for finding in caught.value.findings]


def test_a_shared_directory_reaches_every_host():
    options = SGLang(updates="disk", updates_dir="/shared")
    found = replica_hosts(engine(range(4), 4, options), MODEL, sites([*"aabb"]))
    assert [[(0, 1), (2, 3)]] == found


@pytest.mark.parametrize(
    ("model", "drafter", "what"),
    [
        (ADAPTED, None, "adapters (lora=) cannot reach actor@gen by group"),
        (MODEL, "small", "drafter 'small' cannot reach actor@gen by group"),
    ],
)
def test_adapters_and_drafters_reach_one_host(model, drafter, what):
    """Where the run has other hosts than the plan was made for, a broadcast would lose them."""
    instance = replace(engine(range(4), 4), drafter=drafter)
    assert [[(0, 1, 2, 3)]] == replica_hosts(instance, model, sites([*"aaaa"]))
    with pytest.raises(PlanError) as caught:
        replica_hosts(instance, model, sites([*"aabb"]))
    (finding,) = caught.value.findings
    assert ("E676", what, "a tp= that fits on a host") == (
        finding.code,
        finding.what,
        finding.fix,
    )


class Told:
    """What every rank says, exchanged by threads."""

    def __init__(self, ranks):
        self.barrier = threading.Barrier(ranks)
        self.said = {}

    def gather(self, rank):
        def all_gather_object(found, mine):
            self.barrier.wait(10)
            self.said[rank] = mine
            self.barrier.wait(10)
            found[:] = [self.said[each] for each in range(len(found))]

        return all_gather_object


def worlds(instance, addresses, monkeypatch, model=MODEL):
    """The world of every rank, made at the same time, or why it is not."""
    plan = Plan.__new__(Plan)
    object.__setattr__(plan, "instances", (instance,))
    object.__setattr__(plan, "actions", ())
    object.__setattr__(plan, "graph", Graph(name="drawn", nodes=(), models=(model,)))
    told, here, made = Told(len(addresses)), threading.local(), {}
    monkeypatch.setattr(dist, "all_gather_object", lambda *words: here.gather(*words))
    monkeypatch.setattr(dist, "new_group", lambda *words, **more: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(rank):
        here.gather = told.gather(rank)
        devices = range(len(addresses))
        words = {"device": "cpu", "timeout": 5, "address": addresses[rank]}
        try:
            made[rank] = World(plan, rank, devices, **words)
        except PlanError as error:
            made[rank] = error

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(len(addresses))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(len(addresses))]


def test_every_host_has_one_rank_that_starts_its_part(monkeypatch):
    """Devices 1 to 4 are a replica on two hosts; 0 and 5 have no part in it."""
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    instance = engine(range(1, 5), 4)
    addresses = ["127.0.0.1"] * 3 + ["127.0.0.2"] * 3
    found = worlds(instance, addresses, monkeypatch)
    first, second = found[1].nodes(instance), found[3].nodes(instance)
    assert (0, 1, 2, 2) == (first.rank, second.rank, first.count, second.count)
    assert first.meeting == second.meeting
    assert first.meeting.startswith("127.0.0.1:")
    assert [(), (1, 2), (), (3, 0), (), ()] == [world.places(instance) for world in found]
    assert [None] * 4 == [found[rank].nodes(instance) for rank in (0, 2, 4, 5)]
    assert [[], [instance], [], [], [], []] == [[*world.instances] for world in found]
    assert [[], [], [], [instance], [], []] == [[*world.helped] for world in found]


def test_every_rank_refuses_what_would_not_arrive(monkeypatch):
    addresses = ["127.0.0.1"] * 2 + ["127.0.0.2"] * 2
    found = worlds(engine(range(4), 4), addresses, monkeypatch, ADAPTED)
    assert ["E676"] * 4 == [each.findings[0].code for each in found]


def test_replicas_on_one_host_each_meet_nobody(monkeypatch):
    instance = engine(range(4), 2)
    found = worlds(instance, ["127.0.0.1"] * 2 + ["127.0.0.2"] * 2, monkeypatch)
    assert [None] * 4 == [world.nodes(instance) for world in found]
    assert [()] * 4 == [world.helped for world in found]
    assert [2, 0, 2, 0] == [len(world.places(instance)) for world in found]
