"""Seconds of weight updates to engines on accelerators, against what others have published."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.engines.updates import lent_update
from rlflow.scheduler.models.shapes import model_shape
from rlflow.scheduler.plan.plan import Action, Plan, Transport
from rlflow.scheduler.plan.text import plan_text
from rlflow.scheduler.verify.verify import STAGES, verify
from tests.scheduler.strategies import exact, graph_of

STAGED = rf.SGLang(updates="memory")


def grpo_of(shape: str, lora: rf.LoRA | None = None) -> Graph:
    def declare() -> None:
        optimizer = rf.AdamW(lr=1e-6)
        actor = rf.Model(
            "actor", f"shape:{shape}", dtype="bfloat16", optimizer=optimizer, lora=lora
        )
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=64)
        samples = ops.rollout(actor, prompts, n=8, max_new_tokens=512)
        reward = ops.reward(exact, samples)
        advantage = ops.advantage("grpo", samples, reward)
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))

    return graph_of(declare, "grpo")


def planned(
    shape: str,
    devices: str,
    engine: object,
    *,
    tp: int = 1,
    gen: int = 0,
    lora: rf.LoRA | None = None,
) -> Plan:
    """Everything on all devices, or rollouts on the last `gen` of them; memory as it is wanted."""
    kind, _, number = devices.partition(":")
    cluster = parse_cluster(f"{devices}@2000GB", 1)
    if kind == "cpu":
        cluster = replace(cluster, kind=replace(cluster.kind, host_memory=2e12))
    count = int(number)
    pools = {
        "train": list(range(count - gen)),
        "gen": list(range(count - gen if gen else 0, count)),
    }
    if not gen:
        pools = {"train": pools["train"]}
    where = rf.on("gen" if gen else "train", engine=engine, tp=tp)
    train = rf.on("train", fsdp=len(pools["train"]))
    placement = rf.Placement(pools=pools, assign={"*": train, "actor.rollout": where})
    return compile_plan(grpo_of(shape, lora), placement, cluster).plan


def reshard(plan: Plan) -> Action:
    (found,) = (action for action in plan.actions if action.kind == "reshard")
    return found


def seconds(plan: Plan) -> float:
    return float(reshard(plan).cost.seconds or 0)


@pytest.mark.parametrize(
    ("shape", "devices", "tp", "least", "most"),
    [
        ("qwen2.5-7b", "h100:1", 1, 3, 6),
        ("qwen2.5-7b", "h100:8", 1, 12, 20),
        ("qwen2.5-32b", "h100:8", 4, 40, 70),
        ("qwen2.5-32b", "h100:8", 8, 40, 70),
        ("qwen2.5-72b", "h100:16", 8, 90, 160),
    ],
)
def test_the_way_through_host_memory_takes_what_it_takes(
    shape: str, devices: str, tp: int, least: float, most: float
) -> None:
    """By what was read off the code that stages: 3 to 6 s for 7B, 12 to 20 s on eight devices."""
    assert least <= seconds(planned(shape, devices, STAGED, tp=tp)) <= most


@pytest.mark.parametrize(
    ("shape", "devices", "tp", "gen", "published"),
    [
        ("qwen2.5-7b", "h100:8", 1, 4, 5.75),  # verl: 5.5 to 6 s by NCCL
        ("qwen2.5-7b", "h100:16", 1, 8, 5.75),
        ("qwen2.5-32b", "h100:16", 8, 8, 14.2),  # verl by NCCL, weights resident
        ("qwen2.5-32b", "h100:8", 4, 0, 14.2),
        ("qwen2.5-72b", "h100:16", 8, 8, 28.8),  # the same
    ],
)
def test_the_way_over_devices_takes_half_to_twice_what_others_have_published(
    shape: str, devices: str, tp: int, gen: int, published: float
) -> None:
    assert 0.5 <= seconds(planned(shape, devices, "sglang", tp=tp, gen=gen)) / published <= 2


def test_the_plan_says_which_way_weights_go_and_what_holds_them_back() -> None:
    lent = planned("qwen2.5-32b", "h100:8", "sglang", tp=4)
    staged = planned("qwen2.5-32b", "h100:8", STAGED, tp=4)
    assert reshard(lent).reason.text.endswith(
        "no weight waits for the host; the engine's load takes 11.9 s of 12.3 s"
    )
    assert "131.1 GB by ipc (buckets that engines open in place)" in plan_text(lent)
    assert "through buckets on its devices, and where it wakes or was lost" in plan_text(lent)
    assert "through a copy in host memory; the gather by gloo takes" in reshard(staged).reason.text
    assert "weights reach it through a copy of 65.5 GB in its host's memory" in plan_text(staged)


def test_two_buckets_are_in_the_memory_of_an_update() -> None:
    """One of 512 MiB, and one of the embedding: 152064 x 3584 bfloat16 of 7B, 1.09 GB."""
    (held,) = reshard(planned("qwen2.5-7b", "h100:8", "sglang")).cost.holds
    assert ("buckets", 152_064 * 3584 * 2 + (512 << 20)) == held
    cost = reshard(planned("qwen2.5-7b", "h100:8", "sglang")).cost
    assert held[1] == cost.transient


def test_ranks_on_several_hosts_gather_at_the_same_time_in_no_more_memory() -> None:
    """Of three buckets of 256 MiB one is the embedding: 152064 x 8192 bfloat16 of 72B, 2.49 GB."""
    plan = planned("qwen2.5-72b", "h100:32", "sglang", tp=8, gen=8)
    (held,) = reshard(plan).cost.holds
    assert ("buckets", 152_064 * 8192 * 2 + 2 * (256 << 20)) == held

    cluster, graph = parse_cluster("h100:32", 1), grpo_of("qwen2.5-72b")
    shape = model_shape(graph.models[0])
    assert shape is not None
    costs = Costs(graph=graph, cluster=cluster, shapes={"actor": shape})
    source, engine = plan.instance("actor@train"), plan.instance("actor@gen/sglang")
    sent = dict(lent_update(source, engine, costs).beside)["gather and broadcast"]
    whole, kind = shape.parameters * 2, cluster.kind
    # All of it by one card, 16 of the 24 ranks on another host; then by all cards of a host.
    one_by_one = whole * 16 / 24 / (kind.nic * kind.reached)
    by_host = whole / (8 * kind.nic * kind.reached)
    assert by_host < sent < by_host + one_by_one / 10


LORA = rf.LoRA(rank=8)
DEVICE = rf.SGLang(updates="device")


@pytest.mark.parametrize(
    ("devices", "engine", "gen", "lora", "transport"),
    [
        ("h100:1", "sglang", 0, None, "ipc"),
        ("h100:8", "sglang", 0, None, "ipc"),
        ("h100:8", "sglang", 4, None, "broadcast"),
        ("h100:16", "sglang", 8, None, "broadcast"),
        ("h100:8", DEVICE, 0, None, "ipc"),
        ("h100:8", STAGED, 0, None, "collective"),
        ("h100:8", rf.SGLang(updates="group"), 0, None, "collective"),
        ("h100:8", rf.SGLang(updates="disk"), 0, None, "collective"),
        ("h100:8", "sglang", 0, LORA, "collective"),
        ("h100:8", "vllm", 0, None, "ipc"),
        ("h100:8", "vllm", 4, None, "broadcast"),
        ("h100:8", rf.VLLM(updates="memory"), 4, None, "collective"),
        ("cpu:2", "vllm", 1, None, "copy"),
        ("cpu:2", rf.VLLM(updates="device"), 1, None, "broadcast"),
        ("h100:8", None, 4, None, "collective"),
        ("cpu:2", "sglang", 1, None, "copy"),
        ("cpu:2", DEVICE, 0, None, "ipc"),
        ("cpu:2", DEVICE, 1, None, "broadcast"),
    ],
)
def test_transports_by_placement(
    devices: str, engine: object, gen: int, lora: rf.LoRA | None, transport: str
) -> None:
    """A plan that says another one is refused, where its bytes would be others for them too."""
    plan = planned("qwen2.5-0.5b", devices, engine, gen=gen, lora=lora)
    action = reshard(plan)
    assert transport == action.transport
    assert not verify(plan, STAGES[-1])
    others: tuple[Transport, ...] = ("copy", "shared memory", "collective", "ipc", "broadcast")
    for other in (each for each in others if each != transport):
        wrong = [replace(a, transport=other) if a is action else a for a in plan.actions]
        said = verify(replace(plan, actions=tuple(wrong)), STAGES[-1])
        assert any(text.endswith(f"goes by {other}, not by {transport}") for text in said)


def test_adapters_do_not_come_by_the_device() -> None:
    with pytest.raises(PlanError, match=r"adapters \(lora=\) cannot reach .* by device"):
        planned("qwen2.5-0.5b", "h100:8", DEVICE, lora=LORA)
