"""Generation in parts: pieces by who ends first, and rows that stop on the way and go on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlflow.batch import flat, joined_rows, lengths, ragged_rows, select_field
from rlflow.contract.values import Reach, SampleKey, Sampling
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.errors import RunError
from rlflow.graph.rules.completion_order import ended_rows

pytestmark = pytest.mark.torch

KEY = SampleKey(seed=1, iteration=2, stream="rollout")
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
STOPS = tuple(range(8))
SAMPLED = Sampling(max_new_tokens=24, n=4, stop_tokens=STOPS)
GREEDY = Sampling(max_new_tokens=24, temperature=0.0, stop_tokens=(3, 17))
LONG = Sampling(max_new_tokens=80, n=2, temperature=0.8, top_p=0.9, stop_tokens=(0,))


@pytest.fixture
def engine(model_dir):
    return TorchRollout(load_model(model_dir("qwen2"), dtype=torch.float32, device="cpu"))


def generated(engine, sampling, reach=None, prompts=PROMPTS, key=KEY):
    asked, ids = ragged_rows(prompts, torch.int64), torch.arange(len(prompts) * sampling.n)
    return engine.generate(asked, sampling, key, ids, reach or Reach())


def in_pieces(engine, sampling, count, **more):
    return [
        generated(engine, sampling, Reach(piece=piece, pieces=count), **more)
        for piece in range(count)
    ]


def by_row(*made):
    """Tokens, log-probs as bits, and whether it is finished, for each row of some generations."""
    found = {}
    for one in made:
        numbers = range(len(one.finished)) if one.rows is None else one.rows.tolist()
        fields = (one.response_tokens.unbind(), one.log_probs.unbind(), one.finished.tolist())
        for number, tokens, log_probs, finished in zip(numbers, *fields, strict=True):
            assert number not in found
            found[number] = (tokens.tolist(), log_probs.numpy().tobytes(), finished)
    return found


def stopping(engine, passes):
    """Abort the engine's generation while its so manieth forward runs."""
    forward, seen = engine.model.logits, []

    def counted(*args):
        seen.append(1)
        if len(seen) == passes:
            engine.abort()
        return forward(*args)

    engine.model.logits = counted


@pytest.mark.rows(2)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 12, 20])
def test_pieces_are_the_whole_and_come_as_rows_end(engine, count):
    whole = generated(engine, SAMPLED)
    pieces = in_pieces(engine, SAMPLED, count)
    assert by_row(whole) == by_row(*pieces)
    sizes = lengths(whole.response_tokens).tolist()
    order = sorted(range(12), key=lambda row: (sizes[row], row))
    shares = [order[ended_rows(12, i, count) : ended_rows(12, i + 1, count)] for i in range(count)]
    if count > 1:
        assert [sorted(share) for share in shares] == [made.rows.tolist() for made in pieces]
    assert len(set(sizes)) > 3


@pytest.mark.rows(2)
@pytest.mark.parametrize("count", [2, 3])
def test_pieces_of_groups_come_as_their_last_rows_end(engine, count):
    whole = generated(engine, SAMPLED)
    reaches = [Reach(piece=piece, pieces=count, groups=True) for piece in range(count)]
    pieces = [generated(engine, SAMPLED, reach) for reach in reaches]
    assert by_row(whole) == by_row(*pieces)
    sizes = lengths(whole.response_tokens).tolist()
    order = sorted(range(3), key=lambda group: (max(sizes[group * 4 :][:4]), group))
    ends = [ended_rows(3, done, count) for done in range(count + 1)]
    for made, first, last in zip(pieces, ends, ends[1:], strict=False):
        rows = [row for group in order[first:last] for row in range(4 * group, 4 * group + 4)]
        assert sorted(rows) == made.rows.tolist()


@pytest.mark.parametrize("count", [2, 4])
def test_pieces_do_the_work_of_the_whole_once(engine, count):
    generated(engine, SAMPLED)
    whole = engine.stats()
    seen = []
    for piece in range(count):
        generated(engine, SAMPLED, Reach(piece=piece, pieces=count))
        seen.append(engine.stats())
    assert {name: 2 * value for name, value in whole.items()} == seen[-1]
    passes = [stats["decode_passes"] for stats in seen]
    assert passes[0] < passes[-1]
    assert all(stats["prompt_tokens"] == seen[0]["prompt_tokens"] for stats in seen)


def test_rows_of_one_length_end_together(engine):
    alike = Sampling(max_new_tokens=9, n=4)
    first, *others = in_pieces(engine, alike, 4)
    assert [0, 1, 2, 3] == first.rows.tolist()
    assert 8 == engine.stats()["decode_passes"]
    assert by_row(generated(engine, alike)) == by_row(first, *others)


def test_no_prompts_have_pieces_without_rows(engine):
    pieces = in_pieces(engine, SAMPLED, 3, prompts=[])
    assert [[], [], []] == [made.rows.tolist() for made in pieces]
    assert {} == by_row(*pieces)
    assert 0 == len(flat(pieces[0].response_tokens))


