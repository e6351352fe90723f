"""What engines keep of a device while they sleep, and of their hosts all the time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.scheduler import observed
from rlflow.scheduler.compile import Compiled, compile_plan, dump_plan
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.devices.cluster import Cluster
from rlflow.scheduler.devices.hardware import ENGINE_ASLEEP
from rlflow.scheduler.devices.measured import NOTHING, MeasuredCosts, Sample, Setting, load_measured
from rlflow.scheduler.engines.engines import asleep_key
from rlflow.scheduler.models.shapes import model_shape
from rlflow.scheduler.plan.explain import explain
from rlflow.scheduler.plan.plan import HOST, Plan
from rlflow.scheduler.plan.saved import read_plan
from rlflow.scheduler.plan.text import plan_text
from rlflow.scheduler.verify.verify import STAGES, verify
from tests.scheduler.examples import grpo
from tests.scheduler.strategies import PLENTY, cluster
from tests.scheduler.test_engine_plans import colocated, split
from tests.scheduler.test_measured_runs import played

GRAPH = grpo(path="models/wide", every=0)
ALONE = colocated(rf.SGLang(max_total_tokens=4000))
ENGINE = "actor@all/sglang"
# Layers of 512 x (512 + 2 x 256 + 512) + 3 x 512 x 2048, two norms each and one after them,
# embeddings of 64 words.
# Graphs of up to 256 rows, 2 MiB each, beside what the process keeps in any case.
ASSUMED = int(ENGINE_ASLEEP) + 256 * 2**21
WEIGHTS = 4 * (4 * 3_932_160 + 9 * 512 + 64 * 512)


def planned(devices: Cluster, placement: rf.Placement = ALONE) -> Compiled:
    return compile_plan(GRAPH, placement, devices)


def costs_of(plan: Plan, devices: Cluster) -> Costs:
    shapes = {model.name: model_shape(model) for model in plan.graph.models}
    return Costs(graph=plan.graph, cluster=devices, shapes=shapes, backend=plan.backend)


def knowing(devices: Cluster, held: float, *more: float) -> Cluster:
    """Devices on which runs have seen the engine keep so many bytes, one run each."""
    plan = planned(devices).plan
    key = asleep_key(costs_of(plan, devices), plan.instance(ENGINE))
    found = NOTHING
    for size in (held, *more):
        sample = Sample("run", 4, 0.0, 0.0, held=size)
        found = found.adding([(key, Setting(plan.graph.name, 1, 0), sample)])
    return replace(devices, measured=found)


def tight(kind: str = "cpu") -> Cluster:
    """A device that engine and training have to take turns on."""
    roomy = planned(cluster(kind, 1, PLENTY)).plan.peaks[0]
    return cluster(kind, 1, int(0.7 * roomy))


def weights_of(plan: Plan):
    return plan.part(f"{ENGINE}/weights")


def test_the_shape_is_the_one_counted_with() -> None:
    devices = cluster("cpu", 1, PLENTY)
    plan = planned(devices).plan
    assert WEIGHTS == costs_of(plan, devices).weights(plan.instance(ENGINE))


def test_what_was_measured_asleep_takes_the_place_of_what_is_assumed() -> None:
    """The most of any run; the text says which it is."""
    devices = cluster("h100", 1, 80e9)
    assumed, measured = planned(devices).plan, planned(knowing(devices, 3.1e9, 2.9e9)).plan
    assert ASSUMED == weights_of(assumed).residual
    assert int(3.1e9) == weights_of(measured).residual
    assert int(3.1e9) - ASSUMED == weights_of(measured).size - weights_of(assumed).size
    told = "asleep it keeps 2.0 GB of each device, 536.9 MB of it CUDA graphs (assumed)"
    assert told in plan_text(assumed)
    assert "asleep it keeps 3.1 GB of each device (measured, 2 runs)" in plan_text(measured)
    assert measured.peaks[0] - assumed.peaks[0] == int(3.1e9) - ASSUMED


def test_an_engine_without_graphs_keeps_less() -> None:
    """Its parts say what they are of, and so does an explanation of who needs them."""
    devices = cluster("h100", 1, 80e9)
    eager = planned(devices, colocated(rf.SGLang(max_total_tokens=4000, cuda_graph=False))).plan
    part = weights_of(eager)
    assert (("weights", WEIGHTS), ("context and workspaces", int(ENGINE_ASLEEP))) == part.holds
    assert ASSUMED - 256 * 2**21 == part.residual
    graphs = weights_of(planned(devices).plan)
    assert ("CUDA graphs", 256 * 2**21) == graphs.holds[-1]
    assert sum(size for _, size in graphs.holds) == graphs.size
    few = rf.SGLang(max_total_tokens=4000, max_running_requests=4)
    assert (
        int(ENGINE_ASLEEP) + 4 * 2**21 == weights_of(planned(devices, colocated(few)).plan).residual
    )
    text = explain(eager, eager.action("actor.rollout"))
    assert f"holds      {ENGINE}/weights: 63.1 MB weights, 1.5 GB context and workspaces" in text
    assert "CUDA graphs" not in plan_text(eager)


def test_what_an_engine_computes_in_is_of_its_pool_on_accelerators_alone() -> None:
    """Its process keeps it from pass to pass: 16 rows of 64 words, 80 tokens of prompts.

    A row is read with 4 tokens of 512, 2 + 2 heads twice of 128, and 3 of 2048.
    """
    plan = planned(cluster("h100", 1, 80e9)).plan
    part = plan.part(f"{ENGINE}/pool")
    held = dict(part.holds)
    token = 4 * (4 * 512 + 2 * (4 + 2) * 128 + 3 * 2048)
    assert 16 * 64 * (4 + 8) == held["logits"]
    assert 40 * token == held["activations"]
    assert 4000 * 2 * 4 * 2 * 128 * 4 == held["keys and values"]
    assert sum(held.values()) == part.size
    assert 0 == plan.action("actor.rollout").cost.transient
    wrong = [replace(p, holds=p.holds[1:]) if p == part else p for p in plan.parts]
    assert verify(replace(plan, parts=tuple(wrong)), STAGES[-1])
    host = planned(cluster("cpu", 1, PLENTY)).plan
    assert () == host.part(f"{ENGINE}/pool").holds
    assert host.action("actor.rollout").cost.transient
    peak = plan.action("actor.rollout").peak
    training = sum(p.size or 0 for p in plan.parts if p.instance != ENGINE)
    assert training + part.size + weights_of(plan).size == peak


def test_a_device_too_small_for_what_was_measured_is_refused() -> None:
    devices = cluster("h100", 1, 4e9)
    planned(devices)
    with pytest.raises(PlanError) as error:
        planned(knowing(devices, 3.99e9))
    assert "E401" == error.value.findings[0].code
    assert f"4.0 GB left by {ENGINE}/weights asleep" in error.value.findings[0].got


def test_the_staging_of_weights_is_in_the_hosts_peak_once() -> None:
    """A plan without sleeps has it there, and so has one whose engine is emptied by turns."""
    calm = planned(cluster("cpu", 1, PLENTY)).plan
    assert WEIGHTS == weights_of(calm).on_host == calm.peaks[HOST]
    assert not any(action.kind == "sleep" for action in calm.actions)
    turns = planned(tight()).plan
    asleep = {a.part for a in turns.actions if (a.kind, a.mode) == ("sleep", "offload")}
    away = sum((turns.part(name).size or 0) for name in asleep)
    assert any(action.instance == ENGINE for action in turns.actions if action.kind == "sleep")
    assert WEIGHTS <= turns.peaks[HOST] <= WEIGHTS + away
    assert "host 63.1 MB" in plan_text(calm)


def test_ranks_of_an_engine_share_one_staging() -> None:
    options = rf.SGLang(max_total_tokens=4000)
    placement = split(options, gen=4, tp=2)
    plan = planned(cluster("cpu", placement.num_devices(), PLENTY), placement).plan
    assert WEIGHTS // 2 == plan.part("actor@gen/sglang/weights").on_host
    assert 2 * WEIGHTS == plan.peaks[HOST]


def test_a_process_on_a_cpu_is_in_its_hosts_memory_and_not_in_a_devices() -> None:
    """It is beside weights and pool, which stay in it, and the staging."""
    devices = cluster("cpu", 1, PLENTY)
    plain, known = planned(devices).plan, planned(knowing(devices, 1.3e9)).plan
    assert 0 == weights_of(known).residual
    assert plain.peaks[0] == known.peaks[0]
    assert int(1.3e9) == known.peaks[HOST] - plain.peaks[HOST]
    told = "its processes hold 1.3 GB of it beside weights and pool (measured, 1 run)"
    assert told in plan_text(known)


@pytest.mark.parametrize("tokens", [1000, 200_000])
@pytest.mark.parametrize("beside", [1.3e9, -1.0])
def test_a_process_on_a_cpu_is_measured_without_the_pool_that_it_had(
    tokens: int, beside: float
) -> None:
    """1.3 GB, whatever the next plan gives the pool; a process of less than both says nothing."""
    devices = cluster("cpu", 1, PLENTY)
    placements = [colocated(rf.SGLang(max_total_tokens=n)) for n in (tokens, 201_000 - tokens)]
    plan = planned(devices, placements[0]).plan
    held = WEIGHTS + tokens * 8192 + beside
    figures = [(n, {"actor.rollout/asleep_bytes": held}) for n in range(4)]
    costs = costs_of(plan, devices)
    found = observed.samples(plan, costs, played(plan, 4), figures, begun=0, origin="run")
    known = replace(devices, measured=NOTHING.adding(found))
    for placement in placements:
        again = planned(known, placement).plan
        assert WEIGHTS + max(int(beside), 0) == weights_of(again).on_host


def test_a_host_too_small_for_the_staging_is_refused() -> None:
    devices = cluster("cpu", 1, PLENTY)
    devices = replace(devices, kind=replace(devices.kind, host_memory=WEIGHTS - 1))
    with pytest.raises(PlanError) as error:
        planned(devices)
    (finding,) = error.value.findings
    assert ("E405", True) == (finding.code, f"{ENGINE}/weights" in finding.got)


@pytest.mark.parametrize("make", [lambda: cluster("cpu", 1, PLENTY), tight])
def test_a_plan_that_forgets_the_host_is_rejected(make, tmp_path: Path) -> None:
    compiled = planned(make())
    plan = compiled.plan
    assert not verify(plan, STAGES[-1])
    peaks = {**plan.peaks, HOST: plan.peaks[HOST] - WEIGHTS}
    assert verify(replace(plan, peaks=peaks), STAGES[-1])
    part = weights_of(plan)
    more = [replace(p, on_host=p.on_host + 1) if p == part else p for p in plan.parts]
    assert verify(replace(plan, parts=tuple(more)), STAGES[-1])
    path = tmp_path / "plan.json"
    path.write_text(dump_plan(plan))
    assert plan.hash == read_plan(path).hash


def test_parts_of_others_take_nothing_of_a_host_and_say_nothing_of_it() -> None:
    document = planned(cluster("cpu", 1, PLENTY)).plan.to_json()
    told = [part["name"] for part in document["parts"] if "on_host" in part]
    assert [f"{ENGINE}/weights"] == told


def test_a_run_leaves_the_most_that_was_kept() -> None:
    """Of its iterations but the first, by the metric of the engine's rollout."""
    devices = cluster("cpu", 1, PLENTY)
    plan = planned(devices).plan
    costs = costs_of(plan, devices)
    seen = [9e9, 1.0e9, 1.4e9, 1.2e9]
    figures = [(n, {"actor.rollout/asleep_bytes": size}) for n, size in enumerate(seen)]
    figures[2][1]["ref.log_probs/asleep_bytes"] = 8e9
    spans = played(plan, len(seen))
    found = observed.samples(plan, costs, spans, figures, begun=0, origin="run")
    key = asleep_key(costs, plan.instance(ENGINE))
    kept = 1.4e9 - WEIGHTS - 4000 * 8192
    assert [(3, kept)] == [(s.count, s.held) for name, _, s in found if name == key]
    none = observed.samples(plan, costs, spans, [(n, {}) for n in range(4)], begun=0, origin="run")
    assert key not in {name for name, _, _ in none}


