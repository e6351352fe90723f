"""Rows that enter and leave a generation at any time have the tokens that they have alone."""

from __future__ import annotations

import itertools
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from rlflow.batch import flat, joined_rows, lengths, ragged, ragged_rows, select_field
from rlflow.contract.values import InFlight, Moving, Reach, SampleKey, Sampling
from rlflow.engines.hf.generate.continuous import STOP
from rlflow.engines.hf.generate.entered import EnteredCache, LiveRows
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.errors import RunError
from rlflow.graph.rules import bands
from tests.engines.test_paged_decoding import FAMILIES
from tests.ops.parts import Meeting

pytestmark = pytest.mark.torch

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9], [4], [8, 8, 2, 1]]
SAMPLING = Sampling(max_new_tokens=20, n=2, stop_tokens=tuple(range(3)))


def engine(path):
    return TorchRollout(load_model(path, dtype=torch.float32, device="cpu"))


def one_by_one(rollout, draw: int = 0):
    """What a rollout that drains makes of each group, all in one generation."""
    key = SampleKey(seed=1, iteration=draw, stream="rollout")
    ids = torch.arange(len(PROMPTS) * SAMPLING.n)
    return rollout.generate(ragged_rows(PROMPTS, torch.int64), SAMPLING, key, ids, Reach())


def flight(met, at_once: int, begun=None, rows=None, prompts=PROMPTS, **more) -> InFlight:
    """All groups, or those `rows` of them of which `begun` has the tokens so far."""
    rows = torch.arange(len(prompts) * SAMPLING.n) if rows is None else rows
    groups = rows // SAMPLING.n
    read = select_field(ragged_rows(prompts, torch.int64), groups)
    made = ragged_rows([[]] * len(rows), torch.int64) if begun is None else begun
    going = groups[lengths(made) > 0]
    return InFlight(
        seen=joined_rows(read, made),
        made=lengths(made),
        draws=torch.zeros(len(rows), dtype=torch.int64),
        ids=rows,
        groups=groups,
        begun=frozenset(going.tolist()),
        at_once=at_once,
        met=met,
        **more,
    )


def never(begun, ended) -> bool:
    return False


@pytest.mark.rows(12)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("at_once", [2, 4, 100])
def test_rows_that_wait_for_room_draw_the_same_tokens(model_dir, family, at_once):
    rollout = engine(model_dir(family))
    expected = one_by_one(rollout)
    key = SampleKey(seed=1, iteration=99, stream="rollout")
    found = rollout.advance(flight(never, at_once), SAMPLING, key)
    assert [row.tolist() for row in expected.response_tokens.unbind()] == [
        row.tolist() for row in found.response_tokens.unbind()
    ]
    assert torch.equal(expected.finished, found.finished)
    apart = (flat(expected.log_probs) - flat(found.log_probs)).abs().max()
    assert float(apart) < 1e-5
    assert bool(found.over.all())
    assert list(range(len(PROMPTS))) == sorted(found.ended)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_rows_that_go_on_have_the_tokens_of_one_call(model_dir, family):
    """Called again and again, each time for one complete group more, with little room."""
    rollout = engine(model_dir(family))
    expected = one_by_one(rollout)
    key = SampleKey(seed=1, iteration=5, stream="rollout")
    rows = torch.arange(len(PROMPTS) * SAMPLING.n)
    made, over = ragged_rows([[]] * len(rows), torch.int64), torch.zeros(len(rows)).bool()
    calls = 0
    while not over.all():
        left = torch.nonzero(~over).flatten()
        asked = flight(lambda _, ended: len(ended) >= 1, 5, select_field(made, left), left)
        found = rollout.advance(asked, SAMPLING, key)
        sizes = torch.zeros(len(rows), dtype=torch.int64)
        sizes[left] = lengths(found.response_tokens)
        made = joined_rows(made, ragged(flat(found.response_tokens), sizes))
        over[left] = found.over
        calls += 1
    assert [row.tolist() for row in expected.response_tokens.unbind()] == [
        row.tolist() for row in made.unbind()
    ]
    assert 1 < calls <= len(PROMPTS)