@pytest.mark.parametrize("passes", [1, 4, 9])
def test_an_aborted_generation_still_brings_every_row(engine, passes):
    whole = by_row(generated(engine, SAMPLED))
    stopping(engine, passes)
    pieces = in_pieces(engine, SAMPLED, 3)
    found = by_row(*pieces)
    assert list(range(12)) == sorted(found)
    assert max(len(tokens) for tokens, _, _ in found.values()) == passes
    for row, (tokens, _, finished) in found.items():
        assert whole[row][0][: len(tokens)] == tokens
        assert finished == (tokens[-1] in STOPS)


def test_generations_in_pieces_do_not_disturb_each_other(engine):
    keys = [
        KEY,
        SampleKey(seed=1, iteration=3, stream="rollout"),
        SampleKey(seed=1, iteration=2, stream="other"),
    ]
    wholes = [by_row(generated(engine, SAMPLED, key=key)) for key in keys]
    made = {key: [] for key in keys}
    for piece in range(3):
        for key in keys:
            made[key].append(generated(engine, SAMPLED, Reach(piece=piece, pieces=3), key=key))
            generated(engine, GREEDY, key=key)
    assert wholes == [by_row(*pieces) for pieces in made.values()]
    assert wholes[0] != wholes[1] != wholes[2]


def test_a_generation_that_is_begun_anew_forgets_the_one_before(engine):
    whole = by_row(generated(engine, SAMPLED))
    generated(engine, SAMPLED, Reach(piece=0, pieces=4), prompts=[[1, 2]] * 3)
    assert whole == by_row(*in_pieces(engine, SAMPLED, 4))
    with pytest.raises(AssertionError, match="piece 1 of a generation that has not begun"):
        generated(engine, SAMPLED, Reach(piece=1, pieces=4))


def paused(engine, sampling, at):
    """Every row of a generation that stops after so many tokens and goes on from there."""
    begun = generated(engine, sampling, Reach(until=at))
    places = torch.nonzero(~begun.finished).flatten()
    prompts = ragged_rows([p for p in PROMPTS for _ in range(sampling.n)], torch.int64)
    seen = select_field(joined_rows(prompts, begun.response_tokens), places)
    more = engine.generate(seen, replace(sampling, n=1), KEY, places, Reach(first=at))
    tokens = [row.tolist() for row in begun.response_tokens.unbind()]
    log_probs = [row.tolist() for row in begun.log_probs.unbind()]
    finished = begun.finished.tolist()
    assert all(len(row) == at for row, done in zip(tokens, finished, strict=True) if not done)
    resumed = zip(
        places.tolist(), more.response_tokens.unbind(), more.log_probs.unbind(), strict=True
    )
    for (row, rest, probs), done in zip(resumed, more.finished.tolist(), strict=True):
        tokens[row] += rest.tolist()
        log_probs[row] += probs.tolist()
        finished[row] = done
    return tokens, log_probs, finished, places


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("sampling", "at"),
    [(GREEDY, 1), (GREEDY, 10), (SAMPLED, 1), (SAMPLED, 4), (SAMPLED, 9)]
    + [(LONG, at) for at in (1, 40, 63, 64, 65, 79)],
    ids=lambda value: value if isinstance(value, int) else f"t{value.temperature}x{value.n}",
)
def test_a_pause_changes_no_token(engine, sampling, at):
    whole = generated(engine, sampling)
    tokens, log_probs, finished, places = paused(engine, sampling, at)
    assert 0 < len(places)
    assert [row.tolist() for row in whole.response_tokens.unbind()] == tokens
    assert whole.finished.tolist() == finished
    found = torch.tensor([value for row in log_probs for value in row])
    torch.testing.assert_close(found, flat(whole.log_probs), atol=1e-5, rtol=1e-5)


def test_a_pause_after_the_end_is_none(engine):
    whole = by_row(generated(engine, SAMPLED))
    assert whole == by_row(generated(engine, SAMPLED, Reach(until=24)))
    assert whole == by_row(generated(engine, SAMPLED, Reach(until=1000)))


def test_the_first_part_may_come_in_pieces(engine):
    begun = generated(engine, SAMPLED, Reach(until=5))
    pieces = [generated(engine, SAMPLED, Reach(until=5, piece=i, pieces=3)) for i in range(3)]
    assert by_row(begun) == by_row(*pieces)
    assert 5 == lengths(pieces[-1].response_tokens).min()


def test_what_was_sampled_needs_no_room_again(engine):
    """The context has 96 places: 16 of a prompt and 80 new, of which 70 are there."""
    row = [1 + number % 30 for number in range(86)]
    asked, ids = ragged_rows([row], torch.int64), torch.arange(1)
    alone = Sampling(max_new_tokens=80, temperature=0.0)
    made = engine.generate(asked, alone, KEY, ids, Reach(first=70))
    assert [10] == lengths(made.response_tokens).tolist()
    with pytest.raises(RunError, match="prompt 0 is too long"):
        engine.generate(asked, alone, KEY, ids, Reach(first=69))
