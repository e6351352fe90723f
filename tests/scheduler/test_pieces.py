"""What a piece of a node costs: its key, its seconds beside those of the whole, its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph, Node
from rlflow.graph.rules.completion_order import ended_rows
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.lengths import (
    Load,
    ResponseLengths,
    after,
    assumed,
    before,
    between,
    full_lengths,
)
from rlflow.scheduler.costs.pieces import WHOLE, Piece, chunk_piece, piece_done
from rlflow.scheduler.costs.ranks.rank_memory import CACHE
from rlflow.scheduler.models.shapes import model_shape
from rlflow.scheduler.plan.plan import Chunk, Instance, Plan
from tests.budget import examples
from tests.scheduler.examples import SPLIT, compiled_with, grpo
from tests.scheduler.strategies import cluster

STREAMED = SPLIT.model_copy(update={"stream": 2})
GEN = Instance(
    name="actor@gen",
    model="actor",
    pool="gen",
    devices=(1,),
    uses=("rollout",),
    trained=False,
)


def costs_of(graph: Graph, kind: str = "h100") -> Costs:
    shapes = {model.name: model_shape(model) for model in graph.models}
    return Costs(graph=graph, cluster=cluster(kind, 2, 1e12), shapes=shapes)


def seconds(costs: Costs, node: Node | str, piece: Piece, parts: int = 1) -> float:
    found = costs.graph.node(node) if isinstance(node, str) else node
    cost = costs.run(found, GEN if found.model == "actor" else None, parts, piece)
    assert cost.seconds is not None
    return cost.seconds


@pytest.mark.parametrize(
    ("begins", "by", "ends_first"),
    [
        (True, "finish", True),
        (False, "finish", False),
        (True, "prompts", False),
        (False, "prompts", False),
        (False, None, False),
    ],
)
def test_a_rollout_cut_by_finish_reads_all_rows_and_makes_those_that_end(begins, by, ends_first):
    chunk = None if by is None else Chunk(index=1, count=4, by=by)
    of = compiled_with(grpo(), SPLIT).plan.action("actor.rollout")
    made = replace(of, chunk=chunk, begins=begins)
    assert ends_first is made.ends_first
    assert (None if ends_first else chunk) == made.piece_read


def test_a_piece_is_told_from_every_other_in_the_key_of_a_measurement() -> None:
    costs = costs_of(grpo())
    node = costs.graph.node("actor.rollout")
    pieces = [WHOLE, Piece(count=2), Piece(count=4), Piece(count=2, loose=True)]
    pieces += [Piece(count=4, index=i, loose=True) for i in range(4)]
    pieces += [Piece(count=n, index=i, leg=True) for n in (2, 4) for i in range(n)]
    keys = [costs.run_key(node, GEN, 1, piece) for piece in pieces]

    assert len(pieces) == len(set(keys)) == len({str(piece) for piece in pieces})
    assert "1/1" == str(WHOLE)
    assert "1/2" == str(Piece(count=2))
    assert "1/2 of the rows, as they end" == str(Piece(count=2, loose=True))
    assert "2/4 as rows end" == str(Piece(count=4, index=1, leg=True))


@pytest.mark.parametrize(
    ("chunk", "begins", "wanted"),
    [
        (None, False, WHOLE),
        (Chunk(index=1, count=4), False, Piece(count=4)),
        (Chunk(index=1, count=4), True, Piece(count=4)),
        (Chunk(index=1, count=4, by="finish"), False, Piece(count=4, index=1, loose=True)),
        (Chunk(index=1, count=4, by="finish"), True, Piece(count=4, index=1, leg=True)),
        (
            Chunk(index=1, count=4, by="groups"),
            False,
            Piece(count=4, index=1, loose=True, groups=True),
        ),
    ],
)
def test_only_pieces_of_whole_prompts_are_alike(
    chunk: Chunk | None, begins: bool, wanted: Piece
) -> None:
    assert wanted == chunk_piece(chunk, begins)


def test_an_action_is_costed_as_its_piece() -> None:
    plan = compiled_with(grpo(), STREAMED).plan
    done = {a.id: piece_done(a) for a in plan.actions if a.kind == "run"}

    first, second = (Piece(count=2, index=index, groups=True) for index in range(2))
    assert replace(second, leg=True) == done["actor.rollout[2/2]"]
    assert replace(first, loose=True) == done["ref.log_probs[1/2]"] == done["actor.update[1/2]"]
    assert replace(second, loose=True) == done["reward[2/2]"] == done["advantage[2/2]"]
    assert WHOLE == done["prompts"]
    assert [False, True] == [done[f"actor.update[{n}/2]"].steps for n in (1, 2)]


LOADS = st.builds(
    Load,
    rows=st.sampled_from([1.0, 8.0, 64.0, 512.0]),
    prompts=st.sampled_from([1.0, 8.0]),
    prompt=st.sampled_from([1, 16, 300]),
    lengths=st.one_of(
        st.sampled_from([8, 64, 1000]).map(assumed),
        st.builds(ResponseLengths, st.just(512), st.sampled_from([3.0, 90.0, 400.0]), st.just(1.0)),
        st.just(full_lengths(64)),
    ),
    peers=st.sampled_from([1, 4]),
)


@settings(max_examples=examples(60))
@given(load=LOADS, legs=st.sampled_from([1, 2, 3, 4, 8]), gathers=st.booleans())
def test_the_legs_of_a_rollout_take_as_long_as_the_whole_of_it(
    load: Load, legs: int, gathers: bool
) -> None:
    """But for the gathering of weights, which each does for itself."""
    costs = costs_of(grpo())
    shape = costs.shapes["actor"]
    assert shape is not None
    roof = replace(costs.roofline(GEN, shape), gathers=gathers)
    found = [roof.rollout(load, leg, legs) for leg in range(legs)]
    again = roof.gathered() if gathers else 0.0

    assert sum(found) == pytest.approx(roof.rollout(load) + (legs - 1) * again, rel=1e-9)
    assert min(found) >= again


def test_pieces_have_fewer_rows_the_longer_those_are() -> None:
    """4, 3, 2 and 1 tenths of the rows; of exponential lengths the later ones weigh the same."""
    pieces = [Piece(count=4, index=i, loose=True) for i in range(4)]
    assert [0.4, 0.3, 0.2, 0.1] == pytest.approx([piece.share for piece in pieces])
    assert [(0, 4), (4, 7), (7, 9), (9, 10)] == [
        (ended_rows(10, i, 4), ended_rows(10, i + 1, 4)) for i in range(4)
    ]
    lengths = ResponseLengths(1000, 200.0, 0.8)
    means = [between(lengths, *piece.bounds).mean for piece in pieces]
    assert means == sorted(means)
    whole_mean = sum(m * piece.share for m, piece in zip(means, pieces, strict=True))
    assert lengths.mean == pytest.approx(whole_mean, rel=1e-6)


@given(rows=st.integers(1, 5000), count=st.integers(1, 64))
def test_every_row_is_handed_on_once(rows: int, count: int) -> None:
    ends = [ended_rows(rows, done, count) for done in range(count + 1)]
    assert (0, rows) == (ends[0], ends[-1])
    assert ends == sorted(ends)
    assert ends[-1] - ends[-2] <= ends[1] - ends[0] + 1


def test_what_follows_reads_a_prompt_for_every_row() -> None:
    costs = costs_of(grpo(), "cpu")
    forward, reward = costs.graph.node("ref.log_probs"), costs.graph.node("reward")
    look = replace(GEN, name="ref@gen", model="ref", uses=("forward",))
    pieces = (Piece(count=2), Piece(count=2, loose=True))
    by_prompts, by_rows = (costs.load(forward, 1, piece) for piece in pieces)

    assert (8.0, 4.0) == (by_prompts.rows, by_prompts.prompts)
    assert (16 * 2 / 3, 8.0) == pytest.approx((by_rows.rows, by_rows.prompts))
    one, other = (costs.run(forward, look, 1, piece).seconds for piece in pieces)
    assert one < other
    assert seconds(costs, reward, pieces[0]) < seconds(costs, reward, pieces[1])


@given(
    longest=st.sampled_from([2, 8, 64, 100, 1000, 4096]),
    share=st.floats(0.02, 1.0),
    spread=st.sampled_from([0.0, 0.2, 0.6, 1.0, 2.0]),
    at=st.floats(0.05, 0.95),
)
def test_a_response_is_what_comes_before_a_pause_and_after_it(
    longest: int, share: float, spread: float, at: float
) -> None:
    lengths = ResponseLengths(longest, max(1.0, share * longest), spread)
    stop = min(max(1, int(at * longest)), longest - 1)
    first, (rest, goes_on) = before(lengths, stop), after(lengths, stop)

    assert goes_on == lengths.survival(stop)
    assert 1.0 <= first.mean <= first.longest <= stop
    assert 1.0 <= rest.mean <= rest.longest == longest - stop
    if lengths.fixed:
        assert first.mean + goes_on * rest.mean == pytest.approx(
            min(longest, stop) + goes_on * (longest - stop)
        )
    elif 1.0 < rest.mean < rest.longest and first.mean > 1.0:
        assert lengths.mean == pytest.approx(first.mean + goes_on * rest.mean)


def test_before_and_after_a_pause_by_hand() -> None:
    """Lengths all of 10: none ends within 4 tokens, all have 6 to go."""
    lengths = full_lengths(10)

    assert (full_lengths(4), 1.0) == (before(lengths, 4), after(lengths, 4)[1])
    assert full_lengths(6) == after(lengths, 4)[0]


def paused(stream: int = 1, *, pause_at: int = 4, staleness: int = 1) -> rf.Placement:
    changed = {"stream": stream, "pause_at": pause_at, "staleness": staleness}
    return SPLIT.model_copy(update=changed)


def test_a_rollout_in_two_takes_longer_by_what_is_read_again() -> None:
    one = compiled_with(grpo(), paused(pause_at=4), kind="h100").plan
    costs = costs_of(one.graph)
    first = costs.load(one.graph.node("actor.rollout"), 1, WHOLE)
    rest = costs.load(one.graph.node("actor.rollout.resumed"), 1, WHOLE)

    assert (4, 4) == (first.lengths.longest, rest.lengths.longest)
    assert rest.prompt == first.prompt + 4
    assert rest.prompts == rest.rows < first.rows
    entire = costs_of(grpo())
    parts = sum(seconds(costs, name, WHOLE) for name in ("actor.rollout", "actor.rollout.resumed"))
    assert parts > seconds(entire, "actor.rollout", WHOLE)


def test_memory_is_for_all_rows_going_on() -> None:
    """How many go on is an expectation; the cache has to hold them all."""
    plan = compiled_with(grpo(), paused(), kind="h100").plan
    costs = costs_of(plan.graph)
    entire = costs_of(grpo())
    held = costs.run(plan.graph.node("actor.rollout.resumed"), GEN, 1).holds
    most = entire.run(entire.graph.node("actor.rollout"), GEN, 1).holds

    assert dict(held)[CACHE] == dict(most)[CACHE]
    assert dict(held)["logits"] == dict(most)["logits"]


@pytest.mark.parametrize("piece", [WHOLE, Piece(count=2, loose=True), Piece(count=2)])
def test_who_goes_on_does_a_piece_of_that(piece: Piece) -> None:
    plan = compiled_with(grpo(), paused()).plan
    costs = costs_of(plan.graph, "cpu")
    load = costs.load(plan.graph.node("actor.rollout.resumed"), 1, piece)
    entire = costs.load(plan.graph.node("actor.rollout.resumed"), 1, WHOLE)

    assert load.rows == pytest.approx(max(entire.rows * piece.share, 1.0))
    assert load.most == pytest.approx(16 * piece.share)


def test_the_cache_is_memory_of_its_own_between_the_pieces() -> None:
    """At the same peak, as no other rollout runs: what a leg held while it ran it now keeps."""
    one, two = (compiled_with(grpo(), p).plan for p in (SPLIT, STREAMED))
    cache = two.part("actor.rollout/cache").size
    assert cache is not None
    assert cache > 0
    for leg in ("actor.rollout[1/2]", "actor.rollout[2/2]"):
        assert two.action(leg).peak == one.action("actor.rollout").peak
    assert two.action("eval").peak == one.action("eval").peak + cache


def test_a_budget_without_room_for_the_cache_is_refused_by_its_name() -> None:
    """New weights come to the device that keeps a rollout's cache from leg to leg."""
    one, two = (placed(stream, 1e12) for stream in (1, 2))
    cache, least = two.part("actor.rollout/cache").size, max(one.peaks.values())
    assert cache is not None
    assert max(two.peaks.values()) == least + cache

    assert placed(1, least).peaks == one.peaks
    with pytest.raises(PlanError) as caught:
        placed(2, least)
    text = str(caught.value)
    assert "reshard:actor@train->actor@gen" in text
    assert "actor.rollout/cache" in text


def placed(stream: int, memory: float) -> Plan:
    """The engine's device has least room: all others share what is trained."""
    placement = rf.Placement(
        pools={"train": 8, "gen": 1},
        assign={"*": rf.on("train", fsdp=8), "actor.rollout": rf.on("gen")},
        stream=stream,
    )
    return compile_plan(grpo(), placement, cluster("cpu", 9, memory)).plan


def test_unknown_shapes_leave_the_cache_unknown() -> None:
    plan = compiled_with(grpo(path="nobody/has-this"), STREAMED).plan
    part = plan.part("actor.rollout/cache")

    assert (None, 0) == (part.size, part.residual)


def test_the_likest_pieces_come_first() -> None:
    """A share of the rows as they end is like nothing but the whole."""
    for piece in (Piece(count=2, index=1, loose=True), Piece(count=2, index=1, leg=True)):
        assert (WHOLE,) == piece.relatives
    assert [1, 2, 8] == [piece.count for piece in Piece(count=4).relatives]
    assert [2, 4, 8] == [piece.count for piece in WHOLE.relatives]