@pytest.mark.parametrize(("least", "turns"), [(0, 0), (3, 3), (100, 20)])
def test_who_has_enough_groups_works_ahead_while_rows_are_live(model_dir, least, turns):
    rollout = engine(model_dir("qwen2"))
    long = replace(SAMPLING, stop_tokens=())
    asked = flight(lambda begun, ended: True, 100, least=least)
    found = rollout.advance(asked, long, SampleKey(seed=1, iteration=0, stream="rollout"))
    assert turns == found.turns == int(lengths(found.response_tokens).max())
    asked = flight(lambda begun, ended: True, 4, least=least, few=5)
    alone = rollout.advance(asked, long, SampleKey(seed=1, iteration=0, stream="rollout"))
    assert 0 == alone.turns


def test_no_more_rows_are_live_than_there_is_room_for(model_dir, monkeypatch):
    live = []
    enter = LiveRows.enter

    def counted(self, groups):
        enter(self, groups)
        live.append(len(self.live))

    monkeypatch.setattr(LiveRows, "enter", counted)
    rollout = engine(model_dir("qwen2"))
    rollout.advance(flight(never, 4), SAMPLING, SampleKey(seed=1, iteration=0, stream="rollout"))
    assert 4 == max(live)
    assert sum(live) / len(live) > 2


def test_a_prompt_that_leaves_no_room_is_refused(model_dir):
    rollout = engine(model_dir("qwen2"))
    long = Sampling(max_new_tokens=90, n=2)
    with pytest.raises(RunError, match="E505"):
        rollout.advance(flight(never, 4), long, SampleKey(seed=1, iteration=0, stream="rollout"))


def test_replicas_of_two_processes_make_the_turns_of_one(model_dir):
    """Each decodes its own rows; what they tell each other is who ended, and both know the same."""
    rollout, key = engine(model_dir("qwen2")), SampleKey(seed=1, iteration=0, stream="rollout")
    asked = flight(lambda _, ended: len(ended) >= 3, 4)
    whole = rollout.advance(asked, SAMPLING, key)
    meeting, said = threading.Barrier(2, timeout=60), [[], []]

    def part(home: int):
        def told(ended):
            said[home] = list(ended)
            meeting.wait()
            found = sorted(said[0] + said[1])
            meeting.wait()
            return found

        own = engine(model_dir("qwen2"))
        return own.advance(replace(asked, replicas=2, own=home, told=told), SAMPLING, key)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(part, (0, 1)))
    for each in found:
        assert (whole.begun, whole.ended, whole.turns) == (each.begun, each.ended, each.turns)
        assert torch.equal(whole.over, each.over)
    for row, tokens in enumerate(whole.response_tokens.unbind()):
        parts = [each.response_tokens[row].tolist() for each in found]
        assert tokens.tolist() in parts
        assert [] in parts
    assert all(len(flat(each.response_tokens)) for each in found)
    apart = torch.cat([flat(each.log_probs) for each in found]).sort().values
    assert torch.equal(flat(whole.log_probs).sort().values, apart)


def test_a_stop_that_one_replica_is_asked_for_is_of_all(model_dir):
    rollout, key = engine(model_dir("qwen2")), SampleKey(seed=1, iteration=0, stream="rollout")
    asked = flight(never, 100, told=lambda ended: [STOP, *ended])
    assert 1 == rollout.advance(asked, SAMPLING, key).turns


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_short_rows_are_read_with_fewer_columns_to_the_same_bits(model_dir, monkeypatch, family):
    """Ten rows: the first have long prompts, what enters behind has short ones."""
    rollout = engine(model_dir(family))
    prompts = [[3, 1, 4, 1, 5] * 15, [9, 2] * 37, [5] * 71, [8] * 75, [2, 7]]
    read: set[int] = set()

    def made(calls: int):
        monkeypatch.setattr(bands, "CALLS", calls)
        key = SampleKey(seed=1, iteration=0, stream="rollout")
        asked = flight(never, 100, prompts=prompts)
        found = rollout.advance(asked, replace(SAMPLING, stop_tokens=()), key)
        return found.response_tokens, found.log_probs

    of_cache = EnteredCache.bands

    def counted(self, seen, size):
        found = of_cache(self, seen, size)
        read.add(len(found))
        return found

    monkeypatch.setattr(EnteredCache, "bands", counted)
    whole = made(10**9)
    assert {1} == read
    apart = made(0)
    assert {1, 2} == read
    assert all(torch.equal(flat(one), flat(two)) for one, two in zip(whole, apart, strict=True))


