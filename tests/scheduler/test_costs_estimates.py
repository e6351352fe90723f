"""Estimates of nodes and copies: chunks, kinds, links, buckets, and what holds memory."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.graph.graph import Graph
from rlflow.scheduler.costs import estimate as module
from rlflow.scheduler.costs import measurement_keys as keys
from rlflow.scheduler.costs.distributions import BEYOND
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.pieces import Piece
from rlflow.scheduler.costs.ranks.rank_memory import REDUCED
from rlflow.scheduler.devices import collectives
from rlflow.scheduler.devices.cluster import KINDS, cpu_cluster, parse_cluster
from rlflow.scheduler.devices.hardware import OBJECT_STORE, STORE_SECONDS
from rlflow.scheduler.models.shapes import model_shape
from rlflow.scheduler.plan.plan import Cost, Instance
from tests.scheduler.strategies import exact, graph_of


def big(*, ignore_eos: bool = False, path: str = "shape:qwen2.5-7b") -> Graph:
    """GRPO of a 7B model in bfloat16: 128 prompts, 8 samples of up to 1024 tokens."""

    def declare() -> None:
        actor = rf.Model("actor", path, dtype="bfloat16", optimizer=rf.AdamW(lr=1e-6))
        ref = rf.Model("ref", path, dtype="bfloat16")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=128)
        samples = ops.rollout(actor, prompts, n=8, max_new_tokens=1024, ignore_eos=ignore_eos)
        reward = ops.reward(exact, samples)
        ref_lp = ops.log_probs(ref, samples)
        advantage = ops.advantage("grpo", samples, reward)
        loss = rf.PolicyLoss("ppo_clip", kl_coef=0.1)
        ops.update(actor, samples, advantage, ref_lp, loss=loss, mini_batches=2)

    return graph_of(declare, "big")


def costs_for(graph: Graph, devices: str = "h100:8") -> Costs:
    shapes = {model.name: model_shape(model) for model in graph.models}
    return Costs(graph=graph, cluster=parse_cluster(devices, 1), shapes=shapes, backend="ray")


def on(devices: tuple[int, ...], *, trained: bool = False, fsdp: int = 1, tp: int = 1) -> Instance:
    return Instance(
        name="actor@pool",
        model="actor",
        pool="pool",
        devices=devices,
        uses=("train" if trained else "rollout",),
        trained=trained,
        fsdp=fsdp,
        tp=tp,
    )


ALL = tuple(range(8))


def run(costs: Costs, name: str, instance: Instance, parts: int = 8, chunks: int = 1) -> Cost:
    return costs.run(costs.graph.node(name), instance, parts, Piece(count=chunks))


def test_pieces_add_up_to_what_is_used_while_it_runs() -> None:
    costs = costs_for(big())
    made = [
        run(costs, "actor.rollout", on(ALL)),
        run(costs, "actor.update", on(ALL, trained=True, fsdp=8)),
        run(costs, "ref.log_probs", on(ALL, fsdp=8)),
    ]

    for cost in made:
        assert cost.transient == sum(size for _, size in cost.holds)
        assert list(cost.holds) == sorted(cost.holds, key=lambda part: -part[1])
        assert cost.source == module.TABLE
    names = [{name for name, _ in cost.holds} for cost in made]
    assert {"KV cache", "activations", "logits", "graphs"} == names[0]
    assert {"activations", "gathered weights", REDUCED} == names[1]
    assert {"activations", "gathered weights"} == names[2]


def test_the_cache_of_a_rollout_by_hand() -> None:
    """128 rows a rank, 5 prompt tokens and 1024 more: 9 blocks of 128 tokens, half of them at once.

    One block more is nobody's. A token has 57,344 bytes.
    """
    costs = costs_for(big())
    prompt, longest = costs.tokens(costs.graph.node("actor.rollout"))

    holds = dict(run(costs, "actor.rollout", on(ALL)).holds)

    assert 1024 == longest
    assert 5 == prompt
    assert (1 + 128 // 2 * 9) * 128 * 57_344 == holds["KV cache"]


def test_chunks_share_the_rows_but_each_reads_the_weights() -> None:
    costs = costs_for(big())
    whole, half = (run(costs, "actor.rollout", on(ALL), chunks=n) for n in (1, 2))
    forward, quarter = (run(costs, "ref.log_probs", on(ALL), chunks=n) for n in (1, 4))

    assert whole.seconds is not None
    assert half.seconds is not None
    assert whole.seconds / 2 < half.seconds < whole.seconds
    block = 128 * 57_344
    assert 2 * dict(half.holds)["KV cache"] - block == dict(whole.holds)["KV cache"]
    assert quarter.seconds == pytest.approx(forward.seconds / 4, rel=0.05)


def test_host_work_is_cut_evenly() -> None:
    costs = costs_for(big())
    reward = costs.graph.node("reward")

    assert costs.run(reward, None, 1).seconds == 2e-4 + 5e-6 * 1024
    assert costs.run(reward, None, 2, Piece(count=4)).seconds == 2e-4 + 5e-6 * 128


def test_responses_of_the_full_length_take_longer() -> None:
    some, full = costs_for(big()), costs_for(big(ignore_eos=True))

    assert some.lengths(some.graph.node("actor.rollout")).mean == 512
    assert full.lengths(full.graph.node("ref.log_probs")).fixed
    short, long = (run(c, "actor.rollout", on(ALL)) for c in (some, full))
    assert short.seconds < long.seconds
    assert dict(short.holds) == dict(long.holds)


def test_each_device_is_estimated_as_its_kind() -> None:
    costs = costs_for(big(), "h100:8,a100:8")
    fast = run(costs, "ref.log_probs", on(ALL))
    slow = run(costs, "ref.log_probs", on(tuple(range(8, 16))))

    assert fast.seconds is not None
    assert 2 < slow.seconds / fast.seconds < 989 / 312


def test_groups_that_leave_their_host_pay_the_network() -> None:
    costs = costs_for(big(), "h100:16")
    inside, across = (
        run(costs, "actor.rollout", on(devices, tp=2), parts=1) for devices in ((0, 1), (7, 8))
    )

    assert inside.seconds < across.seconds


def test_a_critic_and_a_policy_differ_by_the_head() -> None:
    graph = big()
    critic = replace(
        graph, models=tuple(m.model_copy(update={"head": "value"}) for m in graph.models)
    )
    policy, value = (run(costs_for(g), "ref.log_probs", on(ALL)) for g in (graph, critic))

    assert value.seconds < policy.seconds
    assert "logits" not in dict(value.holds)


def test_sleeps_go_over_the_link_to_the_host_and_reshards_between_devices() -> None:
    costs, kind = costs_for(big()), KINDS["h100"]
    asleep = costs.copy(8 * 10**9, 8, devices=ALL, kind="sleep")
    moved = costs.copy(8 * 10**9, 8, devices=ALL, kind="reshard")

    assert asleep.seconds == pytest.approx(1e9 / (0.8 * kind.host_link))
    assert asleep == costs.copy(8 * 10**9, devices=ALL)
    assert moved.seconds == pytest.approx(1e9 / (0.8 * kind.link))
    assert moved.seconds == costs.copy(8 * 10**9, 8).seconds


def test_a_reshard_over_hosts_is_as_fast_as_their_network() -> None:
    costs = costs_for(big(), "h100:16")

    assert costs.copy(10**9, 1, devices=(0, 8), kind="reshard").seconds == pytest.approx(
        1e9 / (0.8 * 50e9)
    )


def test_rows_go_through_the_object_store() -> None:
    seconds = costs_for(big()).copy(5 * 10**6, kind="transfer").seconds

    assert seconds == pytest.approx(STORE_SECONDS + 5e6 / OBJECT_STORE)


def test_cpu_devices_share_one_memory() -> None:
    costs = replace(costs_for(big()), cluster=cpu_cluster(4, threads=1))

    assert costs.copy(10**9, 4).seconds == costs.copy(10**9, 1).seconds


def test_buckets_are_held_where_weights_leave_their_process() -> None:
    costs = costs_for(big())
    far = costs.copy(10**9, 8, kind="reshard", transport="collective")
    small = costs.copy(1000, 8, kind="reshard", transport="collective")

    assert (("buckets", 2 * collectives.BUCKET),) == far.holds
    assert (2 * collectives.BUCKET, 2000) == (far.transient, small.transient)
    assert () == costs.copy(10**9, 8, kind="reshard", transport="copy").holds


def test_what_is_not_here_has_no_estimate() -> None:
    costs = costs_for(big(path="nobody/has-this"))

    assert (None, None) == (
        run(costs, "actor.rollout", on(ALL)).seconds,
        costs.copy(None).seconds,
    )


@pytest.mark.torch
def test_sizes_are_those_of_the_engines() -> None:
    from rlflow.engines.reshard.resharder import Resharder
    from rlflow.engines.reshard.segments import HALF
    from rlflow.engines.reshard.transports import HOST_BUCKET

    parameters = inspect.signature(Resharder.__init__).parameters

    assert collectives.BUCKET == parameters["bucket_bytes"].default
    assert collectives.HOST_BUCKET == HALF == HOST_BUCKET


def with_option(graph: Graph, name: str, **options: object) -> Graph:
    nodes = (
        replace(n, params=tuple({**dict(n.params), **options}.items())) if n.name == name else n
        for n in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


def test_epochs_repeat_an_update_and_mini_batches_cut_it() -> None:
    instance = on(ALL, trained=True, fsdp=8)
    one, two, four = (
        run(costs_for(with_option(big(), "actor.update", **options)), "actor.update", instance)
        for options in ({}, {"epochs": 2}, {"mini_batches": 8})
    )

    assert two.seconds == pytest.approx(2 * one.seconds)
    assert two.holds == one.holds
    assert four.seconds == pytest.approx(one.seconds, rel=0.1)
    assert dict(four.holds)[BEYOND] < 0.6 * dict(one.holds)["activations"]


def test_gradients_of_one_pass_are_not_beside_all_of_its_activations() -> None:
    """Ranks that share a model get gradients as activations go; a second pass finds the first's."""
    instance = on(ALL, trained=True, fsdp=8)
    graph = with_option(big(), "actor.update", mini_batches=8)
    costs = costs_for(graph)
    several = replace(instance, micro_tokens=2048)
    one = dict(run(costs, "actor.update", instance).holds)
    assert "activations" in dict(run(costs, "actor.update", several).holds)
    load = costs.load(graph.node("actor.update"), 8)
    roof = costs.roofline(instance, costs.shapes["actor"])
    plain = dict(roof.holds("train", load, recompute=False))
    gradients = costs.gradients(instance)
    assert one[BEYOND] == plain["activations"] - gradients
    again = dict(run(costs, "actor.update", replace(instance, recompute=True)).holds)
    plain = dict(roof.holds("train", load, recompute=True))
    assert again[BEYOND] == plain["activations"] - gradients
    # Of few rows there is less to go than comes: gradients and a layer's are the most.
    few = with_option(big(), "actor.update", mini_batches=64)
    costs = costs_for(few)
    again = dict(run(costs, "actor.update", replace(instance, recompute=True)).holds)
    least = int(roof.layers.kept * costs.load(few.node("actor.update"), 8).most_tokens)
    assert again[BEYOND] == least


