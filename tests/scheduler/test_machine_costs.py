"""Costs that follow the machine: slots from memory, heads by kernels, exposed gathers, stragglers.

And what colocation pays: pages that an engine gives back, and a way to the host that is shared.
"""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import pytest

import rlflow as rf
from rlflow.modelfiles.chunks import chunk_bytes
from rlflow.scheduler.costs.lengths import Load, full_lengths
from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.devices import efficiency
from rlflow.scheduler.devices.cluster import Cluster
from rlflow.scheduler.devices.collectives import Group, as_shared
from rlflow.scheduler.devices.hardware import KINDS, Kind, cpu_kind
from rlflow.scheduler.engines.engines import with_pool
from rlflow.scheduler.engines.moving import CALL, PAGES, moving
from rlflow.scheduler.models.shapes import known_shape
from rlflow.scheduler.plan.plan import Cost
from tests.scheduler.test_serving import costs_on, engine, served

H100, CPU = KINDS["h100"], cpu_kind(1e11, 1, 1e11, ())
SEVEN_B = Roofline(kind=H100, shape=known_shape("qwen2.5-7b"), size=2, trains_vocabulary=True)
BATCH = Load(rows=64, prompts=8, prompt=512, lengths=full_lengths(2048))
FOUR = Group(ranks=4, bandwidth=3.6e11, start=1e-5, step=1e-6)