def test_the_pool_and_the_start_of_a_run_are_known_to_the_next_plan() -> None:
    """Where its size is left to the engine, the least that any iteration told."""
    devices, placement = cluster("h100", 1, 80e9), colocated(rf.SGLang(mem_fraction_static=0.5))
    plan = planned(devices, placement).plan
    costs = costs_of(plan, devices)
    derived = int(40e9) - WEIGHTS
    assert derived == dict(plan.part(f"{ENGINE}/pool").holds)["keys and values"]
    seen = [(0.0, 1e9), (3.1e6, 21.5), (3e6, 24.5), (3.2e6, 24.5)]
    figures = [
        (n, {"actor.rollout/pool_tokens": tokens, "actor.rollout/start_seconds": took})
        for n, (tokens, took) in enumerate(seen)
    ]
    found = observed.samples(plan, costs, played(plan, len(seen)), figures, begun=0, origin="run")
    known = replace(devices, measured=NOTHING.adding(found))
    again = planned(known, placement).plan
    assert 3_000_000 * 8192 == dict(again.part(f"{ENGINE}/pool").holds)["keys and values"]
    text = plan_text(again)
    assert "with a pool of 24.6 GB (measured, 1 run)" in text
    assert "it starts in 24.5 s (measured, 1 run)" in text
    assert "it starts" not in plan_text(plan)
    other = planned(known, colocated(rf.SGLang(mem_fraction_static=0.4))).plan
    left = dict(other.part(f"{ENGINE}/pool").holds)["keys and values"]
    assert int(32e9) - WEIGHTS == left
    said = planned(known, colocated(rf.SGLang(mem_fraction_static=0.5, max_total_tokens=9))).plan
    assert 9 * 8192 == dict(said.part(f"{ENGINE}/pool").holds)["keys and values"]


