"""Backwards in two halves: the order of ZB-H1, Qi et al., arXiv:2401.10241, section 2.1."""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rlflow.engines.hf.stages.turns import turns
from rlflow.scheduler.costs.ranks.pipeline import bubble, through_stages

# Exact in binary, so that sums are.
SECONDS = st.integers(1, 16).map(lambda n: n / 4)


def finished(orders, seconds):
    """When each rank is done, of a `(forward, backward, weights)` seconds each.

    A rank waits for a forward's hidden state and for a backward's gradient, which come in the order
    in which they were sent; it asserts that these are of the micro-batch of its turn.
    """
    count = len(orders)
    left = [deque(order) for order in orders]
    there, back = ([deque[tuple[int, float]]() for _ in orders] for _ in range(2))
    clocks = [0.0] * count
    while any(left):
        moved = False
        for rank, order in enumerate(left):
            while order:
                turn, start = order[0], clocks[rank]
                forward = turn.way == "forward"
                inbox = there[rank] if forward else back[rank]
                edge = rank == 0 if forward else rank == count - 1
                if turn.way != "weights" and not edge:
                    if not inbox:
                        break
                    micro, came = inbox.popleft()
                    assert micro == turn.micro
                    start = max(start, came)
                halves = dict(zip(("forward", "backward", "weights"), seconds[rank], strict=True))
                lasts = halves[turn.way]
                if rank == 0 and turn.way == "backward":  # All of it.
                    lasts += halves["weights"]
                clocks[rank] = start + lasts
                target = rank + 1 if forward else rank - 1
                if turn.way != "weights" and 0 <= target < count:
                    (there if forward else back)[target].append((turn.micro, clocks[rank]))
                order.popleft()
                moved = True
        assert moved, "every rank waits for another"
    assert not any(there)
    assert not any(back)
    return clocks


def orders_of(passes, count):
    return [list(turns(passes, place, count, split=True)) for place in range(count)]


@given(st.integers(2, 7), st.integers(1, 20))
def test_each_micro_batch_goes_there_and_back_before_its_weights(count, passes):
    """And no rank keeps anything of more than the first one of one forward, one backward."""
    for place, order in enumerate(orders_of(passes, count)):
        ways = ("forward", "backward", "weights") if place else ("forward", "backward")
        assert len(order) == len(set(order)) == len(ways) * passes
        under_way: dict[int, int] = {}
        for turn in order:
            assert under_way.get(turn.micro, 0) == ways.index(turn.way)
            under_way[turn.micro] = ways.index(turn.way) + 1
            assert sum(done < len(ways) for done in under_way.values()) <= min(count, passes)
        assert under_way == dict.fromkeys(range(passes), len(ways))
        begun = [turn.way for turn in order].index("backward")
        assert begun <= count - place


@given(st.integers(2, 7), st.integers(1, 20), SECONDS, SECONDS, SECONDS)
def test_ranks_wait_for_as_long_as_the_paper_says(count, passes, forward, backward, weights):
    """(p - 1) (F + B - W) of work that is alike, its table 1; W is no longer than F or B."""
    weights = min(forward, backward, weights)
    done = max(finished(orders_of(passes, count), [(forward, backward, weights)] * count))
    work = passes * (forward + backward + weights)
    fills = min(passes - 1, count - 1)
    assert done - work == (count - 1) * (forward + backward) - fills * weights
    each, late = [work] * count, [passes * weights] * count
    assert through_stages(each, passes, 0.0, late=late) == pytest.approx(done)
    assert bubble(each, passes, late=late) == pytest.approx(1 - work / done)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=2, max_size=6), st.integers(0, 20))
def test_unequal_stages_wait_for_nobody_for_ever(seconds, more):
    """And are done no later than where backwards are whole."""
    seconds = [(f, b, min(f, b, w)) for f, b, w in seconds]
    count = len(seconds)
    split = max(finished(orders_of(count + more, count), seconds))
    whole = [list(turns(count + more, place, count)) for place in range(count)]
    joined = [seconds[0], *((f, b + w, 0.0) for f, b, w in seconds[1:])]
    assert split <= max(finished(whole, joined))


def test_order_of_a_rank():
    told = {"forward": "F", "backward": "B", "weights": "W"}
    order = " ".join(f"{told[t.way]}{t.micro}" for t in turns(4, 1, 3, split=True))
    assert order == "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3"
