"""How long responses get: a distribution, so that the longest of many rows costs what it costs.

Lengths are those of a log-normal variable cut off at the limit, as the lengths of generated
text roughly are: many short ones, a long tail, and some that reach the limit. A `Load` is the rows
that a use sees, with such lengths, and how they lie in blocks of a pool: the embedded engine's
rollouts on an accelerator allocate by the same rule, `rlflow.modelfiles.paging`. Knows no model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

from rlflow.modelfiles.paging import BLOCK, MOST_ROWS, bucket, pool_blocks, rows_at_once

ASSUMED_MEAN = 0.5
ASSUMED_SPREAD = 0.6
SPREADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0)
STEPS = 64
FEW_STEPS = 32
FEW_WAVES = 16
RARE = 1e-6
HALVINGS = 30
NEARLY_ALL = 0.98


@dataclass(frozen=True, slots=True)
class Stage:
    """`tokens` decoding steps with `live` rows of `age` tokens each in expectation.

    `goes_on` is the probability that any row of any rank is still growing. `ended` is the share
    of rows that is over, counted from when the last one has begun.
    """

    age: float
    tokens: float
    live: float
    goes_on: float
    ended: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a response: `mean` of those cut off at `longest`; `spread` of their logarithm.

    A spread of 0 is a fixed length.
    """

    longest: int
    mean: float
    spread: float = ASSUMED_SPREAD

    @property
    def fixed(self) -> bool:
        """Whether every response is taken to be as long as the others."""
        return self.spread <= 0 or self.mean >= NEARLY_ALL * self.longest

    def survival(self, tokens: float) -> float:
        """The probability that a response is longer than so many tokens."""
        if tokens >= self.longest:
            return 0.0
        if self.fixed:
            return 1.0 if tokens < self.mean else 0.0
        if tokens <= 0:
            return 1.0
        return _longer(_location(self), self.spread, tokens)

    def expected_longest(self, rows: float) -> float:
        """The expected length of the longest of so many responses: sum of 1 - F(t)^rows."""
        return sum(stage.tokens * stage.goes_on for stage in stages(self, rows, 1))


def assumed(longest: int) -> Lengths:
    """Lengths where nothing is measured: half of the limit in the mean, a tail up to it."""
    return Lengths(longest, max(1.0, ASSUMED_MEAN * longest))


def full_lengths(longest: int) -> Lengths:
    """Responses that all reach the limit."""
    return Lengths(longest, float(longest), 0.0)


def joined_lengths(parts: Sequence[tuple[float, Lengths]], longest: int) -> Lengths:
    """Lengths of several kinds of rows together, each with how many there are.

    The mean is exact; the spread is that of the kind which spreads the most.
    """
    rows = sum(many for many, _ in parts)
    mean = sum(many * kind.mean for many, kind in parts) / max(rows, 1)
    alike = len({kind.mean for _, kind in parts}) == 1
    spread = max(kind.spread for _, kind in parts)
    return Lengths(longest, mean, spread or (0.0 if alike else ASSUMED_SPREAD))


@lru_cache(maxsize=256)
def fitted_lengths(longest: int, mean: float, greatest: float, rows: int) -> Lengths:
    """Lengths of a measured mean whose longest of `rows` is about as long as was measured.

    The spread is the one of a short list that comes nearest.
    """
    mean = min(max(mean, 1.0), float(longest))
    found = [Lengths(longest, mean, spread) for spread in SPREADS]
    return min(found, key=lambda one: abs(one.expected_longest(rows) - greatest))


@lru_cache(maxsize=1024)
def stages(lengths: Lengths, rows: float, ranks: int, room: float = math.inf) -> tuple[Stage, ...]:
    """Decoding cut into stages, for `rows` rows on each of `ranks` ranks that end together.

    Of n rows, n S(t) live at token t in expectation, and any of n m rows on m ranks with
    probability 1 - (1 - S(t))^(n m); what lives on the rank that goes on is at least one row.
    Where a rank has `room` for fewer, the others wait, and one begins whenever one ends.
    """
    return tuple(
        _stages(lengths, rows, ranks) if rows <= room else _crowded(lengths, rows, ranks, room)
    )


def _stages(lengths: Lengths, rows: float, ranks: int) -> Iterator[Stage]:
    for start, tokens in _grid(lengths.longest):
        alive = lengths.survival(start + tokens / 2 - 0.5)
        goes_on = _any_of(alive, rows * ranks)
        if goes_on < 1e-9:
            return
        live = max(rows * alive / goes_on, 1.0)
        yield Stage(start + tokens / 2, tokens, live, goes_on, 1 - alive)


