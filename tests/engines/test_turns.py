"""The order in which ranks of a pipeline pass micro-batches through their stages."""

from __future__ import annotations

from collections import defaultdict, deque

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rlflow.engines.hf.stages.turns import StageTurn, forwards, turns
from rlflow.modelfiles.layouts.stages import under_way
from rlflow.scheduler.costs.ranks.pipeline import bubble, through_stages


def played(
    orders: list[list[StageTurn]],
    virtual: int,
    back: float = 1.0,
    own: int | None = None,
    fill: float = 1.0,
) -> tuple[float, list[int]]:
    """When the last rank is done, and the most passes that each has under way.

    A forward takes one second, its backward `back`, and of micro-batches beyond its `own` ones such
    a part of it as a `fill` takes. Sends wait for nothing and come in their order, one queue for
    each pair of ranks and way; a rank waits for what its turn begins with. What comes first is to
    be what the turn is for.
    """
    count = len(orders)
    queues: dict[tuple[int, int, bool, bool], deque[tuple[int, int, float]]] = defaultdict(deque)
    clocks, places, open_ = [0.0] * count, [0] * count, [set[tuple[int, int]]() for _ in orders]
    most = [0] * count
    last = count * virtual - 1
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        moved = False
        for rank in range(count):
            if places[rank] == len(orders[rank]):
                continue
            turn = orders[rank][places[rank]]
            stage = turn.turn * count + rank
            ready = clocks[rank]
            source = stage + 1 if turn.back else stage - 1
            if 0 <= source <= last:
                queue = queues[source % count, rank, turn.back, source // count != turn.turn]
                if not queue:
                    continue
                micro, sent, when = queue.popleft()
                assert (micro, sent) == (turn.micro, source)
                ready = max(ready, when)
            if turn.back:
                open_[rank].remove((turn.micro, turn.turn))
            else:
                open_[rank].add((turn.micro, turn.turn))
            most[rank] = max(most[rank], len(open_[rank]))
            share = 1.0 if own is None or turn.micro < own else fill
            clocks[rank] = ready + share * (back if turn.back else 1.0)
            target = stage - 1 if turn.back else stage + 1
            if 0 <= target <= last:
                queue = queues[rank, target % count, turn.back, target // count != turn.turn]
                queue.append((turn.micro, stage, clocks[rank]))
            places[rank] += 1
            moved = True
        assert moved, "every rank waits for another"
    assert not any(queues.values())
    assert not any(open_)
    return max(clocks), most


@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 9), st.sampled_from([1.0, 2.0, 0.3]))
def test_nobody_waits_for_ever_and_all_that_is_sent_is_taken(count, virtual, rounds, back):
    """Each micro-batch goes once through each stage, there before it comes back."""
    passes = rounds if virtual == 1 else rounds * count
    orders = [list(turns(passes, place, count, virtual)) for place in range(count)]
    each = {(micro, turn) for micro in range(passes) for turn in range(virtual)}
    for order in orders:
        assert each == {(t.micro, t.turn) for t in order if not t.back}
        assert 2 * len(each) == len(order) == len(set(order))
        assert [t for t in order if not t.back] == list(forwards(passes, count, virtual))
    _, most = played(orders, virtual, back)
    for place, found in enumerate(most):
        assert found <= under_way(place, count, virtual) * virtual


@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 9))
def test_forwards_alone_wait_for_nobody_for_ever(count, virtual, passes):
    orders = [list(forwards(passes, count, virtual)) for _ in range(count)]
    for order in orders:
        order += [StageTurn(t.micro, virtual - 1 - t.turn, "backward") for t in order]
    played(orders, virtual)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_plans_count_the_bubble_that_the_turns_have(count, virtual, rounds):
    """(p - 1) / (v m) of the work, Narayanan et al. 2021, section 2.2."""
    passes = rounds * count
    orders = [list(turns(passes, place, count, virtual)) for place in range(count)]
    whole, most = played(orders, virtual, back=2.0)
    work = 3.0 * virtual * passes
    assert whole == pytest.approx(through_stages([work] * count, passes, 0.0, virtual))
    waits = (count - 1) / (virtual * passes)
    assert bubble([work] * count, passes, virtual) == pytest.approx(waits / (1 + waits))
    assert whole / work == pytest.approx(1 + waits)
    ahead = [min(passes, under_way(place, count, virtual)) * virtual for place in range(count)]
    assert [min(found, passes * virtual) for found in most] == pytest.approx(ahead)


@given(
    st.integers(2, 8),
    st.sampled_from([2, 4]),
    st.integers(1, 25),
    st.sampled_from([1.0, 2.0, 3.0]),
    st.sampled_from([0.0, 0.1, 0.25, 1.0]),
)
def test_plans_count_what_fills_up_the_last_round(count, virtual, own, back, fill):
    """What they wait for exactly, of two stages or one round; else a tenth of a pass for each."""
    passes = -(-own // count) * count
    orders = [list(turns(passes, place, count, virtual)) for place in range(count)]
    whole, _ = played(orders, virtual, back, own, fill)
    one = (1 + back) * virtual
    how = {"times": 1 + back, "fill": fill * one}
    found = through_stages([one * own] * count, own, 0.0, virtual, **how)
    exact = fill == 1 or (fill == 0 and (virtual == 2 or own <= count))
    near = 0.0 if exact else 0.1
    assert abs(found - whole) <= near * one * (passes - own) + 1e-9


def test_one_stage_on_each_rank_begins_a_backward_as_soon_as_it_can():
    assert "FFFBFBFBBB" == "".join("FB"[t.back] for t in turns(5, 1, 4))
    assert "FBFB" == "".join("FB"[t.back] for t in turns(2, 1, 2))
