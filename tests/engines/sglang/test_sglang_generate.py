"""What the real engine generates, against the embedded one on the same weights."""

from __future__ import annotations

import threading

import pytest
import torch

from rlflow.batch import flat, lengths, make_batch, ragged_rows
from rlflow.contract.values import Reach, SampleKey, Sampling
from rlflow.engines.hf.train import TrainEngine
from rlflow.errors import RunError
from rlflow.graph.rules.completion_order import ended_rows

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.sglang]

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10], [11, 3], [9, 12, 4, 13, 5, 14]]
GREEDY = Sampling(max_new_tokens=24, temperature=0.0, stop_tokens=(1,))


def tokens(generation):
    return [row.tolist() for row in generation.response_tokens.unbind()]


def apart(real, plain):
    return float((flat(real.log_probs) - flat(plain.log_probs)).abs().max())


@pytest.mark.parametrize("stops", [(), (1,), (8,), (7, 9)])
def test_greedy_equals_the_embedded_engine(pair, stops):
    sampling = Sampling(max_new_tokens=24, temperature=0.0, stop_tokens=stops)
    real, plain = pair.generate(PROMPTS, sampling)
    assert tokens(plain) == tokens(real)
    assert 1e-4 > apart(real, plain)
    assert torch.equal(plain.finished, real.finished)
    assert torch.float32 == flat(real.log_probs).dtype
    assert real.rows is None


def test_the_models_own_end_is_no_end_unless_it_is_asked_for(pair):
    real, _ = pair.generate([[3, 4, 5]], Sampling(max_new_tokens=12, temperature=0.0))
    (row,) = tokens(real)
    assert 12 == len(row)
    assert 1 in row[:-1]
    assert not real.finished.any()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_trainer(pair, temperature):
    sampling = Sampling(max_new_tokens=20, temperature=temperature, n=4, stop_tokens=(1,))
    real, _ = pair.generate(PROMPTS, sampling)
    prompts = ragged_rows([row for row in PROMPTS for _ in range(4)], torch.int64)
    batch = make_batch({"prompt_tokens": prompts, "response_tokens": real.response_tokens}, 16)
    trainer = TrainEngine(pair.plain.model, None, micro_tokens=None)
    found = trainer.forward(batch, outputs=("log_probs",), temperature=temperature)["log_probs"]
    assert 1e-4 > float((found - flat(real.log_probs)).abs().max())
    assert 4 == len({tuple(row) for row in tokens(real)[4:8]})


def test_top_k_and_top_p_keep_the_whole_distribution_in_the_log_probs(pair):
    one = Sampling(max_new_tokens=16, temperature=0.7, top_k=1)
    real, plain = pair.generate(PROMPTS, one)
    assert tokens(plain) == tokens(real)
    assert 1e-4 > apart(real, plain)
    narrow = Sampling(max_new_tokens=16, temperature=1.3, top_p=1e-6)
    real, plain = pair.generate(PROMPTS, narrow)
    assert tokens(plain) == tokens(real)
    assert 1e-4 > apart(real, plain)


def test_samples_of_a_prompt_share_what_is_cached_of_it(pair):
    pair.model.loaded(0)
    before = pair.rollout.stats()
    prompt = list(range(3, 43))
    sampling = Sampling(max_new_tokens=2, temperature=1.0, n=8)
    real, _ = pair.generate([prompt], sampling)
    after = pair.rollout.stats()
    assert 8 == len(real.finished)
    assert 40 == after["prompt_tokens"] - before["prompt_tokens"]
    assert 16 == after["new_tokens"] - before["new_tokens"]
    # The last token of a prompt is always computed.
    assert 8 * 39 == after["cached_prompt_tokens"] - before["cached_prompt_tokens"]


def test_a_part_of_the_responses(pair):
    whole, _ = pair.generate(PROMPTS, GREEDY)
    first, plain = pair.generate(PROMPTS, GREEDY, reach=Reach(until=7))
    assert [row[:7] for row in tokens(whole)] == tokens(first) == tokens(plain)
    assert torch.equal(plain.finished, first.finished)
    going = [row for row, done in enumerate(first.finished.tolist()) if not done]
    longer = [PROMPTS[row] + tokens(first)[row] for row in going]
    rest, plain = pair.generate(longer, GREEDY, reach=Reach(first=7))
    assert [tokens(whole)[row][7:] for row in going] == tokens(rest) == tokens(plain)


@pytest.mark.parametrize("pieces", [2, 3, 4])
def test_pieces_make_every_row_once_the_shortest_first(pair, pieces):
    sampling = Sampling(max_new_tokens=40, temperature=1.2, n=6, stop_tokens=(1, 8))
    prompts = ragged_rows(PROMPTS, torch.int64)
    key = SampleKey(seed=pieces, iteration=3, stream="gen")
    ids = torch.arange(24)
    made = [
        pair.rollout.generate(prompts, sampling, key, ids, Reach(piece=piece, pieces=pieces))
        for piece in range(pieces)
    ]
    assert list(range(24)) == sorted(torch.cat([piece.rows for piece in made]).tolist())
    sizes = {}
    for number, piece in enumerate(made):
        rows = piece.rows.tolist()
        assert sorted(rows) == rows
        assert ended_rows(24, number + 1, pieces) - ended_rows(24, number, pieces) == len(rows)
        sizes |= dict(zip(rows, lengths(piece.response_tokens).tolist(), strict=True))
    order = sorted(range(24), key=lambda row: (sizes[row], row))
    assert order == [row for piece in made for row in sorted(piece.rows.tolist(), key=order.index)]


def test_greedy_pieces_equal_the_embedded_engine(pair):
    prompts = [[3 + row, *range(4, 4 + row % 5)] for row in range(10)]
    sampling = Sampling(max_new_tokens=30, temperature=0.0, stop_tokens=(1, 8))
    for piece in range(3):
        real, plain = pair.generate(prompts, sampling, reach=Reach(piece=piece, pieces=3))
        assert plain.rows.tolist() == real.rows.tolist()
        assert tokens(plain) == tokens(real)
        assert torch.equal(plain.finished, real.finished)


def test_no_rows(pair):
    real, _ = pair.generate([], GREEDY)
    assert (0, 0) == (len(real.finished), len(flat(real.log_probs)))


def test_a_row_that_fills_the_context(pair):
    prompt = [3 + place % 40 for place in range(100)]
    real, plain = pair.generate([prompt], Sampling(max_new_tokens=28, temperature=0.0))
    assert 28 == len(tokens(real)[0])
    assert tokens(plain) == tokens(real)
    with pytest.raises(RunError, match=r"E505.*\n.*100 prompt tokens \+ 29") as caught:
        pair.generate([prompt], Sampling(max_new_tokens=29, temperature=0.0))
    assert "max_new_tokens=28" == caught.value.findings[0].fix


def test_an_abort_from_another_thread(pair):
    sampling = Sampling(max_new_tokens=120, temperature=1.0, n=64)
    made = []
    worker = threading.Thread(target=lambda: made.append(pair.rollout.generate(
        ragged_rows(PROMPTS, torch.int64), sampling,
        SampleKey(seed=1, iteration=9, stream="gen"), torch.arange(256),
    )))  # fmt: skip
    before = pair.model.replica.link().moved
    worker.start()
    while pair.model.replica.link().moved == before:
        pass
    pair.rollout.abort()
    worker.join(60)
    (real,) = made
    assert 256 == len(real.finished)
    assert not real.finished.any()
    assert 120 * 256 > int(lengths(real.response_tokens).sum())
    real, plain = pair.generate(PROMPTS, GREEDY)
    assert tokens(plain) == tokens(real)
