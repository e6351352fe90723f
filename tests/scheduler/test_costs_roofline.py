"""Rooflines by hand and against public figures: decoding and training a 7B model on H100."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlflow.graph.placement import Recompute
from rlflow.modelfiles.chunks import CHUNK_BYTES, MOST, chunk_tokens
from rlflow.scheduler.costs.lengths import (
    Load,
    ResponseLengths,
    attended_pairs,
    full_lengths,
)
from rlflow.scheduler.costs.ranks.rank_memory import SUMMED
from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.costs.rows.uneven import fullest
from rlflow.scheduler.costs.serving import Serving
from rlflow.scheduler.devices.cluster import Cluster, cpu_cluster
from rlflow.scheduler.devices.collectives import ALONE, group_of
from rlflow.scheduler.devices.efficiency import CACHE_READ, DRAWN_BYTES, RAMP, SCORED_BYTES
from rlflow.scheduler.devices.hardware import KINDS, cpu_kind
from rlflow.scheduler.models.shapes import known_shape
from rlflow.scheduler.plan.plan import MICRO_TOKENS

HOST = Cluster(kind=KINDS["h100"], count=8)
SEVEN_B = Roofline(kind=KINDS["h100"], shape=known_shape("qwen2.5-7b"), size=2)
SHARED = replace(SEVEN_B, tp=group_of(HOST, range(2)))
SHARDED = replace(SEVEN_B, fsdp=group_of(HOST, range(8)), gathers=True)
BATCH = Load(rows=128, prompts=16, prompt=256, lengths=ResponseLengths(2048, 1024.0, 0.6), peers=8)


# A launch of 4 us, and the operators of a step of 28 layers at 1 us each.
OPERATORS = 4e-6 + (28 * 48 + 101) * 1e-6


def test_a_decode_step_of_64_rows_takes_7_to_10_milliseconds() -> None:
    """15.2 GB of weights at 80 % and 2.6 GB of keys and values at 65 % of 3.35 TB/s: 6.9 ms.

    And 360 kernels that begin and end, the logits, and 1 us of the device for each operator.
    """
    weights, cache = 7_615_616_512 * 2, 64 * 700 * 2 * 28 * 4 * 128 * 2
    logits = 64 * 152_064 * DRAWN_BYTES
    beside = 360 * RAMP + OPERATORS

    assert 7e-3 < SEVEN_B.decoding()(64, 700) < 10e-3
    assert SEVEN_B.decoding()(64, 700) == pytest.approx(
        (weights + logits) / (0.8 * 3.35e12) + cache / (CACHE_READ * 3.35e12) + beside
    )


def test_decoding_is_bound_by_computing_for_many_rows() -> None:
    rows = 4096
    logits = rows * 152_064 * DRAWN_BYTES / (0.8 * 3.35e12)
    cache = rows * 57_344 / (CACHE_READ * 3.35e12)

    beside = logits + cache + 360 * RAMP + OPERATORS
    assert SEVEN_B.decoding()(rows, 1) == pytest.approx(SEVEN_B.computed(rows, rows, 0) + beside)
    assert SEVEN_B.decoding()(rows, 1) > SEVEN_B.decoding()(64, 1)


@pytest.mark.parametrize(
    ("kind", "shape", "tp", "rows", "seconds"),
    [
        ("h100", "qwen2.5-72b", 2, 1, 30.9e-3),  # vLLM, 128 and 1,024 tokens at concurrency 1
        ("h200", "llama-3.1-8b", 1, 8, 6.5e-3),  # vLLM's latency benchmark, 128 tokens in 0.83 s
    ],
)
def test_steps_of_engines_are_near_published_ones(kind, shape, tp, rows, seconds) -> None:
    cluster = Cluster(kind=KINDS[kind], count=8)
    group = group_of(cluster, range(tp)) if tp > 1 else ALONE
    roof = Roofline(kind=KINDS[kind], shape=known_shape(shape), size=2, tp=group)
    engine = replace(roof, serving=Serving(captured=512))

    assert 0.8 < engine.decoding()(rows, 128) / seconds < 1.25


def test_two_ranks_decode_faster_but_not_twice_as_fast() -> None:
    one, two = SEVEN_B.decoding()(64, 700), SHARED.decoding()(64, 700)

    assert 0.5 * one < two < 0.75 * one


def test_a_small_model_is_bound_by_its_launches() -> None:
    tiny = replace(SEVEN_B, shape=known_shape("qwen2.5-0.5b"))
    many = replace(tiny, kind=replace(tiny.kind, launch=1e-5))

    assert many.decoding()(1, 10) == pytest.approx((24 * 48 + 101) * 1e-5)


def test_training_reaches_about_half_of_the_peak() -> None:
    """6 flop a parameter and token over the time of an update on 8 ranks of one host."""
    even = replace(BATCH, lengths=full_lengths(1024))
    seconds = SHARDED.update(even, 7.6e9 * 4, recompute=False)
    reached = 6 * 7.6e9 * even.tokens / seconds / KINDS["h100"].flops

    assert 0.4 < reached < 0.55


@pytest.mark.parametrize(
    ("kind", "shape", "reached"),
    [
        ("a100", "qwen2.5-7b", 0.64),
        ("h100", "qwen2.5-7b", 0.46),
        ("h100", "qwen2.5-32b", 0.59),
    ],
)
def test_utilisation_follows_width_as_published_tables_have_it(kind, shape, reached) -> None:
    """LLM Foundry's tables for FSDP, rows of 2,048 tokens, of 7B and 30B.

    Smaller models are not compared: Qwen's vocabulary is three times as large as those of the
    tables, and weighs more in them.
    """
    roof = Roofline(kind=KINDS[kind], shape=known_shape(shape), size=2)
    load = Load(rows=32, prompts=32, prompt=1, lengths=full_lengths(2047))
    products = roof.kind.flops / (6 * (roof.shape.parameters - roof.shape.embedding / 2))

    found = load.tokens / products / roof.update(load, 0, recompute=False)
    assert 0.7 < found / reached < 1.3


def test_recomputing_costs_a_third_more_but_for_the_head() -> None:
    """The head is computed again in any case, for its chunks."""
    critic = replace(SEVEN_B, predicts=False)
    plain = critic.update(BATCH, 0, recompute=False)
    assert critic.update(BATCH, 0, recompute=True) == pytest.approx(4 / 3 * plain)


def test_ranks_wait_for_the_fullest_part_where_lengths_differ() -> None:
    """Of 16 prompts a part is balanced to less than a thousandth; of one it is not at all."""
    alone = replace(BATCH, prompts=1)
    even = replace(alone, lengths=full_lengths(1024))

    assert fullest(even) == 1.0
    assert fullest(replace(alone, peers=1)) == 1.0
    assert fullest(alone) > 1.05
    assert fullest(replace(alone, rows=16)) > fullest(alone)
    assert fullest(BATCH) == pytest.approx(1 + (fullest(alone) - 1) / 16**2, rel=0.2)


def test_pairs_of_uneven_rows_are_more_than_those_of_their_mean() -> None:
    even = replace(BATCH, lengths=full_lengths(1024))

    assert attended_pairs(even) == pytest.approx(even.pairs)
    assert 1.1 < attended_pairs(BATCH) / BATCH.pairs < 1.5


def test_floats_are_computed_without_tensor_cores() -> None:
    wide = replace(SEVEN_B, size=4)

    assert wide.computed(1e6, 0, 0) / SEVEN_B.computed(1e6, 0, 0) == pytest.approx(989 / 67)


def test_a_prefill_is_bound_by_computing_and_a_decode_by_reading() -> None:
    prompts = Load(rows=16, prompts=16, prompt=2048, lengths=full_lengths(1))

    assert SEVEN_B.rollout(prompts) == pytest.approx(
        SEVEN_B.passed(16 * 2048, 16, 16 * 2048**2 / 2) + SEVEN_B.decoding()(16, 2048.5)
    )


def test_a_rollout_of_one_length_is_steps_times_tokens() -> None:
    load = Load(rows=8, prompts=8, prompt=10, lengths=full_lengths(40))
    steps = sum(SEVEN_B.decoding()(8, 10 + position + 0.5) for position in range(40))

    assert SEVEN_B.rollout(load) == pytest.approx(steps + SEVEN_B.read(SEVEN_B.weights), rel=1e-6)


def test_a_long_tail_takes_longer_than_the_same_tokens_evenly() -> None:
    even = replace(BATCH, lengths=ResponseLengths(2048, 700.0, 0.1))
    tail = replace(BATCH, lengths=ResponseLengths(2048, 700.0, 1.0))

    assert SEVEN_B.rollout(tail) > 1.5 * SEVEN_B.rollout(even)


def test_ranks_that_share_parameters_gather_them_once_for_a_rollout() -> None:
    extra = SHARDED.rollout(BATCH) - SEVEN_B.rollout(BATCH)

    assert extra == pytest.approx(SHARDED.gathered())
    assert extra == pytest.approx(7 / 8 * 15.2e9 / 360e9, rel=0.05)


def test_the_cache_is_held_at_the_longest_whatever_the_mean() -> None:
    """2 x 28 layers x 4 heads x 128 x 2 bytes a token: 57,344."""
    holds = dict(SEVEN_B.rollout_holds(BATCH))

    assert 57_344 * 128 * (256 + 2048) == holds["KV cache"]
    short = replace(BATCH, lengths=ResponseLengths(2048, 10.0, 0.2))
    assert holds == dict(SEVEN_B.rollout_holds(short))


PAGED = replace(SEVEN_B, paged=True)


def test_a_paged_rollout_holds_a_pool_its_steps_and_their_graphs() -> None:
    """64 prompts of 2 blocks, 2 rows each of up to 16 blocks, half of those at once; 128 slots.

    A step's logits are there twice, recorded and not, and what it makes of a layer.
    """
    load = replace(BATCH, rows=128, prompts=64)
    holds = dict(PAGED.rollout_holds(load))
    logits = 128 * 152_064 * (2 + 8)

    assert (1 + 64 * 2 + 64 * 16) * 128 * 57_344 == holds["KV cache"]
    assert logits == holds["logits"]
    assert logits + 128 * PAGED.layers.passing == holds["graphs"]
    assert "graphs" not in dict(replace(PAGED, streamed=True).rollout_holds(load))
    assert holds["KV cache"] < 0.51 * dict(SEVEN_B.rollout_holds(load))["KV cache"]


def test_rows_of_a_paged_rollout_wait_beyond_five_hundred() -> None:
    load = replace(BATCH, rows=2048, prompts=256)

    assert 512 == PAGED.at_once(load)
    assert 2048 == SEVEN_B.at_once(load)
    assert 512 * 152_064 * 10 == dict(PAGED.rollout_holds(load))["logits"]
    assert PAGED.rollout(load) > 2 * PAGED.rollout(replace(load, rows=512, prompts=64))
    few = replace(PAGED, rows_at_once=100)
    assert 96 == few.at_once(load)
    assert few.rollout(load) > PAGED.rollout(load)


def test_a_paged_rollout_reads_the_prompts_of_rows_that_begin_together() -> None:
    """Of 256 prompts 64 at once, with 8 rows each in 512 slots."""
    held = dict(PAGED.rollout_holds(replace(BATCH, rows=2048, prompts=256)))
    assert int(64 * BATCH.prompt * PAGED.layers.passing) == held["activations"]


def test_a_replayed_step_takes_the_replays_of_its_kernels_at_least() -> None:
    """A few rows of a small model: launches decide without graphs, and else what is read."""
    small = replace(SEVEN_B, shape=known_shape("qwen2.5-0.5b"))
    paged = replace(small, paged=True)
    slow = replace(small.kind, launch=1e-5)

    assert (24 * 48 + 101) * 1e-5 == pytest.approx(replace(small, kind=slow).decoding()(4, 300))
    still = replace(small.kind, launch=0.0, replayed=0.0)
    read = replace(small, kind=still).decoding()(4, 300)
    assert paged.decoding()(4, 300) == pytest.approx(read + 4e-6 + (24 * 48 + 101) * 1e-6)
    assert small.overhead == replace(paged, streamed=True).launched(0.0)


def test_what_a_pass_holds_by_hand() -> None:
    """Ten rows of 30 + 20 tokens: four norms of 3584, twice 32 heads of 128, three of 18944.

    A backward finds those norms in float32 as well. A forward holds its layers or its logits, an
    update what its layers keep and logits, or one layer with what its backward makes.
    """
    load = Load(rows=10, prompts=10, prompt=30, lengths=ResponseLengths(20, 10.0))
    token = (4 * 3584 + 2 * 32 * 128 + 3 * 18_944) * 2
    forward = dict(SEVEN_B.pass_holds(load, train=False, recompute=False))
    train = dict(SEVEN_B.pass_holds(load, train=True, recompute=False))
    again = dict(SEVEN_B.pass_holds(load, train=True, recompute=True))

    kept = token + 8 * 3584
    longer = replace(load, prompt=3000)
    made = 3 * 18_944 * 2
    layers = dict(SEVEN_B.pass_holds(longer, train=False, recompute=False))
    assert {"logits": 200 * 152_064 * 8} == forward
    assert {"activations": 30_200 * token} == layers
    assert {"activations": 28 * 500 * kept, "logits": 200 * 152_064 * 8} == train
    assert 500 * 28 * 3584 * 2 == again["activations"]
    layer = dict(SEVEN_B.pass_holds(longer, train=True, recompute=True))
    assert {"activations": 30_200 * (kept + made + 28 * 3584 * 2)} == layer


def test_what_a_backward_computes_again_by_hand() -> None:
    """A critic's rows as before: of 28 layers some keep all, some inputs, some attention's too.

    A layer that is computed again comes when those after it are done. Its backward makes as much
    again of gate, up and their product.
    """
    load = Load(rows=10, prompts=10, prompt=30, lengths=ResponseLengths(20, 10.0))
    critic = replace(SEVEN_B, predicts=False)

    def held(recompute: Recompute) -> int:
        found = dict(critic.pass_holds(load, train=True, recompute=recompute))
        return found["activations"] - 500 * 3 * 18_944 * 2

    kept = (4 * 3584 + 2 * 32 * 128 + 3 * 18_944) * 2 + 8 * 3584
    assert held(20) == 500 * (8 * kept + 20 * 3584 * 2)
    assert held(27) == 500 * (kept + 27 * 3584 * 2)
    assert held(28) == held(True) == held(30)
    attended = 28 * (128 * 2 + 4)
    assert held("selective") == held(True) + 500 * 28 * attended


def test_time_to_compute_again_goes_by_layers_and_what_they_leave_out() -> None:
    critic = replace(SEVEN_B, predicts=False)
    none, half, selective, full = (
        critic.update(BATCH, 0, recompute=how) for how in (False, 14, "selective", True)
    )
    tokens, _, pairs = critic.ending(BATCH)
    attention = critic.passed(tokens, 0, pairs) - critic.passed(tokens, 0, 0)

    assert half - none == pytest.approx((full - none) / 2)
    assert full - selective == pytest.approx(attention)
    head = SEVEN_B.update(BATCH, 0, recompute=14) - half
    assert head == pytest.approx(SEVEN_B.update(BATCH, 0, recompute=False) - none)


def test_distributions_are_held_for_one_chunk() -> None:
    """On an accelerator: 882 tokens of 152,064 logits at 8 bytes; half as wide on two ranks.

    Of likeliest tokens, with twice as many numbers alive, half as many tokens.
    """
    cut = replace(SHARED, trains_vocabulary=True)
    short = Load(rows=100, prompts=100, prompt=1, lengths=ResponseLengths(20, 10.0))
    held = [dict(each.pass_holds(short, train=True, recompute=False)) for each in (SEVEN_B, cut)]

    assert [882 * 152_064 * 8, 1765 * 76_032 * 8] == [each["logits"] for each in held]
    assert 882 == chunk_tokens(152_064, 2)
    assert 441 == chunk_tokens(152_064, 2, numbers=MOST)
    assert max(each["logits"] for each in held) <= CHUNK_BYTES
    assert [None, 152_064 * 3584 * 4 // 2] == [each.get(SUMMED) for each in held]
    on_cpu = replace(SEVEN_B, kind=cpu_cluster(1).kind)
    tokens = min(BATCH.rows * BATCH.lengths.longest, MICRO_TOKENS)
    assert (
        tokens * 152_064 * 10
        == dict(on_cpu.pass_holds(BATCH, train=True, recompute=True))["logits"]
    )


def test_a_pass_holds_one_micro_batch() -> None:
    small = Load(rows=64, prompts=1, prompt=0, lengths=full_lengths(512))
    large = replace(small, rows=6400)

    assert SEVEN_B.pass_holds(small, train=True, recompute=True) == SEVEN_B.pass_holds(
        large, train=True, recompute=True
    )
    assert (1, 100) == (SEVEN_B.passes(small), SEVEN_B.passes(large))
    assert 64 * 512 == MICRO_TOKENS


def test_parameters_made_whole_are_held() -> None:
    shape = SHARDED.shape
    holds = dict(SHARDED.pass_holds(BATCH, train=False, recompute=False))

    assert (shape.embedding + 2 * shape.layer) * 2 == holds["gathered weights"]
    assert 2 * shape.parameters == dict(SHARDED.rollout_holds(BATCH))["gathered weights"]


def test_a_critic_has_no_logits() -> None:
    critic = replace(SEVEN_B, predicts=False)

    assert "logits" not in dict(critic.pass_holds(BATCH, train=True, recompute=False))
    assert critic.computed(1, 1, 0) < SEVEN_B.computed(1, 1, 0)


def test_layers_from_the_host_cost_its_link_every_step() -> None:
    away = replace(SEVEN_B, streamed=True)

    assert away.decoding()(1, 10) == pytest.approx(7_615_616_512 * 2 / (0.8 * 64e9))


def test_a_cpu_computes_after_it_launches_and_after_it_gathers() -> None:
    cpu = cpu_cluster(2, threads=1)
    alone = Roofline(kind=cpu.kind, shape=known_shape("qwen2.5-0.5b"), size=4)
    shared = replace(alone, fsdp=group_of(cpu, range(2)), gathers=True)
    load = Load(rows=2, prompts=2, prompt=8, lengths=full_lengths(8))

    assert alone.decoding()(1, 8) > alone.overhead + alone.read(alone.weights)
    assert shared.forward(load) == pytest.approx(alone.forward(load) + shared.gathered())


def test_a_cpu_reads_the_weights_of_a_product_and_multiplies_in_turn() -> None:
    """One row reads 4 bytes a parameter at 8 GB/s; 16 compute besides: 98 GFLOP/s."""
    kind = cpu_cluster(1, threads=1).kind
    cpu = Roofline(kind=kind, shape=known_shape("qwen2.5-0.5b"), size=4)
    read, drawn = cpu.weights / 8e9, 151_936 * 5e-9

    assert cpu.multiplied(1.0, 8e9) == pytest.approx(2.0)
    assert cpu.decoding()(1, 1) == pytest.approx(
        read + drawn + cpu.computed(1, 1, 1) + cpu.overhead, rel=1e-3
    )
    assert cpu.decoding()(16, 1) - cpu.decoding()(1, 1) == pytest.approx(
        15 * (drawn + cpu.computed(1, 1, 1)), rel=1e-2
    )


@pytest.mark.parametrize(("flags", "rate"), [(("avx512f", "avx512_bf16"), 170), (("avx512f",), 35)])
def test_a_cpu_multiplies_bfloat16_as_its_instructions_allow(
    flags: tuple[str, ...], rate: float
) -> None:
    assert cpu_kind(1e9, 2, 0.0, flags).rate(2) == 2 * rate * 1e9
    assert cpu_kind(1e9, 2, 0.0, flags).rate(4) == 2 * 98e9
    assert cpu_kind(1e9, 2, 0.0, ()).rate(2) == 2 * 18e9


def test_a_distribution_over_the_vocabulary_takes_time_on_a_cpu() -> None:
    kind = cpu_cluster(1, threads=1).kind
    policy = Roofline(kind=kind, shape=known_shape("qwen2.5-0.5b"), size=4)
    silent = replace(policy, kind=replace(kind, scored=0.0, learned=0.0))
    load = Load(rows=4, prompts=4, prompt=8, lengths=full_lengths(8))
    numbers = 32 * 151_936

    assert policy.forward(load) - silent.forward(load) == pytest.approx(numbers * 2e-9)
    more = policy.update(load, 0, recompute=False) - silent.update(load, 0, recompute=False)
    assert more == pytest.approx(numbers * 4e-9)


def test_the_gradient_of_a_head_waits_for_that_of_the_embedding_it_is() -> None:
    tied = replace(SEVEN_B, shape=known_shape("qwen2.5-0.5b"), trains_vocabulary=True)
    apart, frozen = replace(SEVEN_B, trains_vocabulary=True), replace(tied, trains_vocabulary=False)
    held = [
        dict(each.pass_holds(BATCH, train=True, recompute=False)).get("gradient of the embedding")
        for each in (tied, apart, frozen)
    ]

    assert [2 * 151_936 * 896 * 2, 152_064 * 3584 * 2, None] == held
    assert "gradient of the embedding" not in dict(
        tied.pass_holds(BATCH, train=False, recompute=False)
    )


def test_ranks_that_share_layers_share_their_products_and_add_them_up() -> None:
    load = Load(rows=4, prompts=4, prompt=100, lengths=full_lengths(100))
    computed = SHARED.computed(load.tokens, 400, load.pairs)

    assert computed == SEVEN_B.computed(load.tokens, 400, load.pairs) / 2
    agreed = 2 * 28 * SHARED.tp.all_reduce(800 * 3584 * 2)
    scored = 400 * 152_064 * SCORED_BYTES / (0.8 * 3.35e12) / 2
    passed = SHARED.passed(load.tokens, 400, load.pairs)
    assert computed < passed < SEVEN_B.passed(load.tokens, 400, load.pairs)
    assert SHARED.forward(load) == pytest.approx(passed + agreed + scored)


def test_an_update_gathers_twice_and_sums_gradients() -> None:
    """On CPU devices nothing overlaps, so that parts add up."""
    cpu = cpu_cluster(4, threads=1)
    shape = known_shape("qwen2.5-0.5b")
    alone = Roofline(kind=cpu.kind, shape=shape, size=4)
    two, load = group_of(cpu, [0, 1]), Load(rows=2, prompts=2, prompt=8, lengths=full_lengths(8))
    shared, twice = replace(alone, fsdp=two), replace(alone, replicas=two)
    base, sent = alone.update(load, 1e9, recompute=False), 25 * two.reduce_scatter(1e9 / 25)

    assert shared.update(load, 1e9, recompute=False) == pytest.approx(
        base + 2 * shared.gathered() + sent
    )
    assert twice.update(load, 1e9, recompute=False) == pytest.approx(base + two.all_reduce(1e9))


def test_ranks_send_gradients_of_all_that_they_share() -> None:
    """Each keeps an eighth of the sum, and sends the other seven; on PCIe that is what lasts."""
    slow = Cluster(kind=KINDS["l40s"], count=8)
    roof = replace(SHARDED, kind=slow.kind, fsdp=group_of(slow, range(8)), kept_whole=True)
    sent = roof.shared_out(4e9)
    assert sent == pytest.approx(8 * 4e9 * 7 / 8 / roof.fsdp.bandwidth, rel=0.02)
    few = Load(rows=1, prompts=1, prompt=8, lengths=full_lengths(8))
    seconds = [roof.update(few, size, recompute=False) for size in (4e9, 0.0)]
    none = roof.shared_out(0.0)
    assert seconds[0] - seconds[1] == pytest.approx(sent - none)


def test_an_optimizer_step_is_bound_by_its_memory() -> None:
    """Eight floats a parameter: three read and written, the gradient read twice."""
    assert SEVEN_B.step(1e9) == pytest.approx(32e9 / (0.8 * 3.35e12))


def test_a_backward_holds_the_gradients_of_what_is_whole() -> None:
    """On an accelerator in the place of activations, which are gone by then."""

    def gathered(roof: Roofline, load: Load, *, train: bool) -> int:
        return dict(roof.pass_holds(load, train=train, recompute=False))["gathered weights"]

    few = Load(rows=1, prompts=1, prompt=1, lengths=ResponseLengths(1, 1.0))
    on_cpu = replace(SHARDED, kind=cpu_cluster(1).kind)
    whole = gathered(SHARDED, BATCH, train=False)
    assert whole == gathered(SHARDED, BATCH, train=True)
    assert 1.9 * whole < gathered(SHARDED, few, train=True) < 2 * whole
    assert 2 * whole == gathered(on_cpu, BATCH, train=True)
    # A forward of few tokens holds most as it begins, with what came for embedding and head.
    begun = whole + 2 * SHARDED.shape.embedding
    holds = dict(SHARDED.pass_holds(few, train=False, recompute=False))
    assert sum(holds.values()) == begun
    assert gathered(on_cpu, few, train=False) == whole


def test_layers_that_stay_whole_are_gathered_once_and_held() -> None:
    """Not again for the backward; all weights, and the last layer as it came."""
    on_cpu = replace(SHARDED, kind=cpu_cluster(1).kind)
    kept = replace(on_cpu, kept_whole=True)
    saved = on_cpu.update(BATCH, 1e9, recompute=False) - kept.update(BATCH, 1e9, recompute=False)
    assert saved == pytest.approx(on_cpu.passes(BATCH) * on_cpu.gathered())
    held, again = (
        dict(roof.pass_holds(BATCH, train=True, recompute=False))["gathered weights"]
        for roof in (replace(SHARDED, kept_whole=True), SHARDED)
    )
    few = replace(BATCH, rows=1, prompts=1)
    whole = replace(SHARDED, kept_whole=True).pass_holds(few, train=True, recompute=True)
    assert held == dict(whole)["gathered weights"]
    shape = SHARDED.shape
    assert held == (shape.parameters + shape.layer) * 2
    assert again == (shape.embedding + 2 * shape.layer) * 2
    assert SHARDED.forward(BATCH) == replace(SHARDED, kept_whole=True).forward(BATCH)
