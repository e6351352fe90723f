"""Rows that move between engines in processes of their own: played ones, and two real ones.

A played row's next token follows from all that it has seen, as a greedy row's does, so it has the
same tokens wherever it is made, and others if a token is lost, doubled or misplaced on its way.
"""

from __future__ import annotations

import itertools
import queue
import time
import zlib
from array import array
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from rlflow.batch import flat, joined_rows, lengths, ragged_rows, select_field
from rlflow.contract.values import InFlight, Moving, SampleKey, Sampling
from rlflow.engines.process.client.link import LostError
from rlflow.engines.process.client.rows import in_rounds
from rlflow.engines.process.client.rows.answers import Rows
from rlflow.engines.process.client.rows.in_rounds import Engine, InRounds
from tests.engines.sglang.conftest import start
from tests.ops.parts import Meeting

pytestmark = pytest.mark.torch

# A token is below, and ends its row where it is the last.
WORDS, LAST, MOST = 29, 0, 60
PATIENCE = 60


def following(seen):
    """The token after those that a row has seen."""
    return zlib.crc32(bytes(seen)) % WORDS


def whole(prompt, most=MOST):
    """All tokens of a row that stays where it is."""
    made = []
    while len(made) < most and (not made or made[-1] != LAST):
        made.append(following([*prompt, *made]))
    return made


class Request:
    """A request of a played engine, which gives each of its rows a token whenever it is looked at.

    Log-probs are the places that tokens have in what the row has seen. Of rows that are to end the
    `late` ones have come to their own end by the time that they hear of it.
    """

    def __init__(self, engine, seen, most, rows):
        self.engine, self.most = engine, most
        self.made = {row: [] for row in rows}
        self.seen = {row: seen[row] for row in rows}
        self.messages = deque()
        engine.begun += [len(seen[row]) for row in rows]

    def poll(self):
        self.engine.looked()
        if not self.messages:
            self.step()
        return self.messages.popleft() if self.messages else None

    def next(self):
        while not self.messages:
            self.step()
        return self.messages.popleft()

    def step(self):
        if self.engine.aborted:
            for row in list(self.made):
                self.send(row, "abort")
            return
        for row, made in list(self.made.items()):
            made.append(following([*self.seen[row], *made]))
            if made[-1] == LAST or len(made) == self.most[row]:
                self.send(row, "stop" if made[-1] == LAST else "length")
        self.messages.append({"counts": {row: len(made) for row, made in self.made.items()}})

    def send(self, row, reason):
        made, first = self.made.pop(row), len(self.seen[row])
        scores = array("f", [-float(first + place) for place in range(len(made))])
        message = {"row": row, "tokens": array("q", made).tobytes(), "reason": reason}
        self.messages.append(
            {**message, "log_probs": scores.tobytes(), "cached": 0, "versions": ["0"]}
        )

    def about(self, do, fields):
        assert "end_rows" == do
        for row in fields["rows"]:
            if self.engine.late:
                while row in self.made:
                    self.step()
            elif row in self.made:
                self.send(row, "abort")


class Played:
    """An engine of one replica, `slow` seconds a token; at look `lost_at` it is lost."""

    def __init__(self, flight, *, slow=0.0, late=False, lost_at=None):
        self.flight, self.slow, self.late, self.lost_at = flight, slow, late, lost_at
        self.aborted, self.looks = False, 0
        self.begun = []

    def looked(self):
        time.sleep(self.slow)
        self.looks += 1
        if self.looks == self.lost_at:
            raise LostError("its process ended")

    def begin(self, some, brought):
        had = ragged_rows([brought.get(row, ()) for row in some], torch.int64)
        seen = joined_rows(select_field(self.flight.seen, torch.tensor(some)), had)
        seen = [row.tolist() for row in seen.unbind()]
        most = [MOST - size for size in lengths(had).tolist()]
        return Rows(
            len(some),
            lambda rows: Request(self, seen, most, rows),
            stopped=lambda: False,
            give_up=lambda reason: RuntimeError(reason),
            vocabulary=WORDS,
            most=most.__getitem__,
        )

    def advance(self, flight):
        def abort():
            self.aborted = True

        engine = Engine(
            begin=self.begin, runs=lambda: True, stopped=lambda: self.aborted, abort=abort
        )
        return Counted(flight, engine).run()


