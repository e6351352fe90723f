"""What would make a refused placement fit: tried, not guessed; and what more devices change."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import Finding, PlanError
from rlflow.graph.graph import Graph
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices.cluster import Cluster, parse_cluster
from rlflow.scheduler.passes.too_large import TooLarge
from rlflow.scheduler.search.remedies import Neighbourhood, other_layouts, with_remedies
from tests.scheduler.strategies import graph_of


def right(response: str, answer: str) -> float:
    return float(response == answer)


def grpo(shape: str, prompts: int = 64, new: int = 512) -> Graph:
    def declare() -> None:
        actor = rf.Model("actor", shape, dtype="bfloat16", optimizer=rf.AdamW(lr=1e-6))
        ref = rf.Model("ref", shape, dtype="bfloat16")
        data = ops.prompts(rf.data.arithmetic(digits=2), batch=prompts)
        samples = ops.rollout(actor, data, n=8, max_new_tokens=new)
        advantages = ops.advantage("grpo", samples, ops.reward(right, samples))
        loss = rf.PolicyLoss("ppo_clip", kl_coef=0.01)
        ops.update(actor, samples, advantages, ops.log_probs(ref, samples), loss=loss)

    return graph_of(declare)


def refused(graph: Graph, placement: rf.Placement, cluster: Cluster) -> PlanError:
    with pytest.raises(PlanError) as caught:
        compile_plan(graph, placement, cluster)
    return caught.value


def on_all(count: int | str, **assign: rf.On) -> rf.Placement:
    return rf.Placement(pools={"all": count}, assign={"*": rf.on("all"), **assign})


def test_a_layout_that_fits_is_named_with_its_seconds_and_memory() -> None:
    """32B whole on every device for its rollouts is 65.5 GB, beside shards and buckets."""
    graph, placement, cluster = grpo("shape:qwen2.5-32b"), on_all(8), parse_cluster("h100:8", 8)
    error = refused(graph, placement, cluster)
    assert all(isinstance(each, TooLarge) and each.lacks > 0 for each in error.findings)

    said = with_remedies(error, graph, placement, cluster)

    assert said.exit_code == error.exit_code
    first, *rest = said.findings
    assert first.got == error.findings[0].got
    assert first.fix.startswith("any of these fits:\n")
    assert '"actor.rollout": rf.on("all", tp=4)' in first.fix
    assert "an iteration" in first.fix
    assert "pools={'all': 16}, --devices h100:16" in first.fix
    assert not any(each.fix for each in rest)


@pytest.mark.rows(1)
@pytest.mark.parametrize(("kind", "shape"), [("h100", "qwen2.5-32b"), ("a100", "llama-3.1-70b")])
def test_all_that_is_offered_compiles_and_is_within_memory(kind: str, shape: str) -> None:
    graph, placement, cluster = grpo(f"shape:{shape}"), on_all("*"), parse_cluster(f"{kind}:8", 8)
    around = Neighbourhood(
        graph=graph, placement=placement, cluster=cluster, near=None, backend=None, most=48
    )

    fitting, _ = around.fitting()

    assert fitting
    assert around.tried <= 48
    for neighbour in fitting:
        plan = compile_plan(graph, neighbour.placement, neighbour.cluster).plan
        assert all(plan.peaks[device] <= plan.budget(device) for device in plan.peaks)


def test_where_nothing_fits_the_nearest_and_what_it_lacks_are_said() -> None:
    graph, placement, cluster = grpo("shape:qwen2.5-72b"), on_all(1), parse_cluster("a100:1", 1)
    error = refused(graph, placement, cluster)

    first = with_remedies(error, graph, placement, replace(cluster, groups=((cluster.kind, 1),)))

    head, advice = first.findings[0].fix.splitlines()
    assert head.startswith("none of ")
    assert "the nearest lacks " in head
    assert advice == error.findings[0].fix


def test_errors_of_other_things_stay_as_they_are() -> None:
    graph, cluster = grpo("shape:qwen2.5-7b"), parse_cluster("h100:2", 2)
    for wrong in (rf.on("all", tp=3), rf.on("all", fsdp=4)):
        placement = on_all(2, **{"actor.train": wrong})
        error = refused(graph, placement, cluster)
        assert {"E212"} == {each.code for each in error.findings}
        assert with_remedies(error, graph, placement, cluster) is error
    mixed = PlanError(TooLarge(code="E401", what="", lacks=1), Finding(code="E212", what=""))
    assert with_remedies(mixed, graph, placement, cluster) is mixed


def test_processors_of_a_machine_are_no_more_than_they_are() -> None:
    cluster = parse_cluster("cpu:2@1GB", 2)

    assert cluster.enlarged(2) is cluster
    assert cluster.enlarged(4) is None
    assert (16, 2) == (
        (larger := parse_cluster("h100:8", 8).enlarged(16)) and (larger.count, larger.hosts)
    )
    found = list(other_layouts("train", rf.on("all", tp=2), frozen=False, on_host=True))
    assert [4, 8] == [each.tp for each in found if each.tp != 2]
    assert not any(each.offload for each in found)


def test_experts_may_lie_apart_where_there_are_some() -> None:
    def tried(experts: int) -> list[int]:
        said = rf.on("all", ep=2)
        others = other_layouts("train", said, frozen=False, on_host=False, experts=experts)
        return [each.ep for each in others if each.ep is not None and each.ep != said.ep]

    assert ([], [4, 8], [4, 8, 16]) == (tried(0), tried(24), tried(128))


def test_an_update_that_never_fits_is_refused_for_the_least_it_needs() -> None:
    """Micro-batches are the smallest, layers computed again, and the optimizer on the host."""
    graph, cluster = grpo("shape:qwen2.5-72b"), parse_cluster("a100:1", 1)
    error = refused(graph, on_all(1), cluster)
    update = next(each for each in error.findings if "'actor.update'" in each.what)

    said = rf.on("all", recompute=True, offload="optimizer")
    by_hand = refused(graph, on_all(1, **{"actor.train": said}), cluster)
    same = next(each for each in by_hand.findings if "'actor.update'" in each.what)

    assert isinstance(update, TooLarge)
    assert isinstance(same, TooLarge)
    assert "optimizer" not in update.got
    assert update.lacks <= same.lacks


def test_235b_in_stages_plans_with_an_engine_over_hosts_which_is_named_where_it_is_not() -> None:
    """An eighth of the rollout's weights leaves no room for buckets beside 64 shards in float32."""
    graph, cluster = grpo("shape:qwen3-235b-a22b"), parse_cluster("h100:64", 8, host_memory="2TB")
    shared = {"pp": 4, "ep": 8, "recompute": True}
    uses = {"*": rf.on("all", **shared), "actor.rollout": rf.on("all", tp=8, engine="sglang")}
    placement = rf.Placement(pools={"all": 64}, assign=uses)
    error = refused(graph, placement, cluster)

    first = with_remedies(error, graph, placement, cluster).findings[0]

    assert "reshard:actor@all->actor@all/sglang" in first.what
    assert "any of these fits:" in first.fix
    assert '"actor.rollout": rf.on("all", tp=16, engine="sglang")' in first.fix


