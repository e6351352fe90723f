"""The rule of continuous rollouts on a virtual clock, with rows of any lengths in any room.

An engine of so many rows plays it: it lets groups begin in their order, each row ends some steps
after it began, and an iteration whose groups are complete works ahead.
"""

from __future__ import annotations

import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.graph.rules.in_flight import Bound, Dealing, Pace


class Engine:
    """Groups of `n` rows, of which `room` are live, or one group's, on replicas.

    What it knows is what a checkpoint holds: begun, ended, and how many tokens live rows have. So
    every iteration deals what is in flight anew.
    """

    def __init__(self, bound: Bound, n: int, room: int, lengths, replicas: int = 1) -> None:
        self.replicas = replicas
        self.bound, self.n, self.room, self.lengths = bound, n, room, lengths
        self.begun: dict[int, int] = {}
        self.ended: list[int] = []
        self.live: dict[tuple[int, int], int] = {}
        self.next = self.steps = 0
        self.pace, self.paced = Pace(), True

    def length(self, group: int, sample: int) -> int:
        return self.lengths[(group * self.n + sample) % len(self.lengths)]

    def iterate(self, iteration: int) -> list[int]:
        before, here = self.steps, Counter(group for group, _ in self.live)
        self.dealing = Dealing(self.replicas, self.room)
        self.dealing.go_on(here)
        assert max(self.dealing.live) < self.dealing.total / self.replicas + self.n
        while not self.bound.met(self.begun, self.ended, iteration):
            self.begin(iteration)
            assert self.live, f"nothing decodes, and iteration {iteration} waits"
            self.step()
        while self.paced and self.steps - before < self.pace.least:
            self.begin(iteration)
            if len(self.live) < self.pace.few(self.room):
                break
            self.step()
            assert self.bound.met(self.begun, self.ended, iteration)
        self.pace = self.pace.after(self.steps - before)
        taken = self.bound.taken(self.begun, self.ended, iteration)
        age = {group: iteration - self.begun.pop(group) for group in taken}
        assert max(age.values()) <= self.bound.span
        self.ended = [group for group in self.ended if group not in age]
        return taken

    def begin(self, iteration: int) -> None:
        while self.next < self.bound.open_until(iteration):
            live = list(self.dealing.live)
            if not self.dealing.begins(self.next, self.n):
                assert self.live
                assert len(self.live) + self.n > self.room, "there is room"
                return
            assert min(live) == live[self.dealing.homes[self.next]]
            share = max(self.room, self.n) / self.replicas
            assert max(self.dealing.live) <= max([*live, share + self.n])
            self.begun[self.next] = iteration
            self.live |= {(self.next, s): self.length(self.next, s) for s in range(self.n)}
            self.next += 1

    def step(self) -> None:
        self.steps += 1
        self.live = {row: left - 1 for row, left in self.live.items()}
        for group, _ in (row for row, left in self.live.items() if not left):
            self.dealing.ends(group)
        for group in dict.fromkeys(group for (group, _), left in self.live.items() if not left):
            if not any(left for (other, _), left in self.live.items() if other == group):
                self.ended.append(group)
        self.live = {row: left for row, left in self.live.items() if left}
        by_home = Counter(self.dealing.homes[group] for group, _ in self.live)
        assert self.dealing.live == [by_home[home] for home in range(self.replicas)]


flows = st.builds(
    lambda batch, span, *rest: Engine(Bound(batch=batch, span=span), *rest),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 20),
    st.lists(st.integers(1, 40), min_size=1, max_size=23),
    st.integers(1, 3),
)


@given(flows, st.integers(1, 12))
def test_no_group_is_lost_or_used_twice_and_none_is_too_old(engine, iterations):
    bound, seen = engine.bound, []
    for iteration in range(iterations):
        taken = engine.iterate(iteration)
        assert bound.batch == len(taken)
        assert sorted(taken) == taken
        seen += taken
        # Back-pressure: however fast rows end, no more groups begin than leave in so many turns.
        assert engine.next <= bound.open_until(iteration)
        assert len(engine.begun) <= bound.span * bound.batch
    assert len(set(seen)) == len(seen)
    assert sorted([*seen, *engine.begun]) == list(range(engine.next))