def test_a_band_of_its_own_has_to_save_more_than_it_costs():
    assert 24 == bands.first_narrow([100] * 8 + [90] * 8 + [20] * 8)
    assert 16 == bands.first_narrow([300] * 8 + [290] * 8 + [20] * 8)
    assert 8 == bands.first_narrow([300] * 8 + [60, 50] * 8)
    assert 24 == bands.first_narrow([20] * 8 + [60] * 8 + [300] * 8)
    assert 0 == bands.first_narrow([])
    assert 300 * 8 + 60 * 16 == bands.columns_read([300] * 8 + [60, 50] * 8, 8)


def test_no_short_row_comes_to_lie_among_long_ones():
    """Of ten rows the second band begins at the fourth; then there is one band."""
    assert [1, 3, 9] == bands.moves_up(1, 10, 4)
    assert [3, 9] == bands.moves_up(3, 10, 4)
    assert [6, 9] == bands.moves_up(6, 10, 4)
    assert [9] == bands.moves_up(9, 10, 4)
    assert [1, 9] == bands.moves_up(1, 10, 10) == bands.moves_up(1, 10, 0)
    assert [1, 9] == bands.moves_up(1, 10, 12)


def test_of_many_rows_some_are_looked_at_together():
    """Of 100 rows two at a time: the third that is long has the fourth beside it."""
    long = [300.0] * 3 + [10.0] * 97
    assert 4 == bands.first_narrow(long)
    assert 300 * 4 + 10 * 96 == bands.columns_read(long, 4)


def replicas_of(path, asked, sampling, count: int, every: int, *, reread: bool):
    """What each of some replicas has made of rows that move, in a thread each."""
    meeting, key = Meeting(count), SampleKey(seed=1, iteration=0, stream="rollout")
    mail = {(s, t): queue.Queue() for s in range(count) for t in range(count)}

    def part(home: int):
        def told(ended):
            return sorted(itertools.chain(*meeting.all_of(home, list(ended))))

        def pass_on(named, source, target, device):
            if home == target:
                return mail[source, target].get(timeout=60)
            mail[source, target].put({name: each.clone() for name, each in named.items()})
            return {}

        moving = Moving(every=every, reread=reread, pass_on=pass_on)
        own = replace(asked, replicas=count, own=home, told=told, tells=every, moving=moving)
        return engine(path).advance(own, sampling, key)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(part, range(count)))


@pytest.mark.rows(2)
@pytest.mark.parametrize("reread", [False, True], ids=["cache", "reread"])
@pytest.mark.parametrize(("family", "count"), [("qwen2", 2), ("gptoss", 3)])
def test_rows_that_move_draw_the_same_tokens(model_dir, family, count, reread):
    path, long = model_dir(family), replace(SAMPLING, max_new_tokens=70, stop_tokens=(0, 1))
    asked = flight(never, 100)
    whole = engine(path).advance(asked, long, SampleKey(seed=1, iteration=0, stream="rollout"))
    found = replicas_of(path, asked, long, count, 4, reread=reread)
    assert 0 < found[0].moved
    assert 1 == len({each.moved for each in found})
    many = torch.tensor(list(itertools.zip_longest(*(each.live for each in found))))
    assert bool((many[4::4].amax(1) - many[4::4].amin(1) <= 1).all()), "rows were not evened"
    for row, tokens in enumerate(whole.response_tokens.unbind()):
        parts = [(p, t, s) for each in found for p, t, s in of_row(each, row)]
        places, had, scores = zip(*sorted(parts), strict=True)
        assert tokens.tolist() == list(had)
        assert list(range(len(had))) == list(places)
        assert whole.log_probs[row].tolist() == pytest.approx(list(scores), abs=1e-5)
    assert torch.equal(whole.finished, torch.stack([each.finished for each in found]).any(0))


def of_row(made, row: int):
    """The places, tokens and log-probs of a row as one replica has them."""
    ends = lengths(made.response_tokens).cumsum(0).tolist()
    here = slice(ends[row - 1] if row else 0, ends[row])
    columns = made.places, flat(made.response_tokens), flat(made.log_probs)
    return zip(*(column[here].tolist() for column in columns), strict=True)
