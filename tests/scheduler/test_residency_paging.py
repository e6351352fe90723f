"""Which parts stay: against every other choice on small traces, and against LRU."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings

from rlflow.scheduler.memory.eviction import choose_residents, farthest, lru
from rlflow.scheduler.memory.eviction_search import EvictionSearch
from rlflow.scheduler.memory.intervals import Trace
from rlflow.scheduler.memory.prefetch import placed, shortened
from tests.budget import examples
from tests.scheduler.traces import fewest, random_trace, trace_of, traces


@given(trace=traces(equal=True))
def test_equal_sizes_move_the_fewest_bytes_there_are(trace: Trace) -> None:
    assert fewest(trace) == trace.moved(choose_residents(trace).stay)


@settings(max_examples=examples(200))
@given(trace=traces())
def test_what_is_proven_is_the_least(trace: Trace) -> None:
    found = choose_residents(trace)
    assert found.proven
    assert fewest(trace) == trace.moved(found.stay)


@given(trace=traces(length=30, parts=9))
def test_a_choice_fits_leaves_no_room_and_moves_no_more_than_others(trace: Trace) -> None:
    found = choose_residents(trace, effort=200)
    assert trace.fits(found.stay)
    for number in set(range(len(trace.gaps))) - found.stay:
        assert not trace.fits(found.stay | {number})
    for other in (lru(trace), farthest(trace)):
        assert not trace.fits(other) or trace.moved(found.stay) <= trace.moved(other)


@pytest.mark.parametrize("seed", range(60))
def test_the_ring_and_the_search_agree_on_equal_sizes(seed: int) -> None:
    """Two methods, neither of which knows the other; the search proves its answer."""
    trace = random_trace(Random(seed), equal=True, length=30, parts=8)
    search = EvictionSearch(trace, trace.filled(frozenset()), 10**6)
    assert search.left > 0
    assert search.cost == trace.moved(choose_residents(trace).stay)


def demand_paged(
    sizes: list[int], needs: list[tuple[int, ...]], budget: int, turns: int = 6
) -> int:
    """Bytes that LRU on demand moves in and out in the last of several turns."""
    recent: list[int] = []
    moved = 0
    for turn in range(turns):
        moved = 0 if turn == turns - 1 else moved
        for need in needs:
            moved += sum(2 * sizes[p] for p in need if p not in recent)
            recent = [p for p in recent if p not in need]
            while sum(sizes[p] for p in (*recent, *need)) > budget:
                recent.pop(0)
            recent += need
    return moved


@pytest.mark.parametrize("seed", range(40))
def test_lru_is_what_paging_on_demand_does(seed: int) -> None:
    random = Random(seed)
    sizes = [random.choice((3, 4, 7, 10)) for _ in range(5)]
    needs = [(random.randrange(5),) for _ in range(10)]
    used = [sizes[p] for p in {p for need in needs for p in need}]
    budget = max(*used, round(random.uniform(0.4, 1.0) * sum(used)))
    trace = trace_of(sizes, needs, budget)
    assert demand_paged(sizes, needs, budget) == trace.moved(lru(trace))
    assert trace.moved(choose_residents(trace).stay) <= trace.moved(lru(trace))


def test_farthest_next_use_leaves() -> None:
    """Two of three fit; c and b are used next, a last: a leaves once, LRU moves all three.

    a b c b c b c
    """
    trace = trace_of([10, 10, 10], [(0,), (1,), (2,), (1,), (2,), (1,), (2,)], 20)
    assert 40 == trace.moved(choose_residents(trace).stay)
    assert trace.moved(lru(trace)) >= 40


def test_a_gap_that_costs_nothing_leaves_before_one_that_does() -> None:
    """Part 1 is made anew before it is read: it leaves although it is used sooner."""
    needs = [(0,), (1,), (2,)]
    assert 40 == trace_of([10] * 3, needs, 20).moved(
        choose_residents(trace_of([10] * 3, needs, 20)).stay
    )
    free = trace_of([10] * 3, needs, 20, free=frozenset({(1, 1), (2, 2)}))
    assert 0 == free.moved(choose_residents(free).stay)


def test_small_parts_leave_where_a_large_one_would_do_with_more_bytes() -> None:
    """A third action needs 6 bytes more than there is: the part of 7 leaves, not that of 20."""
    trace = trace_of([20, 7, 9], [(0,), (1,), (2,)], 30)
    assert 2 * 7 + 2 * 9 == trace.moved(choose_residents(trace).stay)


@given(trace=traces())
def test_naps_are_placed_once_each_and_shrink_from_both_sides(trace: Trace) -> None:
    stay = choose_residents(trace).stay
    naps = shortened(trace, stay, [float(gap.cost) for gap in trace.gaps], [5.0] * trace.length)
    gone = set(range(len(trace.gaps))) - stay
    # What costs nothing to throw away may stay after all, where others that cost nothing left room.
    assert not any(trace.gaps[number].cost for number in gone - {nap.gap for nap in naps})
    assert not any(trace.gaps[nap.gap].cost for nap in naps if nap.gap in stay)
    for nap in naps:
        between = (*nap.before, *nap.places, *nap.behind)
        assert nap.places
        assert len(between) == len(trace.gaps[nap.gap].rows)
    spots = placed(trace, naps)
    assert sorted((s.nap.gap, s.wake) for s in spots) == [
        (nap.gap, wake) for nap in naps for wake in (False, True)
    ]