def _crowded(lengths: Lengths, rows: float, ranks: int, room: float) -> Iterator[Stage]:
    """The same in equal steps: how many rows begin in each follows from those that end in it.

    Of those that began j steps before, S(j) live; the sum over j are all that live.
    """
    grid = list(_grid(lengths.longest))
    reach = max(start + tokens for start, tokens in grid if lengths.survival(start) > RARE)
    count = min(math.ceil(reach), STEPS if rows <= FEW_WAVES * room else FEW_STEPS)
    width = reach / count
    alive = [lengths.survival((step + 0.5) * width - 0.5) for step in range(count)]
    alive[0] = 1.0
    begun, waiting = [room], rows - room
    for now in itertools.count():
        lately = [(begun[now - j], j) for j in range(min(count, now + 1))]
        live = sum(many * alive[j] for many, j in lately)
        goes_on = 1.0
        if waiting <= 0:
            goes_on = 1 - math.prod((1 - alive[j]) ** (many * ranks) for many, j in lately)
            if goes_on < 1e-9:
                return
        age = sum(many * alive[j] * (j + 0.5) for many, j in lately) * width / max(live, 1e-9)
        ended = 0.0 if waiting > 0 else 1 - live / rows
        yield Stage(age, width, min(max(live / goes_on, 1.0), room), goes_on, ended)
        after = [*alive[1:], 0.0]
        free = sum(many * (alive[j] - after[j]) for many, j in lately)
        begun.append(min(free, waiting))
        waiting -= begun[-1]