def test_a_pool_that_was_asked_for_by_tokens_is_no_news() -> None:
    devices = cluster("cpu", 1, PLENTY)
    plan = planned(devices).plan
    figures = [(n, {"actor.rollout/pool_tokens": 1e6}) for n in range(4)]
    costs = costs_of(plan, devices)
    found = observed.samples(plan, costs, played(plan, 4), figures, begun=0, origin="run")
    assert not any("pool, " in key for key, _, _ in found)


def test_a_pool_of_tokens_and_a_share_of_memory_says_nothing_of_the_share_alone() -> None:
    devices = cluster("h100", 1, 80e9)
    both = colocated(rf.SGLang(mem_fraction_static=0.5, max_total_tokens=9))
    plan = planned(devices, both).plan
    figures = [(n, {"actor.rollout/pool_tokens": 9.0}) for n in range(4)]
    costs = costs_of(plan, devices)
    found = observed.samples(plan, costs, played(plan, 4), figures, begun=0, origin="run")
    assert not any("pool, " in key for key, _, _ in found)
    known = replace(devices, measured=NOTHING.adding(found))
    share = planned(known, colocated(rf.SGLang(mem_fraction_static=0.5))).plan
    pool = dict(share.part(f"{ENGINE}/pool").holds)["keys and values"]
    assert int(40e9) - WEIGHTS == pool