@pytest.mark.parametrize(
    ("shape", "devices", "train", "tp"),
    [
        pytest.param("llama-3.1-70b", 64, {"pp": 4, "tp": 8}, 8, id="70b"),
        pytest.param("qwen3-235b-a22b", 128, {"pp": 8, "cp": 2, "tp": 2, "ep": 8}, 16, id="235b"),
    ],
)
def test_large_models_plan_as_they_are_published(
    shape: str, devices: int, train: dict[str, int], tp: int
) -> None:
    """235B in NeMo RL is [TP, CP, EP, PP] = [2, 2, 16, 8] on 128: of its 16, two are of `tp`."""
    cluster = parse_cluster(f"h100:{devices}", 8, host_memory="2TB")
    shared = rf.on("all", recompute=True, **train)
    rollout = rf.on("all", tp=tp, engine="sglang")
    placement = rf.Placement(pools={"all": devices}, assign={"*": shared, "actor.rollout": rollout})

    plan = compile_plan(grpo(f"shape:{shape}"), placement, cluster).plan

    trained = next(each for each in plan.instances if each.trained)
    assert trained.pp == train["pp"]
    assert len(trained.stages) == trained.pp
    assert trained.cp == train.get("cp", 1)
    assert max(plan.peaks.values()) > 0


def test_an_engine_that_cannot_sleep_between_pieces_is_offered_one_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pool is as large as it was told, so no smaller micro-batch makes room beside it."""
    monkeypatch.setattr(Neighbourhood, "_layouts", lambda *_: iter(()))
    graph, cluster = grpo("shape:qwen2.5-7b", 256, 2048), parse_cluster("h100:8", 8)
    engine = rf.on("all", tp=1, engine=rf.SGLang(max_total_tokens=900_000))
    placement = on_all(8, **{"actor.rollout": engine}).model_copy(update={"stream": 4})
    error = refused(graph, placement, cluster)
    (finding,) = error.findings
    assert "52.0 GB actor@all/sglang/pool, which stays" in finding.got

    said = with_remedies(error, graph, placement, cluster)

    assert "any of these fits:\n  stream=1 " in said.findings[0].fix