def flight_of(prompts, n):
    """Rows in flight of as many samples of each prompt."""
    groups = torch.arange(len(prompts) * n) // n
    return InFlight(
        seen=select_field(ragged_rows(prompts, torch.int64), groups),
        made=torch.zeros(len(groups), dtype=torch.int64),
        draws=torch.zeros(len(groups), dtype=torch.int64),
        ids=torch.arange(len(groups)),
        groups=groups,
        begun=frozenset(),
        at_once=len(groups),
        met=lambda _, ended: len(ended) == len(prompts),
    )


def together(flight, advances, every):
    """What replicas have made of rows that move, one in a thread of its own each."""
    count = len(advances)
    meeting, pairs = Meeting(count), itertools.product(range(count), repeat=2)
    mail = {pair: queue.Queue() for pair in pairs}

    def one(own):
        def told(ended):
            return sorted(set(itertools.chain(*meeting.all_of(own, list(ended)))))

        def pass_on(named, source, target, device):
            if own == target:
                return mail[source, target].get(timeout=PATIENCE)
            mail[source, target].put(named)
            return {}

        moving = Moving(every=every, reread=True, pass_on=pass_on)
        try:
            return advances[own](replace(flight, replicas=count, own=own, told=told, moving=moving))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        return [each.result(PATIENCE) for each in [pool.submit(one, own) for own in range(count)]]


def joined(made):
    """The tokens and log-probs of each row, by their places, which are there once each."""
    found = []
    ends = [[0, *lengths(each.response_tokens).cumsum(0).tolist()] for each in made]
    for row in range(len(made[0].over)):
        columns = []
        for each, end in zip(made, ends, strict=True):
            here = slice(end[row], end[row + 1])
            fields = each.places, flat(each.response_tokens), flat(each.log_probs)
            columns += zip(*(field[here].tolist() for field in fields), strict=True)
        columns.sort()
        assert list(range(len(columns))) == [place for place, _, _ in columns]
        found.append(([token for _, token, _ in columns], [score for *_, score in columns]))
    return found


def alternating():
    """Twelve prompts, a long row and a short one in turn: of two replicas one is dealt all long."""
    prompts = [[a, b] for a in range(1, 9) for b in range(1, 9)]
    prompts.sort(key=lambda prompt: len(whole(prompt)))
    return [prompt for pair in zip(prompts[-6:], prompts[:6], strict=True) for prompt in pair]


class Counted(InRounds):
    """Rows in flight that are counted whenever some may have moved."""

    def _even(self, moving):
        super()._even(moving)
        live = Counter(home for home, over in zip(self.home, self.over, strict=True) if not over)
        assert [live[part] for part in range(self.rows.replicas)] == self.dealing.live


@pytest.fixture
def quick(monkeypatch):
    """Rounds of two or three tokens of the played engines."""
    monkeypatch.setattr(in_rounds, "ROUND_SECONDS", 0.005)


def test_rows_that_move_are_joined_token_by_token(quick):
    prompts = alternating()
    flight = flight_of(prompts, 1)
    engines = [Played(flight, slow=0.002) for _ in range(2)]
    made = together(flight, [engine.advance for engine in engines], 4)
    assert made[0].moved == made[1].moved >= 2
    for prompt, (tokens, scores) in zip(prompts, joined(made), strict=True):
        assert whole(prompt) == tokens
        # Every token was made after all that came before it, wherever that was.
        assert [-float(2 + place) for place in range(len(tokens))] == scores
    ended = torch.stack([each.finished for each in made]).any(0)
    assert [LAST == whole(prompt)[-1] for prompt in prompts] == ended.tolist()
    assert all(bool(each.over.all()) for each in made)
    # Who came has read what the row had got: more than a prompt.
    again = [size for engine in engines for size in engine.begun if size > 2]
    assert made[0].moved == len(again)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("every", [1, 16])
