"""How engines serve rows: how many at once, by which graphs, under which keys."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace
from statistics import fmean

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import rlflow as rf
from rlflow.scheduler.costs import serving
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.lengths import Load, ResponseLengths, assumed, full_lengths, stages
from rlflow.scheduler.costs.measurement_keys import timed_options
from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.costs.serving import Serving, pool_size, serving_of
from rlflow.scheduler.devices.cluster import Cluster
from rlflow.scheduler.devices.hardware import KINDS, Kind
from rlflow.scheduler.engines.engines import with_pool
from rlflow.scheduler.models.shapes import known_shape
from rlflow.scheduler.observed import key_of
from rlflow.scheduler.plan.plan import Instance
from rlflow.scheduler.plan.text import plan_text
from tests.budget import examples
from tests.scheduler.examples import compiled_with, grpo
from tests.scheduler.test_engine_plans import colocated, costs_of

PREFILL = Serving().prefill
SEVEN_B = Roofline(kind=KINDS["h100"], shape=known_shape("qwen2.5-7b"), size=2)
SMALL = replace(SEVEN_B, shape=known_shape("qwen2.5-0.5b"))


def engine(options: rf.EngineOptions, tp: int = 1) -> Instance:
    return Instance(
        name="actor@g/x",
        model="actor",
        pool="g",
        devices=tuple(range(tp)),
        uses=("rollout",),
        trained=False,
        tp=tp,
        options=options,
    )


def costs_on(kind: Kind, count: int = 1) -> Costs:
    graph = grpo(every=0)
    shapes = dict.fromkeys(("actor", "ref"), known_shape("qwen2.5-7b"))
    return Costs(graph=graph, cluster=Cluster(kind=kind, count=count), shapes=shapes)


def served(options: rf.EngineOptions, kind: Kind = KINDS["h100"], tp: int = 1) -> Serving:
    found = serving_of(engine(options, tp), costs_on(kind, tp))
    assert found is not None
    return found


def steps(lengths: ResponseLengths, rows: int, room: float) -> float:
    return sum(s.tokens * s.goes_on for s in stages(lengths, rows, 1, room))


def test_whole_waves_of_a_fixed_length() -> None:
    """10 rows of 40 tokens, 4 at once: 4, 4 and 2."""
    found = stages(full_lengths(40), 10, 1, 4.0)
    assert 3 * 40 == sum(stage.tokens for stage in found)
    assert [4.0] * 80 + [2.0] * 40 == [stage.live for stage in found]
    assert [0.5, 39.5, 0.5] == [found[0].age, found[79].age, found[80].age]


def test_a_wave_of_two_lengths_by_hand() -> None:
    """Rows of 1 or 2 tokens, half each, in two of three places: the third begins with the second.

    Both places decode one token. Then a row has ended in one of them, in expectation: one
    place has half of a row's second token in it, and one begins anew.
    """
    lengths = ResponseLengths(2, 1.5, 0.6)
    first, second, third = stages(lengths, 3, 1, 2.0)
    assert (0.5, 2.0, 1.0, 0.0) == (first.age, first.live, first.goes_on, first.ended)
    alive = lengths.survival(1.0)
    assert pytest.approx(0.5, abs=1e-6) == alive
    assert pytest.approx((2 * alive + 1, (2 * alive * 1.5 + 0.5) / (2 * alive + 1))) == (
        second.live,
        second.age,
    )
    assert pytest.approx(alive) == third.goes_on


LENGTHS = st.one_of(
    st.builds(
        ResponseLengths,
        st.just(512),
        st.sampled_from([30.0, 200.0, 400.0]),
        st.sampled_from([0.2, 0.6, 1.0]),
    ),
    st.sampled_from([1, 7, 64, 200]).map(full_lengths),
    st.just(assumed(300)),
)


@settings(max_examples=examples(40))
@given(lengths=LENGTHS, rows=st.integers(1, 300), share=st.floats(0.05, 1.5))
def test_waiting_decodes_the_same_tokens_in_no_fewer_steps(
    lengths: ResponseLengths, rows: int, share: float
) -> None:
    room = float(max(int(rows * share), 1))
    apart, together = stages(lengths, rows, 1, room), stages(lengths, rows, 1)
    tokens = sum(s.tokens * s.live * s.goes_on for s in together)
    assert sum(s.tokens * s.live * s.goes_on for s in apart) == pytest.approx(tokens, rel=0.12)
    assert steps(lengths, rows, room) >= 0.95 * steps(lengths, rows, rows)
    assert max(s.live for s in apart) <= room * (1 + 1e-9)
    if room >= rows:
        assert apart == together


@pytest.mark.parametrize(("rows", "room"), [(96, 24), (96, 75), (40, 39), (64, 8)])
@pytest.mark.parametrize("spread", [0.3, 0.6, 1.0])
def test_waiting_takes_as_long_as_drawn_rows_do(rows: int, room: int, spread: float) -> None:
    """Rows of drawn lengths in so many places, each taken again as soon as it is free."""
    lengths, drawn = ResponseLengths(512, 250.0, spread), random.Random(rows)
    found = []
    for _ in range(30):
        places = [0.0] * room
        for _ in range(rows):
            heapq.heapreplace(places, places[0] + length_of(lengths, drawn.random()))
        found.append(max(places))
    assert steps(lengths, rows, room) == pytest.approx(fmean(found), rel=0.1)


def length_of(lengths: ResponseLengths, chance: float) -> int:
    """The length that a share `chance` of responses is longer than."""
    low, high = 0, lengths.longest
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if lengths.survival(middle) > chance else (low, middle)
    return low


def test_rows_wait_for_requests_and_for_the_pool() -> None:
    """A row has its response, 30 tokens in the mean, and its share of a prompt: 5 of 10."""
    load = Load(rows=64, prompts=32, prompt=10, lengths=ResponseLengths(60, 30.0))
    few = replace(SEVEN_B, serving=Serving(slots=16))
    tight = replace(SEVEN_B, serving=Serving(pool=35 * 9 + 34))
    both = replace(SEVEN_B, serving=Serving(slots=7, pool=35 * 9))
    assert (64, 16, 9, 7) == (
        SEVEN_B.at_once(load),
        few.at_once(load),
        tight.at_once(load),
        both.at_once(load),
    )
    assert 1 == replace(SEVEN_B, serving=Serving(pool=3)).at_once(load)
    assert SEVEN_B.rollout(load) < few.rollout(load) < tight.rollout(load) < both.rollout(load)


@pytest.mark.parametrize("legs", [2, 4])
def test_while_rows_wait_no_leg_is_over(legs: int) -> None:
    """One of those that wait may be the shortest; legs take as long as the whole."""
    load = Load(rows=64, prompts=64, prompt=10, lengths=ResponseLengths(512, 200.0))
    roof = replace(SEVEN_B, serving=Serving(slots=8))
    found = [roof.rollout(load, leg, legs) for leg in range(legs)]
    assert sum(found) == pytest.approx(roof.rollout(load))
    assert found[0] > 0.7 * sum(found)


def test_a_prompt_is_read_once_and_so_many_tokens_at_a_time() -> None:
    """8 samples of each prompt: one eighth of the products of 8 times as many prompts."""
    roof = replace(SEVEN_B, serving=Serving())
    shared = Load(rows=256, prompts=32, prompt=1024, lengths=full_lengths(1))
    apart = replace(shared, prompts=256)
    assert 8 * roof.prefill(shared) == pytest.approx(roof.prefill(apart))
    passes = 32 * 1024 / PREFILL
    tiny = replace(SMALL, serving=Serving())
    short = replace(shared, prompts=8, prompt=2 * 1024)
    assert 4 == passes
    assert 2 * tiny.overhead <= tiny.prefill(short)
    assert tiny.prefill(short) >= replace(tiny, serving=None).prefill(short)


def test_a_pass_from_a_graph_takes_fewer_launches() -> None:
    """26 times 12 kernels, 1 us each after one launch, or 20 us each; above 64 rows it is eager."""
    graphs = replace(SMALL, serving=Serving(captured=64))
    eager = replace(SMALL, serving=Serving())
    slow = replace(SMALL.kind, launch=2e-5)
    graphs, eager = (replace(each, kind=slow) for each in (graphs, eager))
    host = Serving().scheduled(1)
    read = replace(graphs, kind=replace(slow, launch=0.0, replayed=0.0)).decoding()(1, 10)
    assert 26 * 12 * 2e-5 + host == pytest.approx(eager.decoding()(1, 10))
    assert read + 2e-5 + 26 * 12 * 1e-6 == pytest.approx(graphs.decoding()(1, 10))
    assert graphs.decoding()(64, 10) < eager.decoding()(64, 10)
    assert graphs.decoding()(65, 10) == eager.decoding()(65, 10)


def test_what_engines_do_by_themselves() -> None:
    """SGLang's largest captured pass by memory and ranks, and no larger than its requests."""
    assert (2048, 256) == (served(rf.SGLang()).slots, served(rf.SGLang()).captured)
    assert 512 == served(rf.SGLang(), tp=4).captured
    assert 512 == served(rf.SGLang(), KINDS["b200"]).captured
    assert 16 == served(rf.SGLang(max_running_requests=16)).captured
    assert (16, 0) == (
        served(rf.SGLang(max_running_requests=16)).slots,
        served(rf.SGLang(cuda_graph=False)).captured,
    )
    assert (1024, 512) == (served(rf.VLLM()).slots, served(rf.VLLM()).captured)
    assert 256 == served(rf.VLLM(), KINDS["a100"]).slots == served(rf.VLLM(), KINDS["l40s"]).slots
    small = replace(KINDS["h100"], memory=24 * 2**30)
    assert 48 == served(rf.SGLang(), small).captured
    assert 2 * 2**20 * 256 == served(rf.SGLang()).graph_bytes