def _grid(longest: int) -> Iterator[tuple[float, float]]:
    """Starts and widths of at most `STEPS` stages that cover the tokens 0 to longest - 1."""
    count = min(longest, STEPS)
    for number in range(count):
        start = longest * number // count
        yield float(start), float(longest * (number + 1) // count - start)


def _any_of(alive: float, rows: float) -> float:
    """1 - (1 - alive)^rows, without loss of digits for small `alive`."""
    return 1.0 if alive >= 1 else -math.expm1(rows * math.log1p(-alive))


def before(lengths: Lengths, tokens: int) -> Lengths:
    """Lengths of responses that are stopped after so many tokens."""
    if lengths.fixed:
        return full_lengths(min(tokens, lengths.longest))
    mean = sum(width * lengths.survival(start + width / 2 - 0.5) for start, width in _grid(tokens))
    return Lengths(tokens, max(1.0, mean), lengths.spread)


def between(lengths: Lengths, since: float, until: float) -> Lengths:
    """Lengths of those responses that are the shares `since` to `until` to end."""
    mean = 0.0
    for start, width in _grid(lengths.longest):
        longer = lengths.survival(start + width / 2 - 0.5) - (1 - until)
        mean += width * min(max(longer / (until - since), 0.0), 1.0)
    return Lengths(lengths.longest, min(max(mean, 1.0), float(lengths.longest)), lengths.spread)


def after(lengths: Lengths, tokens: int) -> tuple[Lengths, float]:
    """How much longer those get that have so many tokens and go on, and what share does."""
    share = lengths.survival(tokens)
    if lengths.fixed or not share:
        return full_lengths(max(lengths.longest - tokens, 1)), share
    rest = (lengths.mean - before(lengths, tokens).mean) / share
    longest = lengths.longest - tokens
    return Lengths(longest, min(max(rest, 1.0), float(longest)), lengths.spread), share


def _longer(location: float, spread: float, tokens: float) -> float:
    return 0.5 * math.erfc((math.log(tokens) - location) / (spread * math.sqrt(2)))


@lru_cache(maxsize=256)
def _location(lengths: Lengths) -> float:
    """The location at which the cut-off lengths have their mean, by bisection."""
    low, high = -(lengths.spread**2) - 3.0, math.log(lengths.longest) + 4 * lengths.spread + 3.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _cut_off_mean(middle, lengths) < lengths.mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _cut_off_mean(location: float, lengths: Lengths) -> float:
    """The mean of the lengths cut off at the limit: the sum over t of S(t), where S(0) is 1."""
    total = 0.0
    for start, tokens in _grid(lengths.longest):
        at = start + tokens / 2 - 0.5
        total += tokens * (1.0 if at <= 0 else _longer(location, lengths.spread, at))
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Rows of one part: `rows` of `prompts` prompts of `prompt` tokens, responses as `lengths`.

    `peers` parts end together. Rows of a prompt share it. `most` are the rows that there may be,
    where `rows` is how many there are in expectation.
    """

    rows: float
    prompts: float
    prompt: int
    lengths: Lengths
    peers: int = 1
    most: float | None = None

    @property
    def tokens(self) -> float:
        """Tokens that a forward sees, in expectation."""
        return self.prompts * self.prompt + self.rows * self.lengths.mean

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
        mean = self.lengths.mean
        of_responses = self.rows * mean * (self.prompt + mean / 2)
        return self.prompts * self.prompt**2 / 2 + of_responses

    def in_blocks(self, most: int = MOST_ROWS) -> PagedRows:
        """The most rows that there may be, in blocks of a pool for at most `most` at once."""
        rows = self.most or self.rows
        prompts = rows if self.most else self.prompts
        return paged_rows(rows, prompts, self.prompt, self.lengths.longest, most)

    def going_on(self, first: int) -> Load:
        """The rows that have not ended after `first` tokens: prompts that are as much longer."""
        rest, share = after(self.lengths, first)
        rows = max(self.rows * share, 1.0)
        longer = replace(self, prompt=self.prompt + first, lengths=rest)
        return replace(longer, rows=rows, prompts=rows, most=max(self.rows, rows))

    def later_turn(self, new: int) -> Load:
        """The rows of a later turn of so many tokens: what is there so far are their prompts."""
        before = max(self.lengths.longest - new, 0)
        longer = replace(self, prompts=self.rows, prompt=self.prompt + before)
        return replace(longer, lengths=assumed(new))


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """Rows of prompts of one length: `n` of each, of at most `new` tokens, `most` of them at once.

    Of a prompt all decode together, also where those are more.
    """

    prompts: int
    prompt: int
    n: int
    new: int
    most: int = MOST_ROWS

    @property
    def pool(self) -> int:
        """Tokens that the pool has room for."""
        return _pool(self.prompts, self.prompt, self.n, self.new, self.most) * BLOCK

    @property
    def at_once(self) -> int:
        """Rows that decode at once at the most."""
        return rows_at_once(self.prompts * self.n, self.n, self.most)

    @property
    def slots(self) -> int:
        """Rows of the largest step."""
        return bucket(self.at_once)


def paged_rows(
    rows: float, prompts: float, prompt: int, new: int, most: int = MOST_ROWS
) -> PagedRows:
    """The rows of a part, whole numbers of them."""
    n = max(math.ceil(rows / max(prompts, 1.0)), 1)
    return PagedRows(prompts=math.ceil(rows / n), prompt=prompt, n=n, new=new, most=most)


@lru_cache(maxsize=1024)
def _pool(prompts: int, prompt: int, n: int, new: int, most: int) -> int:
    return pool_blocks((prompt,) * prompts, n, new, most)


def fullest(load: Load) -> float:
    """Tokens of the fullest of the parts that end together, over those of the mean part.

    Rows are taken to be independent. The largest of p normal sums lies Blom's quantile above their
    mean; of parts with k groups balancing leaves a kth of a kth of that, as a simulation of
    the differencing method finds for 4 to 64 parts of 1 to 8 groups.
    """
    if load.peers < 2 or load.lengths.fixed:
        return 1.0
    rows = max(load.rows / max(load.prompts, 1.0), 1.0)
    mean = load.lengths.mean + load.prompt / rows
    spread = math.sqrt(max(second_moment(load.lengths) - load.lengths.mean**2, 0.0))
    above = NormalDist().inv_cdf((load.peers - 0.375) / (load.peers + 0.25))
    return 1 + above * spread / mean / math.sqrt(rows) / max(load.prompts, 1.0) ** 2


def attended_pairs(load: Load) -> float:
    """Pairs of a token and one that it attends to, where rows are of many lengths."""
    lengths = load.lengths
    own = lengths.mean**2 if lengths.fixed else second_moment(lengths)
    of_responses = load.rows * (lengths.mean * load.prompt + own / 2)
    return load.prompts * load.prompt**2 / 2 + of_responses


@lru_cache(maxsize=256)
def second_moment(lengths: Lengths) -> float:
    """The mean of the squares of the lengths: twice the sum over t of t S(t)."""
    width = lengths.longest / STEPS
    middles = ((step + 0.5) * width for step in range(STEPS))
    return 2 * sum(width * at * lengths.survival(at) for at in middles)