@given(flows, st.integers(1, 10))
def test_a_group_leaves_within_its_span(engine, iterations):
    """Whatever is here in the end leaves in as many iterations, though nothing new begins."""
    for iteration in range(iterations):
        engine.iterate(iteration)
    here, seen = set(engine.begun), set()
    for iteration in range(iterations, iterations + engine.bound.span):
        seen |= set(engine.iterate(iteration))
    assert here <= seen


def test_who_would_be_too_old_is_waited_for_and_others_go_first_come():
    bound = Bound(batch=1, span=1)
    begun = {0: 0, 1: 0}
    assert bound.met(begun, [1], 0)
    assert [1] == bound.taken(begun, [1], 0)
    begun = {0: 0, 2: 1}
    assert not bound.met(begun, [2], 1)
    assert bound.met(begun, [2, 0], 1)
    assert [0] == bound.taken(begun, [2, 0], 1)


def test_as_many_leave_early_as_could_not_all_leave_in_their_last_iteration():
    """Three began in iteration 0 and one leaves in each: after one, two are left for two."""
    bound = Bound(batch=1, span=2)
    begun = {0: 0, 1: 0, 3: 1}
    assert not bound.met(begun, [3], 1)
    assert [1] == bound.taken(begun, [3, 1], 1)


def test_more_due_groups_than_a_batch_are_an_error():
    with pytest.raises(AssertionError, match="began more than 1 iterations before 3"):
        Bound(batch=1, span=1).taken({0: 0, 1: 3}, [0, 1], 3)


def test_longer_spans_need_fewer_steps_an_iteration():
    """One row in eight is eight means long: the steps of an iteration are its share of that."""
    lengths = [1, 1, 1, 1, 1, 1, 1, 57]
    steps = []
    for span in (1, 3, 7):
        engine = Engine(Bound(batch=8, span=span), 1, 8 * (span + 1), lengths)
        engine.paced = False
        for iteration in range(40):
            engine.iterate(iteration)
        steps.append(engine.steps / 40)
    assert steps[0] < 57 / 1.9
    assert steps[1] < 57 / 3.7
    assert steps[2] < 57 / 6.9


def test_who_works_ahead_has_iterations_that_are_alike():
    """Without, an iteration decodes little while its update runs, and the next one for both."""
    lengths = [3, 5, 2, 40, 1, 7, 4, 2, 6, 64, 3]
    found = []
    for paced in (False, True):
        engine = Engine(Bound(batch=8, span=1), 2, 16, lengths)
        engine.paced, turns = paced, []
        for iteration in range(80):
            before = engine.steps
            engine.iterate(iteration)
            turns.append(engine.steps - before)
        found.append(turns[20:])
    bursts, smooth = (statistics.pstdev(turns) for turns in found)
    assert smooth < 0.6 * bursts
    assert min(found[0]) < min(found[1])
    assert statistics.fmean(found[1]) < 1.3 * statistics.fmean(found[0])


def test_what_goes_on_is_dealt_anew_evenly():
    """Two long groups of one replica are on two in the next iteration."""
    dealing = Dealing(2, 13)
    dealing.go_on({3: 1, 5: 4, 6: 2, 7: 4})
    assert {5: 0, 7: 1, 6: 0, 3: 1} == dealing.homes
    assert [6, 5] == dealing.live
    assert 11 == dealing.total
    assert dealing.begins(8, 2)
    assert 1 == dealing.homes[8]
    assert not dealing.begins(9, 3)


@given(flows, st.integers(1, 8))
def test_what_leaves_when_is_the_same_for_any_number_of_replicas(engine, iterations):
    alone = Engine(engine.bound, engine.n, engine.room, engine.lengths)
    for iteration in range(iterations):
        assert alone.iterate(iteration) == engine.iterate(iteration)
        assert alone.steps == engine.steps
