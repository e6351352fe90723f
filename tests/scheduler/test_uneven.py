"""What the slowest replica and the fullest part have more than the mean, beside drawn lengths."""

from __future__ import annotations

import heapq
import math
import random
from statistics import fmean

import numpy as np
import pytest

from rlflow.runtime.execute.rows import balanced
from rlflow.scheduler.costs.lengths import Load, ResponseLengths, full_lengths, stages
from rlflow.scheduler.costs.rows.uneven import fullest, slowest_replica

PROMPT = 100


def drawn(source: random.Random, longest: int, spread: float, rows: int) -> list[float]:
    """Log-normal lengths that are cut off, with a median of a third of the longest."""
    middle = math.log(longest / 3)
    return [
        float(min(max(round(source.lognormvariate(middle, spread)), 1), longest))
        for _ in range(rows)
    ]


def lengths_of(longest: int, spread: float) -> ResponseLengths:
    """The same in the mean, as plans know them."""
    seen = drawn(random.Random(1), longest, spread, 40_000)
    return ResponseLengths(longest, fmean(seen), spread)


def step(rows: float, context: float) -> float:
    """Milliseconds: of 96 rows reading keys and values takes about as long as weights."""
    return 6.0 + 0.02 * rows + 2e-4 * rows * context


def decoded(lengths: list[float], room: int) -> float:
    """Milliseconds of one replica that begins a row whenever one of `room` has ended."""
    waiting, live, now, spent = lengths[room:], [(end, 0.0) for end in lengths[:room]], 0.0, 0.0
    heapq.heapify(live)
    while live:
        end = live[0][0]
        ages = fmean((now + end) / 2 - began for _, began in live)
        spent += (end - now) * step(len(live), PROMPT + ages)
        now = end
        heapq.heappop(live)
        if waiting:
            heapq.heappush(live, (now + waiting.pop(), now))
    return spent


def predicted(load: Load, room: float) -> tuple[float, float]:
    """Milliseconds as plans count them, and what they would be of replicas with even rows."""
    found = stages(load.lengths, load.rows, load.peers, room)
    taken = [step(stage.live, PROMPT + stage.age) for stage in found]
    even = sum(s.tokens * s.goes_on * t for s, t in zip(found, taken, strict=True))
    return slowest_replica(load, found, taken, step, room) * even, even


@pytest.mark.parametrize(
    ("rows", "replicas", "room"), [(2, 4, 2), (12, 8, 12), (96, 4, 96), (96, 16, 96), (96, 8, 24)]
)
def test_the_slowest_replica_takes_as_long_as_drawn_lengths_say(rows, replicas, room):
    """Within 3 %, and nearer than replicas whose live rows are the mean ones."""
    source, longest, spread = random.Random(rows * replicas), 600, 0.8
    draws = [
        max(decoded(drawn(source, longest, spread, rows), room) for _ in range(replicas))
        for _ in range(max(18_000 // (rows * replicas), 16))
    ]
    lengths = lengths_of(longest, spread)
    load = Load(rows=rows, prompts=rows, prompt=PROMPT, lengths=lengths, peers=replicas)
    found, even = predicted(load, float(room))

    assert found == pytest.approx(fmean(draws), rel=0.03)
    assert rows < 96 or abs(found - fmean(draws)) < abs(even - fmean(draws)) / 2


@pytest.mark.parametrize(
    ("groups", "parts", "most"), [(30, 24, 1.36), (54, 24, 1.17), (60, 24, 1.11), (80, 24, 1.095)]
)
def test_the_fullest_part_has_a_prompt_more_than_others(groups, parts, most):
    """Of groups of 8 rows that are shared out by their tokens; `most` is what is found of it."""
    lengths, source, shares = lengths_of(600, 0.6), random.Random(groups), []
    numbers = np.repeat(np.arange(groups), 8)
    for _ in range(6):
        tokens = np.array(drawn(source, 600, 0.6, 8 * groups), dtype=np.int64)
        sums = [tokens[part].sum() for part in balanced(tokens, numbers, parts)]
        shares.append(max(sums) / fmean(sums))
    mean = groups / parts
    load = Load(rows=8 * mean, prompts=mean, prompt=0, lengths=lengths, peers=parts, dealt=mean)

    assert fullest(load) == pytest.approx(fmean(shares), rel=0.06)
    assert fmean(shares) == pytest.approx(most, rel=0.03)


def test_equal_prompts_are_a_whole_number_of_each_part():
    even = Load(rows=20, prompts=2.5, prompt=9, lengths=full_lengths(50), peers=4, dealt=2.5)
    assert fullest(even) == pytest.approx(3 / 2.5)
