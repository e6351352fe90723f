"""Drafts change how many passes a generation takes, and nothing that it brings.

Models in float64 leave no rounding that a uniform number could tell. Those in float32 have
errors of about 1e-5 in log-probs, so another shape of a pass could choose another token where
the number lies as close to a bound of the distribution function: the seeds here meet none.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rlflow.batch import flat, lengths, ragged_rows
from rlflow.contract.values import Reach, SampleKey, Sampling
from rlflow.engines.hf.generate.speculative import Draft, SpeculativeDecoding
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.models import TorchModel
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.errors import RunError
from tests.budget import examples
from tests.conftest import TINY
from tests.engines.examples import exact

pytestmark = pytest.mark.torch

KEY = SampleKey(seed=1, iteration=2, stream="rollout")
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9], [4]]
SAMPLED = Sampling(max_new_tokens=24, n=3, stop_tokens=(0, 7, 11))
FREE = Sampling(max_new_tokens=24, n=3)


def load(path, dtype=torch.float64, **more):
    model = load_model(str(path), dtype=dtype, device="cpu", **more)
    if dtype == torch.float64:
        exact(model.module)
    return model


def disturbed(path, size, dtype=torch.float64):
    """The model at a path with noise of a size on its weights."""
    model, made = load(path, dtype), torch.Generator().manual_seed(5)
    for tensor in model.named_tensors().values():
        noise = torch.randn(tensor.shape, generator=made, dtype=torch.float64)
        tensor.add_(noise.to(dtype), alpha=size)
    return model


@pytest.fixture(scope="module")
def models(model_dir):
    """The policy, and drafters by how they are related to it; float64."""
    path = model_dir("qwen2")
    return {
        "itself": load(path),
        "near": disturbed(path, 0.02),
        "random": load(path, init="random", seed=8),
        "other": load(model_dir("llama")),
    }


@pytest.fixture(scope="module")
def tiny():
    """The same of the model that the pipelines ship, float32."""
    return {
        "itself": load(TINY, torch.float32),
        "near": disturbed(TINY, 0.02, torch.float32),
        "random": load(TINY, torch.float32, init="random", seed=3),
    }


def generated(model, sampling, reach=None, draft=None, prompts=PROMPTS):
    """A generation and what it adds to the statistics."""
    engine = TorchRollout(model)
    asked, ids = ragged_rows(prompts, torch.int64), torch.arange(len(prompts) * sampling.n)
    made = engine.generate(asked, sampling, KEY, ids, reach or Reach(), draft)
    return made, dict(engine.stats())


def in_pieces(model, sampling, count, draft=None, engine=None):
    engine = engine or TorchRollout(model)
    asked, ids = ragged_rows(PROMPTS, torch.int64), torch.arange(len(PROMPTS) * sampling.n)
    return [
        engine.generate(asked, sampling, KEY, ids, Reach(piece=piece, pieces=count), draft)
        for piece in range(count)
    ]


def tokens(made):
    return [row.tolist() for row in made.response_tokens.unbind()]


def require_equal(plain, drafted, atol=1e-6):
    assert tokens(plain) == tokens(drafted)
    assert plain.finished.tolist() == drafted.finished.tolist()
    assert torch.float32 == drafted.log_probs.dtype
    assert torch.allclose(flat(plain.log_probs), flat(drafted.log_probs), atol=atol, rtol=0)


def acceptance(stats):
    return stats["accepted"] / stats["drafted"]


@pytest.mark.rows(4)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8), (9, 0.9)])
def test_tokens_are_those_of_plain_decoding(temperature, top_k, top_p, tiny):
    chosen = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    sampling = Sampling(max_new_tokens=20, n=2, stop_tokens=(13, 20), **chosen)
    policy = tiny["itself"]
    plain, without = generated(policy, sampling)
    rates, passes = {}, {}
    for name, drafter in tiny.items():
        drafted, stats = generated(policy, sampling, draft=Draft(model=drafter, tokens=3))
        require_equal(plain, drafted, atol=1e-4)
        assert stats["new_tokens"] == without["new_tokens"]
        rates[name], passes[name] = acceptance(stats), stats["decode_passes"]
    assert rates["itself"] == 1 > rates["near"] > 0.4 > rates["random"]
    assert passes["itself"] < passes["near"] < passes["random"] <= without["decode_passes"]
    assert without["drafted"] == without["accepted"] == 0


@pytest.mark.rows(2)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gptoss", "gpt2"])
def test_every_kind_of_attention_and_up_to_the_end_of_the_context(family, model_dir):
    """Windows, soft caps, sinks, learned positions; drafts look beyond the last of 96 places."""
    dtype = torch.float32 if family == "gptoss" else torch.float64
    policy = load(model_dir(family), dtype)
    sampling = Sampling(max_new_tokens=89, temperature=0.8, n=2)
    plain, _ = generated(policy, sampling)
    rates = []
    for drafter in (policy, disturbed(model_dir(family), 0.01, dtype)):
        drafted, stats = generated(policy, sampling, draft=Draft(model=drafter, tokens=5))
        require_equal(plain, drafted, atol=1e-6 if dtype == torch.float64 else 1e-4)
        rates.append(acceptance(stats))
    assert rates[0] == 1 > rates[1] > 0.2


@pytest.mark.slow
@settings(max_examples=examples(80))
@given(
    prompts=st.lists(st.lists(st.integers(0, 31), min_size=1, max_size=9), min_size=1, max_size=4),
    drafter=st.sampled_from(["itself", "near", "random", "other"]),
    count=st.integers(1, 6),
    most=st.none() | st.integers(0, 12),
    limit=st.integers(1, 30),
    chosen=st.fixed_dictionaries(
        {
            "n": st.integers(1, 3),
            "temperature": st.sampled_from([0.0, 0.7, 1.0]),
            "top_k": st.sampled_from([0, 4]),
            "top_p": st.sampled_from([1.0, 0.9]),
            "stop_tokens": st.sampled_from([(), (0,), tuple(range(8))]),
        }
    ),
    seed=st.integers(0, 2**40),
    part=st.tuples(st.integers(0, 30), st.integers(1, 30)),
)
def test_nothing_else_depends_on_the_drafter(
    prompts, drafter, count, most, limit, chosen, seed, part, models
):
    sampling = Sampling(max_new_tokens=limit, **chosen)
    first = min(part[0], limit - 1)
    reach = Reach(first=first, until=first + part[1])
    asked, ids = ragged_rows(prompts, torch.int64), torch.arange(len(prompts) * sampling.n)
    key = SampleKey(seed=seed, iteration=0, stream="rollout")
    engine = TorchRollout(models["itself"])
    draft = Draft(model=models[drafter], tokens=count, rows=most)
    plain = engine.generate(asked, sampling, key, ids, reach)
    before = dict(engine.stats())
    drafted = engine.generate(asked, sampling, key, ids, reach, draft)
    require_equal(plain, drafted)
    stats = {name: value - before[name] for name, value in engine.stats().items()}
    assert stats["decode_passes"] <= before["decode_passes"]
    assert stats["accepted"] <= stats["drafted"] <= count * stats["new_tokens"]
    assert drafter != "itself" or stats["accepted"] == stats["drafted"]
    assert stats["new_tokens"] == before["new_tokens"]


@pytest.mark.rows(3)
@pytest.mark.parametrize("drafter", ["itself", "near", "random"])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_pieces_are_those_of_plain_decoding(drafter, count, models):
    policy, draft = models["itself"], Draft(model=models[drafter], tokens=4)
    whole, _ = generated(policy, SAMPLED, draft=draft)
    engine = TorchRollout(policy)
    plain = in_pieces(policy, SAMPLED, count)
    pieces = in_pieces(policy, SAMPLED, count, draft, engine)
    for mine, theirs in zip(plain, pieces, strict=True):
        assert mine.rows.tolist() == theirs.rows.tolist()
        require_equal(mine, theirs)
    rows = [row for made in pieces for row in made.rows.tolist()]
    assert sorted(rows) == list(range(12))
    joined = dict(zip(rows, (row for made in pieces for row in tokens(made)), strict=True))
    assert [joined[row] for row in range(12)] == tokens(whole)
    assert engine.stats() == generated(policy, SAMPLED, draft=draft)[1]
    assert len(set(lengths(whole.response_tokens).tolist())) > 3


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_drafter_that_begins_late_changes_how_many_passes_there_are_alone(pieces, models):
    """Of 12 rows one ends after the other; with fewer rows at the most it passes less often."""
    policy, tally = models["itself"], {}
    plain = in_pieces(policy, SAMPLED, pieces)
    forward = models["near"].logits
    for most in (None, 12, 11, 6, 2, 1, 0):
        passes, engine = [], TorchRollout(policy)
        models["near"].logits = lambda *args, seen=passes: seen.append(1) or forward(*args)
        try:
            draft = Draft(model=models["near"], tokens=3, rows=most)
            made = in_pieces(policy, SAMPLED, pieces, draft, engine)
        finally:
            del models["near"].logits
        for mine, theirs in zip(plain, made, strict=True):
            require_equal(mine, theirs)
        stats = engine.stats()
        tally[most] = (len(passes), stats["drafted"], stats["decode_passes"])
    assert tally[None] == tally[12]
    assert tally[None] > tally[11] > tally[6] > tally[2] > tally[1] > tally[0] == (0, 0.0, 19.0)


@pytest.mark.parametrize("most", [11, 6, 1])
def test_a_drafter_that_begins_late_has_read_all_that_its_rows_have(most, models, monkeypatch):
    """The policy drafts for itself: what it had not read would be a draft that is wrong."""
    monkeypatch.setattr("rlflow.engines.hf.generate.speculative.READ", 5)
    policy, draft = models["itself"], Draft(model=models["itself"], tokens=3, rows=most)
    plain, _ = generated(policy, SAMPLED)
    drafted, stats = generated(policy, SAMPLED, draft=draft)
    require_equal(plain, drafted)
    assert stats["accepted"] == stats["drafted"] > 0


def test_rows_take_different_numbers_of_drafts_at_a_time(models, monkeypatch):
    widths = []

    def seen(decoding, *args):
        widths.append(len(set(decoding.counts.tolist())))
        return verify(decoding, *args)

    verify = SpeculativeDecoding.verify
    monkeypatch.setattr(SpeculativeDecoding, "verify", seen)
    plain, _ = generated(models["itself"], FREE)
    drafted, _ = generated(models["itself"], FREE, draft=Draft(model=models["near"], tokens=4))
    require_equal(plain, drafted)
    assert max(widths) > 3


def test_more_tokens_than_the_first_columns_and_numbers(models):
    """Buffers and random numbers are made for 64 columns at first."""
    long = Sampling(max_new_tokens=88, n=2, temperature=0.9)
    plain, _ = generated(models["itself"], long)
    drafted, _ = generated(models["itself"], long, draft=Draft(model=models["near"], tokens=7))
    require_equal(plain, drafted)
    assert [88] * 8 == lengths(drafted.response_tokens).tolist()


@pytest.mark.parametrize("passes", [1, 3, 6])
@pytest.mark.parametrize("pieces", [1, 3])
def test_an_abort_leaves_rows_that_begin_as_the_whole(passes, pieces, models):
    whole = tokens(generated(models["itself"], SAMPLED)[0])
    engine = TorchRollout(models["itself"])
    forward, seen = engine.model.logits, []

    def counted(*args):
        seen.append(1)
        if len(seen) == passes:
            engine.abort()
        return forward(*args)

    draft = Draft(model=models["near"], tokens=2)
    engine.model.logits = counted
    try:
        made = in_pieces(engine.model, SAMPLED, pieces, draft, engine)
    finally:
        del engine.model.logits
    rows = [row for one in made for row in (range(12) if pieces == 1 else one.rows.tolist())]
    assert sorted(rows) == list(range(12))
    found = [row for one in made for row in tokens(one)]
    finished = [done for one in made for done in one.finished.tolist()]
    for number, row, done in zip(rows, found, finished, strict=True):
        assert row == whole[number][: len(row)]
        assert done == (row[-1] in SAMPLED.stop_tokens)
        assert len(row) <= 1 + 3 * (passes - 1)
    assert not all(finished)
    assert passes - 1 == engine.stats()["decode_passes"]


class Chain(nn.Module):
    """After token t comes `follows[t]`, whatever was before."""

    def __init__(self, follows):
        super().__init__()
        rows = torch.nn.functional.one_hot(torch.tensor(list(follows)), len(follows))
        self.table = nn.Parameter(10.0 * rows)

    def forward(self, input_ids, position_ids, use_cache, logits_to_keep):
        kept = slice(None) if isinstance(logits_to_keep, int) else logits_to_keep
        return SimpleNamespace(logits=self.table[input_ids[:, kept]])


def stated(module, size):
    """The same weights under a config that says a vocabulary of a size, and 40 positions."""
    inner = SimpleNamespace(vocab_size=size, max_position_embeddings=40)
    config = SimpleNamespace(get_text_config=lambda: inner)
    return TorchModel(module, config, head="lm", name="stated")


def chain(**wrong):
    """The numbers to 11 in a circle, but for those of `wrong`: t3=9 means that 9 follows 3."""
    follows = [wrong.get(f"t{token}", (token + 1) % 12) for token in range(12)]
    return stated(Chain(follows), 12)


@pytest.mark.parametrize(
    ("prompts", "limit", "stops", "expected"),
    [
        # 1; 2 3 (9): 2 of 3 right, 4 comes of the policy; 5 6 7: 3 of 3, 8 comes of the policy.
        ([[0]], 8, (), (6, 5, 2)),
        # 6 ends the row, so nobody asks for the 7 behind it.
        ([[0]], 8, (6,), (5, 4, 2)),
        # A wrong 9 ends what the drafter says, but not the row.
        ([[0]], 8, (9,), (6, 5, 2)),
        # The policy's own 4 ends it.
        ([[0]], 8, (4,), (3, 2, 1)),
        # 1, and room for two more: one draft, as the last comes of the policy.
        ([[0]], 3, (), (1, 1, 1)),
        ([[0]], 2, (), (0, 0, 1)),
        ([[0]], 1, (), (0, 0, 0)),
        # Beside it 3; (9 10 11): 0 of 3, 4; 5 6 7: 3 of 3, 8; 9: 1 of 1, 10.
        ([[0], [1, 2]], 8, (), (13, 9, 3)),
        # The first row has room for two drafts while the second takes three.
        ([[0], [1, 2]], 7, (), (11, 7, 3)),
        # One draft for the first row, which is nearly done, does not keep the second from three.
        ([[0], [1, 2]], 6, (), (10, 6, 2)),
    ],
)
def test_drafts_are_counted_as_by_hand(prompts, limit, stops, expected):
    sampling = Sampling(max_new_tokens=limit, temperature=0.0, stop_tokens=stops)
    plain, _ = generated(chain(), sampling, prompts=prompts)
    drafter = Draft(model=chain(t3=9), tokens=3)
    made, stats = generated(chain(), sampling, draft=drafter, prompts=prompts)
    require_equal(plain, made)
    assert expected == (stats["drafted"], stats["accepted"], stats["decode_passes"])


def test_no_draft_is_made_that_no_row_has_room_for():
    drafter, calls = chain(), []
    forward = drafter.logits
    drafter.logits = lambda *args: calls.append(1) or forward(*args)
    greedy = Sampling(max_new_tokens=3, temperature=0.0)
    generated(chain(), greedy, draft=Draft(model=drafter, tokens=3), prompts=[[0]])
    assert 1 + 1 == len(calls)


def test_the_drafter_reads_at_most_two_tokens_a_row_at_a_time(models):
    """The last, and before it the last draft of a turn whose drafts were all right."""
    draft = Draft(model=models["near"], tokens=4)
    read = []

    def watched(tokens, positions, *args):
        read.append((len(tokens), int(positions.max())))
        return forward(tokens, positions, *args)

    forward = draft.model.logits
    draft.model.logits = watched
    try:
        made, stats = generated(models["itself"], FREE, draft=draft)
    finally:
        del draft.model.logits
    assert read[0][0] >= sum(len(prompt) for prompt in PROMPTS)
    assert {12, 24} <= {size for size, _ in read[1:]} <= {8, 12, 16, 24}
    assert len(read) - 1 <= 4 * stats["decode_passes"]
    assert max(place for _, place in read) < 7 + 24 + 4
    assert [24] * 12 == lengths(made.response_tokens).tolist()


def test_no_drafts_is_plain_decoding_to_the_bit(models):
    plain, without = generated(models["itself"], SAMPLED)
    none, stats = generated(models["itself"], SAMPLED, draft=Draft(model=models["near"], tokens=0))
    require_equal(plain, none, atol=0)
    assert without == stats


def test_no_prompts_give_no_rows(models):
    draft = Draft(model=models["near"], tokens=2)
    made, _ = generated(models["itself"], SAMPLED, draft=draft, prompts=[])
    assert [] == tokens(made)


def test_a_drafter_with_a_smaller_vocabulary_is_refused():
    draft = Draft(model=stated(Chain(range(11)), 11), tokens=2)
    with pytest.raises(RunError, match="E596") as caught:
        generated(chain(), FREE, draft=draft, prompts=[[1]])
    assert "a vocabulary of 11" in str(caught.value)
    assert "at least 12, the policy's" in str(caught.value)


def test_what_only_the_drafter_knows_is_not_proposed():
    """Token 12, which the policy lacks, is the likeliest to the drafter everywhere."""
    drafter = Chain([(token + 1) % 12 for token in range(12)])
    table = torch.cat([drafter.table.detach(), torch.full((12, 1), 99.0)], 1)
    drafter.table = nn.Parameter(table)
    draft = Draft(model=stated(drafter, 13), tokens=3)
    greedy = Sampling(max_new_tokens=9, temperature=0.0)
    made, stats = generated(chain(), greedy, draft=draft, prompts=[[0]])
    assert [[1, 2, 3, 4, 5, 6, 7, 8, 9]] == tokens(made)
    assert (6, 6, 2) == (stats["drafted"], stats["accepted"], stats["decode_passes"])


def test_a_drafter_with_a_shorter_context_is_refused(models):
    """Its context has 40 places; those of prompts that are responses' first tokens count once."""
    draft = Draft(model=stated(models["near"].module, 32), tokens=2)
    fits = replace(FREE, max_new_tokens=33)
    plain, _ = generated(models["itself"], fits)
    require_equal(plain, generated(models["itself"], fits, draft=draft)[0])
    longer = replace(FREE, max_new_tokens=34)
    with pytest.raises(RunError, match="E597") as caught:
        generated(models["itself"], longer, draft=draft)
    assert "40 tokens" in str(caught.value)
    generated(models["itself"], longer, Reach(first=1), draft)
    assert "at least 41: the longest prompt and 34 new tokens" in str(caught.value)


def test_a_drafter_that_sleeps_is_refused(model_dir, models):
    drafter = load(model_dir("llama"))
    drafter.sleep()
    with pytest.raises(RunError, match="E506"):
        generated(models["itself"], FREE, draft=Draft(model=drafter, tokens=2))
    drafter.wake()
    plain, _ = generated(models["itself"], FREE)
    require_equal(plain, generated(models["itself"], FREE, draft=Draft(model=drafter, tokens=2))[0])
