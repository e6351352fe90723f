"""How long responses get: a distribution, so that the longest of many rows costs what it costs.

Lengths are those of a log-normal variable cut off at the limit, as those of generated text roughly
are: many short ones, a long tail, some that reach the limit; or those that were seen. A `Load` is
the rows that a use sees, with such lengths, and how they lie in blocks of a pool: the embedded
engine on an accelerator allocates by the same rule, `rlflow.modelfiles.paging`. Knows no model.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import mul
from statistics import fmean, pvariance

from rlflow.modelfiles.paging import MOST_ROWS
from rlflow.scheduler.costs.rows.paged import PagedRows, paged_rows
from rlflow.scheduler.models.prompts import PictureTokens

ASSUMED_MEAN = 0.5
ASSUMED_SPREAD = 0.6
SPREADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0)
STEPS = 64
FEW_STEPS = 32
FEW_WAVES = 16
RARE = 1e-6
HALVINGS = 30
NEARLY_ALL = 0.98
# Lengths of a sample that are kept: the longest, and the others evenly.
MOST_SEEN = 2048


@dataclass(frozen=True, slots=True)
class Stage:
    """`tokens` decoding steps with `live` rows of `age` tokens each in expectation.

    `goes_on` is the probability that any row of any rank is still growing, `alone` that any of one
    rank is. `ended` is the share of rows that is over, counted from when the last one has begun.
    """

    age: float
    tokens: float
    live: float
    goes_on: float
    ended: float
    alone: float = 1.0


@dataclass(frozen=True, slots=True)
class ResponseLengths:
    """Tokens of a response: `mean` of those cut off at `end`; `spread` of their logarithm.

    A spread of 0 is a fixed length. None is longer than `longest`, the limit, for which there has
    to be memory; where it is known that they all end before, `reach` says where. A `sample` of
    lengths that were seen, in order and evenly taken, has their distribution instead.
    """

    longest: int
    mean: float
    spread: float = ASSUMED_SPREAD
    reach: int = 0
    sample: tuple[float, ...] = ()

    @property
    def end(self) -> int:
        """Tokens of the longest that there may be in expectation."""
        return self.reach or self.longest

    @property
    def fixed(self) -> bool:
        """Whether every response is taken to be as long as the others."""
        return self.spread <= 0 or self.mean >= NEARLY_ALL * self.end

    def survival(self, tokens: float) -> float:
        """The probability that a response is longer than so many tokens."""
        if tokens >= self.end:
            return 0.0
        if self.fixed:
            return 1.0 if tokens < self.mean else 0.0
        if self.sample:
            return 1 - bisect_right(self.sample, tokens) / len(self.sample)
        return 1.0 if tokens <= 0 else _longer(location(self), self.spread, tokens)

    def expected_longest(self, rows: float) -> float:
        """The expected length of the longest of so many responses: sum of 1 - F(t)^rows."""
        return sum(stage.tokens * stage.goes_on for stage in stages(self, rows, 1))


def assumed(longest: int) -> ResponseLengths:
    """Lengths where nothing is measured: half of the limit in the mean, a tail up to it."""
    return ResponseLengths(longest, max(1.0, ASSUMED_MEAN * longest))


def full_lengths(longest: int) -> ResponseLengths:
    """Responses that all reach the limit."""
    return ResponseLengths(longest, float(longest), 0.0)


def joined_lengths(parts: Sequence[tuple[float, ResponseLengths]], longest: int) -> ResponseLengths:
    """Lengths of several kinds of rows together, each with how many there are.

    The mean is exact; the spread is that of the kind which spreads the most.
    """
    rows = sum(many for many, _ in parts)
    mean = sum(many * kind.mean for many, kind in parts) / max(rows, 1)
    alike = len({kind.mean for _, kind in parts}) == 1
    spread = max(kind.spread for _, kind in parts) or (0.0 if alike else ASSUMED_SPREAD)
    reach = max(kind.end for _, kind in parts) if any(kind.reach for _, kind in parts) else 0
    return ResponseLengths(longest, mean, spread, reach)


def as_seen(longest: int, seen: Sequence[float]) -> ResponseLengths:
    """Lengths as they were seen, of `longest` tokens at the most, by an even sample of them."""
    ordered = sorted(max(min(length, float(longest)), 0.0) for length in seen)
    if len(ordered) > MOST_SEEN:
        step = len(ordered) / MOST_SEEN
        ordered = [*(ordered[int((n + 0.5) * step)] for n in range(MOST_SEEN - 1)), ordered[-1]]
    mean = max(fmean(ordered), 1.0)
    reach = max(math.ceil(ordered[-1]), 1)
    alike = ordered[0] == ordered[-1]
    spread = 0.0 if alike else math.sqrt(math.log(1 + pvariance(ordered) / mean**2))
    return ResponseLengths(longest, mean, spread, reach, () if alike else tuple(ordered))


def scaled_lengths(lengths: ResponseLengths, mean: float, spread: float) -> ResponseLengths:
    """Lengths with another mean and another spread, each times so much; fixed ones as they are."""
    if lengths.fixed:
        return lengths
    if lengths.sample:
        return as_seen(lengths.longest, [length * mean for length in lengths.sample])
    scaled = min(max(lengths.mean * mean, 1.0), NEARLY_ALL * lengths.end)
    return replace(lengths, mean=scaled, spread=lengths.spread * spread)


@lru_cache(maxsize=256)
def fitted_lengths(longest: int, mean: float, greatest: float, rows: int) -> ResponseLengths:
    """Lengths of a measured mean whose longest of `rows` is about as long as was measured.

    The spread is the one of a short list that comes nearest.
    """
    mean = min(max(mean, 1.0), float(longest))
    found = [ResponseLengths(longest, mean, spread) for spread in SPREADS]
    return min(found, key=lambda one: abs(one.expected_longest(rows) - greatest))


@lru_cache(maxsize=1024)
def stages(
    lengths: ResponseLengths, rows: float, ranks: int, room: float = math.inf
) -> tuple[Stage, ...]:
    """Decoding cut into stages, for `rows` rows on each of `ranks` ranks that end together.

    Of n rows, n S(t) live at token t in expectation, and any of n m rows on m ranks with
    probability 1 - (1 - S(t))^(n m); what lives on the rank that goes on is at least one row.
    Where a rank has `room` for fewer, the others wait, and one begins whenever one ends.
    """
    return tuple(
        _stages(lengths, rows, ranks) if rows <= room else _crowded(lengths, rows, ranks, room)
    )


def _stages(lengths: ResponseLengths, rows: float, ranks: int) -> Iterator[Stage]:
    for start, tokens in length_grid(lengths):
        alive = lengths.survival(start + tokens / 2 - 0.5)
        goes_on = _any_of(alive, rows * ranks)
        if goes_on < 1e-9:
            return
        live = max(rows * alive / goes_on, 1.0)
        alone = _any_of(alive, rows)
        yield Stage(start + tokens / 2, tokens, live, goes_on, 1 - alive, alone)


def _crowded(lengths: ResponseLengths, rows: float, ranks: int, room: float) -> Iterator[Stage]:
    """The same in equal steps: how many rows begin in each follows from those that end in it.

    Of those that began j steps before, S(j) live; the sum over j are all that live.
    """
    grid = list(length_grid(lengths))
    reach = max(start + tokens for start, tokens in grid if lengths.survival(start) > RARE)
    count = min(math.ceil(reach), STEPS if rows <= FEW_WAVES * room else FEW_STEPS)
    width = reach / count
    alive = [lengths.survival((step + 0.5) * width - 0.5) for step in range(count)]
    alive[0] = 1.0
    ended_before = [1 - share for share in alive]
    aged = [share * (step + 0.5) for step, share in enumerate(alive)]
    ending = [share - after for share, after in itertools.pairwise([*alive, 0.0])]
    begun, waiting = [room], rows - room
    while True:
        lately = begun[: -count - 1 : -1]  # Those that began last come first.
        live = sum(map(mul, lately, alive))
        goes_on = alone = 1.0
        if waiting <= 0:
            none_left = math.prod(map(pow, ended_before, lately))
            goes_on, alone = 1 - none_left**ranks, 1 - none_left
            if goes_on < 1e-9:
                return
        age = sum(map(mul, lately, aged)) * width / max(live, 1e-9)
        ended = 0.0 if waiting > 0 else 1 - live / rows
        yield Stage(age, width, min(max(live / goes_on, 1.0), room), goes_on, ended, alone)
        begun.append(min(sum(map(mul, lately, ending)), waiting))
        waiting -= begun[-1]


def _grid(longest: int) -> Iterator[tuple[float, float]]:
    """Starts and widths of at most `STEPS` stages that cover the tokens 0 to longest - 1."""
    count = min(longest, STEPS)
    for number in range(count):
        start = longest * number // count
        yield float(start), float(longest * (number + 1) // count - start)


def length_grid(lengths: ResponseLengths) -> Iterator[tuple[float, float]]:
    """The stages of all tokens that there may be, where the end is known narrower at the start.

    Most of those that are said end far before the longest: the kth of n starts at its square.
    """
    if not lengths.reach or lengths.end <= STEPS:
        yield from _grid(lengths.end)
        return
    starts = [lengths.end * number**2 / STEPS**2 for number in range(STEPS + 1)]
    for start, end in itertools.pairwise(starts):
        yield start, end - start


def _any_of(alive: float, rows: float) -> float:
    """1 - (1 - alive)^rows, without loss of digits for small `alive`."""
    return 1.0 if alive >= 1 else -math.expm1(rows * math.log1p(-alive))


def before(lengths: ResponseLengths, tokens: int) -> ResponseLengths:
    """Lengths of responses that are stopped after so many tokens."""
    if lengths.fixed:
        return full_lengths(min(tokens, lengths.longest))
    if lengths.sample:
        return as_seen(tokens, [min(length, tokens) for length in lengths.sample])
    if lengths.reach and lengths.reach <= tokens:
        return replace(lengths, longest=tokens)
    mean = sum(width * lengths.survival(start + width / 2 - 0.5) for start, width in _grid(tokens))
    return ResponseLengths(tokens, max(1.0, mean), lengths.spread)


def between(lengths: ResponseLengths, since: float, until: float) -> ResponseLengths:
    """Lengths of those responses that are the shares `since` to `until` to end."""
    if lengths.sample:
        count = len(lengths.sample)
        first, end = (round(share * count) for share in (since, until))
        return as_seen(lengths.longest, lengths.sample[first:end] or lengths.sample[-1:])
    mean = 0.0
    for start, width in length_grid(lengths):
        longer = lengths.survival(start + width / 2 - 0.5) - (1 - until)
        mean += width * min(max(longer / (until - since), 0.0), 1.0)
    return replace(lengths, mean=min(max(mean, 1.0), float(lengths.end)))


def after(lengths: ResponseLengths, tokens: int) -> tuple[ResponseLengths, float]:
    """How much longer those get that have so many tokens and go on, and what share does."""
    share = lengths.survival(tokens)
    if lengths.fixed or not share:
        return full_lengths(max(lengths.longest - tokens, 1)), share
    longest, end = lengths.longest - tokens, lengths.end - tokens
    if lengths.sample:
        return as_seen(longest, [each - tokens for each in lengths.sample if each > tokens]), share
    rest = (lengths.mean - before(lengths, tokens).mean) / share
    mean, reach = min(max(rest, 1.0), float(end)), end if lengths.reach else 0
    return ResponseLengths(longest, mean, lengths.spread, reach), share


def _longer(location: float, spread: float, tokens: float) -> float:
    return 0.5 * math.erfc((math.log(tokens) - location) / (spread * math.sqrt(2)))


@lru_cache(maxsize=256)
def location(lengths: ResponseLengths) -> float:
    """The location of the logarithm at which cut-off lengths have their mean, by bisection."""
    low, high = -(lengths.spread**2) - 3.0, math.log(lengths.end) + 4 * lengths.spread + 3.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _cut_off_mean(middle, lengths) < lengths.mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _cut_off_mean(location: float, lengths: ResponseLengths) -> float:
    """The mean of the lengths cut off at the limit: the sum over t of S(t), where S(0) is 1."""
    total = 0.0
    for start, tokens in length_grid(lengths):
        at = start + tokens / 2 - 0.5
        total += tokens * (1.0 if at <= 0 else _longer(location, lengths.spread, at))
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Rows of one part: `rows` of `prompts` prompts of `prompt` tokens, responses as `lengths`.

    `peers` parts end together. Rows of a prompt share it. `most` are the rows that there may be,
    where `rows` is how many there are in expectation; `prompt` is the longest prompt, and `usual`
    the mean one where that is known to be shorter. Of a prompt's tokens some stand for `pictures`.
    The mean part was `dealt` so many prompts before rows were cut into pieces; 0 is not known.
    """

    rows: float
    prompts: float
    prompt: int
    lengths: ResponseLengths
    peers: int = 1
    most: float | None = None
    usual: float | None = None
    pictures: PictureTokens | None = None
    dealt: float = 0.0

    @property
    def mean_prompt(self) -> float:
        """Tokens of a prompt, in expectation."""
        return self.prompt if self.usual is None else self.usual

    @property
    def tokens(self) -> float:
        """Tokens that a forward sees, in expectation."""
        return self.prompts * self.mean_prompt + self.rows * self.lengths.mean

    @property
    def most_tokens(self) -> float:
        """Tokens that a forward sees at the most."""
        return self.prompts * self.prompt + self.rows * self.lengths.longest

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row."""
        return self.prompt + self.lengths.longest

    @property
    def pairs(self) -> float:
        """Pairs of a token and one that it attends to, in expectation."""
        mean, prompt = self.lengths.mean, self.mean_prompt
        return self.prompts * prompt**2 / 2 + self.rows * mean * (prompt + mean / 2)

    def in_blocks(self, most: int = MOST_ROWS) -> PagedRows:
        """The most rows that there may be, in blocks of a pool for at most `most` at once."""
        rows = self.most or self.rows
        prompts = rows if self.most else self.prompts
        return paged_rows(rows, prompts, self.prompt, self.lengths.longest, most)

    def going_on(self, first: int) -> Load:
        """The rows that have not ended after `first` tokens: prompts that are as much longer."""
        rest, share = after(self.lengths, first)
        rows = max(self.rows * share, 1.0)
        longer = replace(self.with_prompt(first), lengths=rest)
        return replace(longer, rows=rows, prompts=rows, most=max(self.rows, rows))

    def later_turn(self, new: int) -> Load:
        """The rows of a later turn of so many tokens: what is there so far are their prompts."""
        before = max(self.lengths.longest - new, 0)
        return replace(self.with_prompt(before), prompts=self.rows, lengths=assumed(new))

    def with_prompt(self, more: int) -> Load:
        """The rows, each with so many tokens more in its prompt."""
        usual = None if self.usual is None else self.usual + more
        return replace(self, prompt=self.prompt + more, usual=usual)


def attended_pairs(load: Load) -> float:
    """Pairs of a token and one that it attends to, where rows are of many lengths."""
    lengths, prompt = load.lengths, load.mean_prompt
    own = lengths.mean**2 if lengths.fixed else second_moment(lengths)
    of_responses = load.rows * (lengths.mean * prompt + own / 2)
    return load.prompts * prompt**2 / 2 + of_responses


@lru_cache(maxsize=256)
def second_moment(lengths: ResponseLengths) -> float:
    """The mean of the squares of the lengths: twice the sum over t of t S(t)."""
    if lengths.sample:
        return sum(length**2 for length in lengths.sample) / len(lengths.sample)
    if lengths.reach:
        middles = ((start + width / 2, width) for start, width in length_grid(lengths))
        return 2 * sum(width * at * lengths.survival(at) for at, width in middles)
    width = lengths.end / STEPS
    evenly = ((step + 0.5) * width for step in range(STEPS))
    return 2 * sum(width * at * lengths.survival(at) for at in evenly)