def test_sglang_takes_512_rows_for_each_context_in_its_pool() -> None:
    context = known_shape("qwen2.5-7b").context

    def slots(tokens: int) -> int | None:
        return served(rf.SGLang(max_total_tokens=tokens)).slots

    assert [2048, 3072, 4096] == [slots(times * context) for times in (1, 6, 9)]
    half = rf.SGLang(max_total_tokens=6 * context, context_length=context * 3 // 4)
    assert 4096 == served(half).slots


def test_vllm_is_told_its_rows_which_it_would_not_have_alone() -> None:
    costs = costs_on(H100)
    nodes = [node for node in costs.graph.nodes if node.op.use == "rollout"]
    found = with_pool(engine(rf.VLLM()), nodes, 70 * 10**9, costs).engine_plan
    assert 1024 == found.settings.max_running_requests
    said = with_pool(engine(rf.VLLM(max_running_requests=7)), nodes, 70 * 10**9, costs)
    assert 7 == said.engine_plan.settings.max_running_requests
    alone = with_pool(engine(rf.SGLang()), nodes, 70 * 10**9, costs)
    assert alone.engine_plan.settings.max_running_requests is None


def test_prompts_are_read_in_the_passes_of_an_engine() -> None:
    small = replace(H100, memory=24 * 2**30)
    found = [served(rf.SGLang(), kind).prefill for kind in (small, H100, KINDS["b200"])]
    assert [2048, 8192, 16384] == found
    assert 2048 == served(rf.VLLM()).prefill
    assert 4096 == served(rf.SGLang(args={"chunked_prefill_size": 4096})).prefill
    assert 8192 == served(rf.SGLang(args={"chunked_prefill_size": -1})).prefill


def test_kernels_of_the_head_move_each_logit_twice_and_five_times() -> None:
    """bfloat16, and torch's operators 44 and 110 bytes; the rest is what products take."""
    kernels = replace(SEVEN_B, by_rows=True)
    logit = SEVEN_B.shape.vocab / (H100.bandwidth * H100.reached)
    assert kernels.scored(1000) == pytest.approx(1000 * 4 * logit)
    assert kernels.learned(1000) == pytest.approx(1000 * 10 * logit)
    assert SEVEN_B.scored(1000) == pytest.approx(1000 * 44 * logit)
    assert SEVEN_B.forward(BATCH) - kernels.forward(BATCH) == pytest.approx(64 * 2048 * 40 * logit)


def test_what_kernels_hold_is_the_product_of_a_chunk() -> None:
    """Four times as many tokens in a GiB, so the head's gradient is summed a fourth as often."""
    kernels, vocabulary = replace(SEVEN_B, by_rows=True), SEVEN_B.shape.vocab
    assert 500 * vocabulary * 2 == kernels.predicted(500)
    assert 500 * vocabulary * 8 == SEVEN_B.predicted(500)
    assert 2**30 >= kernels.predicted(1e9) >= chunk_bytes(1e9, vocabulary, 2) > 0.99 * 2**30
    assert SEVEN_B.summed(20_000) == pytest.approx(4 * kernels.summed(20_000), rel=0.1)
    assert 0 == replace(SEVEN_B, trains_vocabulary=False).summed(20_000)
    assert 0 == replace(SEVEN_B, size=4).summed(20_000)


def test_a_plan_takes_kernels_where_they_compute_what_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def logits(kind: Kind = H100) -> int:
        costs, instance = costs_on(kind), replace(engine(rf.SGLang()), options=None)
        found = costs.run(costs.graph.node("ref.log_probs"), instance, 1).holds
        return dict(found)["logits"]

    by_kernels = logits()
    monkeypatch.setenv("RLFLOW_HEAD_KERNEL", "off")
    assert 2 * by_kernels == logits()  # Numbers are float32, one and two of each logit.


def test_one_layers_gather_is_beside_nothing() -> None:
    """Layer by layer: each comes while the one before is computed, the first before all."""
    gathered, computed, layers = 0.030, 0.100, SEVEN_B.shape.layers + 1
    arrived = done = 0.0
    for _ in range(layers):
        arrived += gathered / layers
        done = max(done, arrived) + computed / layers
    assert done == pytest.approx(SEVEN_B.beside(computed, gathered))
    assert SEVEN_B.beside(gathered, computed) == pytest.approx(done)
    sharded = replace(SEVEN_B, gathers=True, fsdp=FOUR)
    exposed = [
        replace(sharded, micro_tokens=tokens).forward(BATCH)
        - replace(SEVEN_B, micro_tokens=tokens).forward(BATCH)
        for tokens in (4096, 32768)
    ]
    assert exposed[0] > 4 * exposed[1] > 0


def test_the_slowest_of_many_is_where_drawn_ones_are() -> None:
    drawn = random.Random(7)
    for count in (8, 64):
        found = fmean(
            max(drawn.gauss(1, efficiency.DEVIATION) for _ in range(count)) for _ in range(2000)
        )
        assert found - 1 == pytest.approx(efficiency.slowest(count) - 1, rel=0.05)
    assert 1 == efficiency.slowest(1)


def test_two_devices_of_an_a100_server_have_one_way_to_their_host() -> None:
    cluster = Cluster(kind=KINDS["a100"], count=16, hosts=2)
    link = KINDS["a100"].host_link
    ways = [as_shared(cluster, on).host_link for on in ((0,), (0, 1), (0, 2), (7, 8), range(16))]
    assert [link, link / 2, link, link, link / 2] == ways
    assert H100 is as_shared(Cluster(kind=H100, count=8), range(8))
    costs = costs_on(KINDS["a100"], 8)
    one, four = (
        costs.copy(10**9 * len(on), len(on), devices=on, kind="wake").seconds or 0
        for on in ((0,), (0, 1, 2, 3))
    )
    assert four == pytest.approx(2 * one)


def test_an_engine_gives_its_pages_back_and_maps_them_again() -> None:
    """Of a pool nothing is copied; on a CPU memory is not given back."""
    nothing, own = Cost(seconds=0.0, moved=0, source="none"), engine(rf.SGLang())
    for kind, pages in ((H100, PAGES), (CPU, {"sleep": 0.0, "wake": 0.0})):
        for way, seconds in pages.items():
            found = moving(nothing, own, way, "pool, discard", costs_on(kind))
            assert CALL + seconds == found.seconds
