"""Plans whose engines lie on several hosts, and how weights reach them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph
from rlflow.scheduler.compile import Compiled, compile_plan
from rlflow.scheduler.devices.cluster import Cluster
from rlflow.scheduler.plan.plan import HOST
from rlflow.scheduler.verify.verify import verify
from tests.scheduler.examples import grpo
from tests.scheduler.strategies import cluster
from tests.scheduler.test_engine_plans import adapted

Pool = int | list[int]


def planned(engine: object, *, gen: int, tp: int, train: int = 2, hosts: int = 2) -> Compiled:
    """Devices shared out to hosts in their order: train first, then gen."""
    devices = replace(cluster("h100", train + gen, 1e12), hosts=hosts)
    return placed(devices, engine, gen=gen, tp=tp, train=train)


def placed(
    devices: Cluster,
    engine: object,
    *,
    gen: Pool,
    tp: int,
    train: Pool,
    graph: Graph | None = None,
) -> Compiled:
    placement = rf.Placement(
        pools={"train": train, "gen": gen},
        assign={"*": rf.on("train"), "actor.rollout": rf.on("gen", engine=engine, tp=tp)},
    )
    return compile_plan(graph or grpo(path="shape:qwen2.5-7b"), placement, devices)


def note(compiled: Compiled) -> str:
    """What a plan says of its engine."""
    (told,) = (note.text for note in compiled.plan.notes if note.rule == "engine")
    return told.partition("weights reach it through ")[2].partition(";")[0]


@pytest.mark.parametrize(
    ("engine", "hosts", "end"),
    [
        ("sglang", 1, "in its host's memory"),
        (rf.SGLang(updates="memory"), 1, "in its host's memory"),
        (rf.SGLang(updates="group"), 1, "in its host's memory, and a broadcast from it"),
        (
            rf.SGLang(updates="disk"),
            1,
            "in its host's memory, and a file in a temporary directory",
        ),
        ("sglang", 3, "in its host's memory, on 2 hosts, and a broadcast from it"),
        (
            rf.SGLang(updates="disk", updates_dir="/shared"),
            3,
            "in its host's memory, on 2 hosts, and a file in /shared",
        ),
    ],
)
def test_the_plan_says_how_weights_reach_an_engine(engine: object, hosts: int, end: str) -> None:
    """Six devices: on three hosts the four of the replica are on the last two."""
    assert note(planned(engine, gen=4, tp=4, hosts=hosts)).endswith(end)


def test_replicas_each_on_a_host_need_no_broadcast() -> None:
    assert note(planned("sglang", gen=4, tp=2, hosts=3)).endswith("in its host's memory")
    many = note(planned("sglang", gen=8, tp=4, train=4, hosts=6))
    assert many.endswith("in its host's memory, each on 2 hosts, and a broadcast from it")


@pytest.mark.parametrize(
    ("engine", "gen", "code"),
    [
        (rf.SGLang(updates="memory"), 4, "E671"),
        (rf.SGLang(updates="disk"), 4, "E671"),
        ("vllm", 4, "E672"),
        ("sglang", 4, None),
        (rf.SGLang(updates="disk", updates_dir="/shared"), 4, None),
    ],
)
def test_what_cannot_lie_on_two_hosts(engine: object, gen: int, code: str | None) -> None:
    if code is None:
        planned(engine, gen=gen, tp=4, hosts=3)
        return
    with pytest.raises(PlanError) as caught:
        planned(engine, gen=gen, tp=4, hosts=3)
    assert [code] == [finding.code for finding in caught.value.findings]
    planned(engine, gen=gen, tp=4, hosts=1)


def test_hosts_have_equal_shares_of_a_replica() -> None:
    """Six devices on two hosts: of the replica on 2 to 5 the first has one, the second three."""
    with pytest.raises(PlanError) as caught:
        planned("sglang", gen=4, tp=4)
    (finding,) = caught.value.findings
    assert ("E674", "1, 3 of them, host by host") == (finding.code, finding.got)


def test_every_host_is_taken_to_hold_the_staging() -> None:
    """Of a replica on one host each device counts a quarter of it, on two hosts a half."""
    one, two = (planned("sglang", gen=4, tp=4, hosts=hosts).plan for hosts in (1, 3))
    (here,) = (part for part in one.parts if part.name == "actor@gen/sglang/weights")
    (there,) = (part for part in two.parts if part.name == "actor@gen/sglang/weights")
    assert 2 * here.on_host - 1 <= there.on_host <= 2 * here.on_host


@pytest.mark.parametrize(
    ("options", "hosts", "way", "fix"),
    [
        (rf.SGLang(), 3, "group", "a tp= that fits on a host"),
        (rf.SGLang(updates="group"), 1, "group", 'rf.SGLang(updates="memory")'),
        (rf.SGLang(updates="disk"), 1, "disk", 'rf.SGLang(updates="memory")'),
    ],
)
def test_adapters_arrive_through_memory_alone(
    options: rf.SGLang, hosts: int, way: str, fix: str
) -> None:
    graph = adapted("shape:qwen2.5-7b")
    devices = replace(cluster("h100", 6, 1e12), hosts=hosts)
    with pytest.raises(PlanError) as caught:
        placed(devices, options, gen=4, tp=4, train=2, graph=graph)
    (finding,) = caught.value.findings
    assert ("E676", fix) == (finding.code, finding.fix)
    assert f"adapters (lora=) cannot reach actor@gen/sglang by {way}" == finding.what
    placed(replace(devices, hosts=1), "sglang", gen=4, tp=4, train=2, graph=graph)


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("algorithm", ["EAGLE", "STANDALONE", "NEXTN", "NGRAM"])
def test_a_draft_model_that_stays_as_it_is_is_not_read_from_disk(
    hosts: int, algorithm: str
) -> None:
    model = {} if algorithm in {"NEXTN", "NGRAM"} else {"draft_model": "/models/draft"}
    said = rf.Speculative(algorithm=algorithm, **model)
    devices, graph = replace(cluster("h100", 8, 1e12), hosts=hosts), grpo(path="shape:qwen2.5-7b")

    def place(updates: str) -> None:
        folder = {"updates_dir": "/shared"} if updates == "disk" else {}
        options = rf.SGLang(speculative=said, updates=updates, **folder)
        placed(devices, options, gen=4, tp=4, train=2, graph=graph)  # 2 to 5: two of each host

    place("group")
    if algorithm == "NGRAM":
        place("disk")
        return
    with pytest.raises(PlanError) as caught:
        place("disk")
    (finding,) = caught.value.findings
    assert "E676" == finding.code
    assert f'rf.SGLang(updates="{"memory" if hosts == 1 else "group"}")' == finding.fix


def on_two_hosts(gen: list[int], tp: int) -> Compiled:
    """Sixteen devices, 0 to 7 on one host; the first four train."""
    devices = replace(cluster("h100", 16, 1e12), hosts=2)
    return placed(devices, "sglang", gen=gen, tp=tp, train=4)


def test_a_host_that_comes_again_has_a_part_more() -> None:
    """Ranks are in the order of the pool's devices, and a part has neighbours alone."""
    with pytest.raises(PlanError) as caught:
        on_two_hosts([4, 8, 9, 5], 4)
    (finding,) = caught.value.findings
    assert ("E674", "1, 2, 1 of them, host by host") == (finding.code, finding.got)
    assert ", on 2 hosts in 4 parts, and" in note(on_two_hosts([4, 8, 5, 9], 4))


def test_replicas_on_unlike_numbers_of_hosts_are_counted_each_for_itself() -> None:
    """Of three replicas of two devices the second alone is on both hosts, and staged on both."""
    found, even = on_two_hosts([*range(5, 11)], 2), on_two_hosts([*range(6, 12)], 2)
    end = "each on up to 2 hosts, and a broadcast from it where there are several"
    assert note(found).endswith(end)
    across, within = (plan.plan.part("actor@gen/sglang/weights") for plan in (found, even))
    assert within.on_host == across.on_host
    assert ((7, within.on_host), (8, within.on_host)) == across.more_on_host
    assert () == within.more_on_host
    # On the first host the trainer's ranks copy what a checkpoint has, beside the engines' parts.
    saved = 4 * found.plan.saved[0].size
    assert 4 * within.on_host + saved == found.plan.peaks[HOST]
    assert 2 * within.on_host + saved == even.plan.peaks[HOST]
    parts = [replace(part, more_on_host=()) for part in found.plan.parts]
    assert verify(replace(found.plan, parts=tuple(parts)), found.stages[-1][0])
    assert not verify(found.plan, found.stages[-1][0])
