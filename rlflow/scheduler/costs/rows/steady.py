"""A rollout that never drains: what an iteration of it decodes once as many begin as end.

It is played on a virtual clock of decoding steps: rows of drawn lengths, the same in every call,
begin as there is room, and groups leave by the rule that the engine follows,
`rlflow.graph.rules.in_flight`. Large batches are played as smaller ones with as much less room.
Replicas make their steps together, and each takes as long as that of the one with the most rows.
What a step takes, the model's roofline says.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from statistics import NormalDist, fmean
from typing import NamedTuple

from rlflow.graph.graph import Node
from rlflow.graph.roles import Recalling
from rlflow.graph.rules.bands import columns_read, first_narrow, moves_up
from rlflow.graph.rules.in_flight import Bound, Dealing, Pace
from rlflow.scheduler.costs.lengths import Load, ResponseLengths, Stage, location
from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.plan.row_layout import deals

MOST_GROUPS = 64
MOST_PLAYED = 1024
"""Groups, and rows, of an iteration as it is played."""
PLAYED = 32
"""Iterations that are counted, after as many as rows may live through, twice."""
APART = 1.15
"""Steps with numbers of live rows that differ by no more than this factor count as alike."""


@dataclass(frozen=True, slots=True)
class Steady:
    """What an iteration decodes, in the steady state in the mean.

    `rows` of a replica are in flight when it begins, with `age` tokens of response each, and are
    read anew. Prompts begin in so many `passes`. Live rows of a stage are those of the replica with
    the most; `widths` are the tokens of response that the embedded engine reads of each: those of
    the oldest row of its band.
    """

    stages: tuple[Stage, ...]
    widths: tuple[float, ...]
    rows: float
    age: float
    passes: float


def continuous_seconds(roof: Roofline, load: Load, span: int) -> float:
    """Mean seconds of an iteration of a rollout whose rows live through up to `span` updates.

    `load` is the share of one of its replicas. No more rows are live than in a rollout that drains.
    """
    return _seconds(roof, load, steady(_played(roof, load, span)))


def most_dealt(node: Node, load: Load) -> Load:
    """The most rows of a part: of several replicas that deal groups out a group more each."""
    if load.peers < 2 or not deals(node):
        return load
    rows = load.rows + load.rows / load.prompts
    return replace(load, rows=rows, prompts=load.prompts + 1)


def rollout_swings(roof: Roofline, node: Node, load: Load) -> tuple[float, ...]:
    """What single iterations of a continuous rollout take in a row, as parts of their mean."""
    if (lasting := node.role(Recalling)) is None or node.op.use != "rollout":
        return ()
    played = drawn_iterations(_played(roof, load, lasting.keep))
    found = [_seconds(roof, load, each) for each in played]
    mean = fmean(found)
    return tuple(round(each / mean, 4) for each in found)


def _played(roof: Roofline, load: Load, span: int) -> Undrained:
    n = max(round(load.rows / load.prompts), 1)
    groups, room = max(round(load.prompts * load.peers), 1), roof.at_once(load) * load.peers
    return Undrained(load.lengths, groups, n, room, span, load.peers, roof.serving is None)


def _seconds(roof: Roofline, load: Load, lasting: Steady) -> float:
    """Seconds to read what begins and, anew, what is in flight, and to decode."""
    total = roof.gathered() if roof.gathers else 0.0
    if lasting.passes:
        share = min(lasting.passes, load.prompts)
        some = replace(load, rows=load.rows / share, prompts=load.prompts / share)
        total += share * (roof.agreed(some.prompts * some.mean_prompt) + roof.prefill(some))
    if lasting.rows >= 1:
        seen = round(load.mean_prompt + lasting.age)
        known = replace(load, rows=lasting.rows, prompts=lasting.rows, prompt=seen, usual=None)
        total += roof.agreed(lasting.rows * seen) + roof.prefill(known)
    step = roof.stepping()
    for stage, width in zip(lasting.stages, lasting.widths, strict=True):
        # In the embedded engine every row has as many columns as the oldest of its band.
        age = width if roof.serving is None else stage.age
        total += stage.tokens * step(stage.live, load.mean_prompt + age)
    return total


def drawn_lengths(lengths: ResponseLengths, seed: int) -> Random:
    """A source of numbers for `drawn_length`."""
    return Random(f"{seed} {lengths.mean:g} {lengths.spread:g}")  # noqa: S311


def drawn_length(lengths: ResponseLengths, source: Random) -> int:
    """Tokens of a response as they are distributed, one at least."""
    if lengths.fixed:
        return max(round(lengths.mean), 1)
    if lengths.sample:
        return max(round(source.choice(lengths.sample)), 1)
    normal = NormalDist().inv_cdf(min(max(source.random(), 1e-12), 1 - 1e-12))
    length = math.exp(location(lengths) + lengths.spread * normal)
    return max(min(round(length), lengths.end), 1)


class Undrained(NamedTuple):
    """A rollout that never drains: `groups` groups of `n` rows an iteration, `room` live at most.

    No group leaves more than `span` iterations after that in which it began. Where rows `lie` in
    the embedded engine's cache, `widths` are counted.
    """

    lengths: ResponseLengths
    groups: int
    n: int
    room: float
    span: int
    replicas: int = 1
    lie: bool = True


@lru_cache(maxsize=256)
def drawn_iterations(asked: Undrained) -> tuple[Steady, ...]:
    """Iterations of a rollout, which together decode as many tokens as rows have in the mean."""
    lengths, groups, n, room, span, replicas, lie = asked
    played = max(min(groups, MOST_GROUPS, MOST_PLAYED // n), min(groups, replicas), 1)
    scale = groups / played
    dealt = replicas, max(int(room / scale), n)
    flow = _Flow(lengths, Bound(batch=played, span=span), n, dealt, lie=lie)
    for _ in range(2 * span + 1):
        flow.iterate()
    found = []
    for _ in range(PLAYED):
        flow.count()
        flow.iterate()
        spent = tuple(tuple(each) for each in flow.spent.values())
        found.append((spent, flow.rows, flow.age, flow.passes))
    tokens = sum(rows for spent, *_ in found for _, rows, *_ in spent)
    share = PLAYED * played * n * lengths.mean / max(tokens, 1)
    return tuple(
        Steady(
            tuple(
                Stage(ages / rows, share * steps, scale * most / steps, 1.0, 0.0)
                for steps, rows, ages, most, _ in spent
            ),
            tuple(widths / steps for steps, *_, widths in spent),
            scale * rows / replicas,
            age / max(rows, 1),
            passes,
        )
        for spent, rows, age, passes in found
    )


@lru_cache(maxsize=256)
def steady(asked: Undrained) -> Steady:
    """The mean of the iterations that are drawn."""
    found = drawn_iterations(asked)
    rows = fmean(each.rows for each in found)
    aged = fmean(each.rows * each.age for each in found)
    stages = tuple(
        replace(stage, tokens=stage.tokens / len(found)) for each in found for stage in each.stages
    )
    widths = tuple(width for each in found for width in each.widths)
    return Steady(stages, widths, rows, aged / max(rows, 1), fmean(each.passes for each in found))


class _Flow:
    """The rows in flight, at a step of their clock.

    `spent` has by about how many rows were live: steps, and over them the sums of the live rows, of
    their ages, of the live rows of the replica with the most, and of the tokens that are read of a
    row. `dealt` are the replicas, and the room that they have together.
    """

    def __init__(
        self,
        lengths: ResponseLengths,
        bound: Bound,
        n: int,
        dealt: tuple[int, int],
        *,
        lie: bool,
    ) -> None:
        self.lengths, self.bound, self.n, self.dealt = lengths, bound, n, dealt
        self.dealing = Dealing(*dealt)
        self.source = drawn_lengths(lengths, bound.span)
        self.iteration = self.now = self.next = self.sum_begun = 0
        self.live: list[tuple[int, int, int, int]] = []
        self.cache = _Cache() if lie else None
        self.begun: dict[int, int] = {}
        self.left: dict[int, int] = {}
        self.ended: list[int] = []
        self.pace = Pace()
        self.count()

    def count(self) -> None:
        """Begin to count what is spent."""
        self.spent: dict[int, list[float]] = defaultdict(lambda: [0.0] * 5)
        self.rows = self.age = 0.0
        self.passes = 0

    def iterate(self) -> None:
        """Decode until an iteration's groups are complete, work ahead, and let them leave."""
        self.rows += len(self.live)
        self.age += len(self.live) * self.now - self.sum_begun
        if self.cache is not None:
            self.cache.read_again()
        self.dealing = Dealing(*self.dealt)
        self.dealing.go_on({group: left for group, left in self.left.items() if left})
        known, first = -1, self.now
        while known == len(self.ended) or not self._met():
            known = len(self.ended)
            self._begin()
            self._step()
        while (ahead := first + self.pace.least - self.now) > 0:
            self._begin()
            if len(self.live) < self.pace.few(self.dealt[1]):
                break
            self._step(ahead)
        self.pace = self.pace.after(self.now - first)
        for group in self.bound.taken(self.begun, self.ended, self.iteration):
            del self.begun[group], self.left[group]
            self.ended.remove(group)
        self.iteration += 1

    def _met(self) -> bool:
        return self.bound.met(self.begun, self.ended, self.iteration)

    def _begin(self) -> None:
        until, before = self.bound.open_until(self.iteration), self.next
        while self.next < until and self.dealing.begins(self.next, self.n):
            self.begun[self.next], self.left[self.next] = self.iteration, self.n
            for row in range(self.next * self.n, (self.next + 1) * self.n):
                end = self.now + drawn_length(self.lengths, self.source)
                heapq.heappush(self.live, (end, self.next, row, self.now))
                if self.cache is not None:
                    self.cache.enter(row, self.now)
            self.sum_begun += self.n * self.now
            self.next += 1
        self.passes += self.next > before

    def _step(self, most: int | None = None) -> None:
        """Go on to the next end of a row, which leaves, or by as many steps if that is less."""
        left, live = self.live[0][0] - self.now, len(self.live)
        steps = left if most is None else min(left, most)
        if steps:
            most = max(self.dealing.live)
            spent = self.spent[round(math.log(most) / math.log(APART))]
            middle = self.now + steps / 2
            spent[0] += steps
            spent[1] += steps * live
            spent[2] += steps * (live * middle - self.sum_begun)
            spent[3] += steps * most
            if self.cache is not None:
                spent[4] += steps * self.cache.columns(middle) / live
        self.now += steps
        if steps < left:
            return
        _, group, row, began = heapq.heappop(self.live)
        self.sum_begun -= began
        if self.cache is not None:
            self.cache.leave(row)
        self.left[group] -= 1
        self.dealing.ends(group)
        if not self.left[group]:
            self.ended.append(group)


class _Cache:
    """How rows lie in the embedded engine's cache, each as the step at which it began.

    Rows in flight are read again when an iteration begins, in the order in which they began.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []
        self.places: dict[int, int] = {}
        self.narrow = 0

    def enter(self, row: int, now: int) -> None:
        """A row begins, behind those that are there."""
        self.places[row] = len(self.rows)
        self.rows.append((row, now))

    def leave(self, row: int) -> None:
        """A row ends, and others move up."""
        place, count = self.places.pop(row), len(self.rows)
        for to, source in itertools.pairwise(moves_up(place, count, self.narrow)):
            self.rows[to] = self.rows[source]
            self.places[self.rows[to][0]] = to
        self.rows.pop()
        self.narrow -= place < self.narrow

    def read_again(self) -> None:
        """All rows lie in their order."""
        self.rows.sort()
        self.places = {row: place for place, (row, _) in enumerate(self.rows)}

    def columns(self, now: float) -> float:
        """The tokens of response that are read of all rows in a step."""
        ages = [now - begun for _, begun in self.rows]
        self.narrow = first_narrow(ages)
        return columns_read(ages, self.narrow)