def test_files_without_bytes_or_trips_are_read(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    setting = Setting("grpo", 1, 0)
    whole = NOTHING.adding([("key", setting, Sample("run", 2, 1.0, 0.5, 3.0, 4.0, 2.0, 7.0))])
    for length, held in ((8, 7.0), (7, 0.0), (6, 0.0)):
        document = whole.to_json()
        document["records"][0]["samples"][0] = document["records"][0]["samples"][0][:length]
        path.write_text(json.dumps(document))
        found: MeasuredCosts = load_measured(path)
        assert ("", held) == (found.problem, found.records[0].held)
    document["records"][0]["samples"][0] = ["run", 2, 1.0, 0.5, 3.0, 4.0, 2.0, 7.0, 1.0, 1.0]
    path.write_text(json.dumps(document))
    assert load_measured(path).problem


@pytest.mark.parametrize("share", [0.5, 1e-6])
def test_a_share_of_a_cpus_memory_is_told_the_engine_in_tokens(share: float) -> None:
    """A device is a part of the host there, which the engine does not know of."""
    memory = 1e9
    devices = cluster("cpu", 1, memory)
    plan = planned(devices, colocated(rf.SGLang(mem_fraction_static=share))).plan
    engine = plan.instance(ENGINE)
    assert engine.options is not None
    tokens, pool = engine.options.max_total_tokens, plan.part(f"{ENGINE}/pool").size
    assert tokens is not None
    assert pool is not None
    weights = plan.part(f"{ENGINE}/weights").size or 0
    each = pool / tokens
    if share * memory > weights:
        assert share * memory - weights == pytest.approx(pool, abs=each)
    else:
        assert sum(costs_of(plan, devices).tokens(plan.graph.node("actor.rollout"))) == tokens