def test_who_moves_is_a_matter_of_time_and_tokens_are_not(quick, count, every):
    """Replicas of different speed, and groups of several rows."""
    prompts = alternating()[:7]
    flight = flight_of(prompts, 2)
    engines = [Played(flight, slow=0.002 * part) for part in range(count)]
    made = together(flight, [engine.advance for engine in engines], every)
    expected = [whole(prompt) for prompt in prompts for _ in range(2)]
    assert expected == [tokens for tokens, _ in joined(made)]
    assert 1 == len({each.moved for each in made})
    assert 1 == len({each.ended for each in made})


def test_a_row_that_ends_before_it_goes_stays(quick):
    prompts = alternating()
    flight = flight_of(prompts, 1)
    engines = [Played(flight, slow=0.002, late=True) for _ in range(2)]
    made = together(flight, [engine.advance for engine in engines], 4)
    assert 0 == made[0].moved == made[1].moved
    assert [whole(prompt) for prompt in prompts] == [tokens for tokens, _ in joined(made)]


@pytest.mark.parametrize("lost_at", range(2, 30, 9))
def test_an_engine_that_is_lost_makes_its_rows_anew(quick, lost_at):
    """Rows that it was to end stay there; those that it was given go on from what they brought."""
    prompts = alternating()
    flight = flight_of(prompts, 1)
    for lost in range(2):
        engines = [
            Played(flight, slow=0.002, lost_at=lost_at if part == lost else None)
            for part in range(2)
        ]
        made = together(flight, [engine.advance for engine in engines], 4)
        assert [whole(prompt) for prompt in prompts] == [tokens for tokens, _ in joined(made)]


def test_once_enough_groups_are_complete_the_others_come_back_with_what_they_have(quick):
    prompts = alternating()
    flight = replace(flight_of(prompts, 1), met=lambda _, ended: len(ended) >= 8)
    engines = [Played(flight, slow=0.002) for _ in range(2)]
    made = together(flight, [engine.advance for engine in engines], 2)
    assert 8 <= len(made[0].ended) < 12
    assert made[0].ended == made[1].ended
    for row, (tokens, _) in enumerate(joined(made)):
        expected = whole(prompts[row])
        assert expected[: len(tokens)] == tokens
        assert (expected == tokens) is bool(made[0].over[row])


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.extra
def test_rows_move_between_two_real_engines(pair):
    """Greedy rows that go from engine to engine are those that stay; replicas end evenly."""
    sampling = Sampling(max_new_tokens=110, temperature=0.0, stop_tokens=(11,))
    key = SampleKey(seed=1, iteration=0, stream="gen")
    # The first row of every two lives long.
    prompts = [[3, 4, 5], [6, 7, 8, 9, 10], [11, 3], [9, 12, 4, 13, 5, 14]] * 3
    whole_rows = pair.plain.generate(
        ragged_rows(prompts, torch.int64), sampling, key, torch.arange(len(prompts))
    )
    sizes = lengths(whole_rows.response_tokens).tolist()
    order = sorted(range(len(prompts)), key=sizes.__getitem__)
    half = len(order) // 2
    chosen = [row for two in zip(order[half:], order[:half], strict=True) for row in two]
    flight = flight_of([prompts[row] for row in chosen], 1)
    other_model, other = start()
    try:
        before = [engine.stats()["prompt_tokens"] for engine in (pair.rollout, other)]
        advances = [
            lambda rows, engine=engine: engine.advance(rows, sampling, key)
            for engine in (pair.rollout, other)
        ]
        made = together(flight, advances, 8)
        after = [engine.stats()["prompt_tokens"] for engine in (pair.rollout, other)]
    finally:
        other_model.close()
    assert made[0].moved == made[1].moved > 0
    for row, (tokens, scores) in zip(chosen, joined(made), strict=True):
        assert whole_rows.response_tokens[row].tolist() == tokens
        assert whole_rows.log_probs[row].tolist() == pytest.approx(scores, abs=1e-4)
    assert torch.equal(
        whole_rows.finished[torch.tensor(chosen)],
        torch.stack([each.finished for each in made]).any(0),
    )
    # What moved was read again, beside every prompt once.
    read = sum(after) - sum(before)
    assert read > sum(len(prompts[row]) for row in chosen)