def test_a_mesh_is_row_major_and_tp_is_next_to_each_other() -> None:
    costs = costs_for(big(), "h100:16")
    instance = on(tuple(range(16)), trained=True, fsdp=4, tp=2)
    roof = costs.roofline(instance, costs.shapes["actor"])

    assert (2, 4, 2) == (roof.tp.ranks, roof.fsdp.ranks, roof.replicas.ranks)
    assert roof.tp.step == roof.fsdp.step == KINDS["h100"].hop
    assert KINDS["h100"].far_hop == roof.replicas.step
    frozen = costs.roofline(replace(instance, trained=False), costs.shapes["actor"])
    assert 2 == frozen.replicas.ranks


@pytest.mark.parametrize(
    ("devices", "trained", "fsdp", "dtype", "gathers"),
    [
        (ALL, True, 1, "bfloat16", True),
        (ALL[:1], True, 1, "bfloat16", False),
        (ALL, True, 1, "float32", False),
        (ALL, False, 1, "bfloat16", False),
        (ALL, False, 8, "float32", True),
    ],
)
def test_parameters_are_made_whole_where_they_are_kept_otherwise(
    devices: tuple[int, ...], trained: bool, fsdp: int, dtype: str, gathers: bool
) -> None:
    """What one process holds by itself is computed with as it lies there."""
    graph = big()
    graph = replace(
        graph, models=tuple(m.model_copy(update={"dtype": dtype}) for m in graph.models)
    )
    costs = costs_for(graph)

    found = costs.roofline(on(devices, trained=trained, fsdp=fsdp), costs.shapes["actor"])

    assert gathers == found.gathers


def test_the_longest_row_of_all_ranks_ends_a_rollout() -> None:
    """One rank of 128 rows goes on until the longest of eight times as many has ended."""
    costs = costs_for(big())
    roof = costs.roofline(on(ALL), costs.shapes["actor"])
    load = costs.load(costs.graph.node("actor.rollout"), 8)

    assert (128, 16, 8) == (load.rows, load.prompts, load.peers)
    assert roof.rollout(load) >= roof.rollout(replace(load, peers=1))
    few = replace(load, rows=2.0, prompts=2.0)
    assert roof.rollout(few) > 1.2 * roof.rollout(replace(few, peers=1))


def test_work_is_told_apart_by_the_options_that_change_it() -> None:
    node = big().node("actor.update")
    again = with_option(big(), "actor.update", epochs=2).node("actor.update")
    clipped = with_option(big(), "actor.update", max_grad_norm=2.0).node("actor.update")

    assert keys.work(node) != keys.work(again)
    assert keys.work(node) == keys.work(clipped)