@pytest.mark.torch
def test_on_a_cpu_as_many_rows_as_the_engines_are_told() -> None:
    from rlflow.engines.process import vllm
    from rlflow.engines.process.sglang import arguments

    assert arguments.CPU_REQUESTS == vllm.CPU_REQUESTS == serving.AT_ONCE_ON_CPU


def test_a_pool_is_of_its_tokens_or_of_what_is_left() -> None:
    costs, weights = costs_on(KINDS["h100"]), 7_615_616_512 * 4

    def size(**options: float) -> float | None:
        return pool_size(engine(rf.SGLang(**options)), costs)

    each = 2 * SEVEN_B.cache_bytes  # in float32
    assert size() is None
    assert 40 * each == size(max_total_tokens=40)
    half = 81559 * 2**19
    assert half - weights == size(mem_fraction_static=0.5)
    assert 40 * each == size(mem_fraction_static=0.5, max_total_tokens=40)
    assert 0.0 == size(mem_fraction_static=0.05)
    assert (half - weights) / each == served(rf.SGLang(mem_fraction_static=0.5)).pool


def test_keys_have_what_changes_the_time_of_an_engine() -> None:
    assert {} == timed_options(rf.SGLang(max_total_tokens=9, python="p", memory_saver=True))
    assert {"cuda_graph": False} == timed_options(
        rf.SGLang(cuda_graph=False, mem_fraction_static=0.5)
    )
    found = {}
    for name, options in {
        "plain": rf.SGLang(),
        "pool": rf.SGLang(max_total_tokens=4000),
        "torch": "torch",
        "eager": rf.SGLang(cuda_graph=False),
        "few": rf.SGLang(max_running_requests=4),
        "tight": rf.SGLang(max_total_tokens=40),
    }.items():
        compiled = compiled_with(grpo(every=0), colocated(options))
        action = compiled.plan.action("actor.rollout")
        found[name] = str(key_of(compiled.plan, costs_of(compiled), action))
    assert found["plain"] == found["pool"]
    assert 5 == len(set(found.values()))
    assert " 4 at once" in found["few"]
    assert "at once" not in found["plain"]


def test_notes_say_which_rows_wait() -> None:
    few = colocated(rf.SGLang(max_running_requests=3))
    text = plan_text(compiled_with(grpo(), few).plan)
    assert "3 of 16 rows of actor.rollout and 3 of 16 rows of eval at once" in text
    assert "at once" not in plan_text(compiled_with(grpo(), colocated()).plan)


@settings(max_examples=examples(20))
@given(tokens=st.integers(13, 400), requests=st.integers(1, 40))
def test_less_room_never_makes_a_rollout_faster(tokens: int, requests: int) -> None:
    compiled = compiled_with(grpo(every=0), colocated())
    plan, costs = compiled.plan, costs_of(compiled)
    node = plan.graph.node("actor.rollout")
    roomy = plan.instance("actor@all/sglang")
    options = rf.SGLang(max_total_tokens=tokens, max_running_requests=requests)
    tight = with_pool(replace(roomy, options=options), [node], 10**9, costs)
    assert costs.run(node, tight, 1).seconds >= 0.97 * (costs.run(node, roomy, 1).seconds or 0)
