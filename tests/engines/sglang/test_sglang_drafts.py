"""A drafter in the real engine: the same greedy tokens, its own weights, and how well it does."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import rlflow as rf
from rlflow.batch import ragged_rows
from rlflow.contract.values import Drafting, Reach, SampleKey, Sampling
from rlflow.engines.hf.loading import load_model
from rlflow.errors import RunError
from tests.engines.sglang.conftest import (
    GREEDY,
    TINY,
    afresh,
    needs_sglang,
    options,
    paired,
    same,
    start,
)

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.sglang]

DRAFT = Drafting(name="drafter@gen", path=TINY, init="random", tokens=3)
PROMPTS = [list(range(3, 33)), list(range(10, 45)), [5, 6, 7]]


def weights():
    """The policy's first weights: the best that a drafter can have here."""
    return dict(load_model(TINY, dtype=torch.float32, device="cpu").named_tensors())


@pytest.fixture(scope="module")
def _drafted():
    needs_sglang()
    made = paired(*start(draft=DRAFT))
    yield made
    made.model.close()


@pytest.fixture
def drafted(_drafted):
    """Both engines with the first weights, awake; the real one's drafter is random."""
    afresh(_drafted)
    source = torch.Generator().manual_seed(9)
    random = {n: 0.02 * torch.randn(t.shape, generator=source) for n, t in weights().items()}
    give(_drafted.model.draft, random, 0)
    return _drafted


def give(draft, tensors, version):
    """What a reshard does: write the staging, then load it."""
    for name, shard in draft.shards().items():
        shard.tensor.copy_(tensors[name])
    draft.loaded(version)


def accepted(pair, sampling=GREEDY):
    """The part of what was drafted that is right, of rows equal to the embedded engine's."""
    before = pair.rollout.stats()
    same(*pair.generate(PROMPTS, sampling))
    after = pair.rollout.stats()
    drafts, right = (after[name] - before[name] for name in ("drafted", "accepted"))
    assert 0 <= right <= drafts
    assert drafts > 0
    return right / drafts


def test_tokens_are_the_same_and_better_weights_draft_better(drafted):
    random = accepted(drafted)
    give(drafted.model.draft, weights(), 5)
    assert {} == drafted.model.draft.check()
    assert {} == drafted.model.check()
    good = accepted(drafted)
    assert good > 0.6
    assert good > random + 0.3


def test_a_drafters_version_is_not_the_policys(drafted):
    give(drafted.model.draft, weights(), 7)
    assert (0, 7) == (drafted.model.version, drafted.model.draft.version)
    same(*drafted.generate(PROMPTS, GREEDY))
    drafted.update(8, seed=3)
    assert (8, 7) == (drafted.model.version, drafted.model.draft.version)
    same(*drafted.generate(PROMPTS, GREEDY))


def test_each_update_is_of_its_own_model(drafted):
    give(drafted.model.draft, weights(), 1)
    drafted.update(1, seed=4)
    assert {} == drafted.model.check()
    assert {} == drafted.model.draft.check()
    name = "model.norm.weight"
    drafted.model.draft.staging.tensors[name].add_(1.0)
    assert [name] == list(drafted.model.draft.check())
    assert {} == drafted.model.check()


@pytest.mark.parametrize("stops", [(9,), (8, 10), (4, 9)])
def test_rows_end_at_their_stop_tokens(drafted, stops):
    give(drafted.model.draft, weights(), 1)
    accepted(drafted, Sampling(max_new_tokens=12, temperature=0.0, n=2, stop_tokens=stops))


def test_pieces_are_the_rows_that_end_first(drafted):
    give(drafted.model.draft, weights(), 1)
    prompts = ragged_rows(PROMPTS, torch.int64)
    sampling = Sampling(max_new_tokens=12, temperature=0.0, n=2, stop_tokens=(9,))
    key, ids = SampleKey(seed=1, iteration=0, stream="gen"), torch.arange(6)
    found = [
        [engine.generate(prompts, sampling, key, ids, Reach(piece=n, pieces=3)) for n in range(3)]
        for engine in (drafted.rollout, drafted.plain)
    ]
    for real, plain in zip(*found, strict=True):
        assert plain.rows.tolist() == real.rows.tolist()
        same(real, plain)


def test_prompts_as_long_as_the_context_allows(drafted):
    context = drafted.model.context
    rows = [[5] * (context - 20), [7] * (context - 20)]
    same(*drafted.generate(rows, Sampling(max_new_tokens=20, temperature=0.0)))


def test_a_prompt_beyond_the_context_of_the_drafter_is_refused(drafted, monkeypatch):
    monkeypatch.setattr(drafted.model.draft, "context", 40)
    with pytest.raises(RunError, match="E597"):
        drafted.generate(PROMPTS, GREEDY)


def test_it_sleeps_with_the_engine_and_is_filled_when_that_wakes(drafted):
    """What a reshard brings meanwhile is what it wakes with."""
    drafted.rollout.sleep("discard")
    give(drafted.model.draft, weights(), 2)
    assert {} == drafted.model.draft.check()
    drafted.model.wake()
    assert {} == drafted.model.draft.check()
    drafted.update(3, None)
    drafted.model.wake_pool()
    assert accepted(drafted) > 0.6
    drafted.rollout.sleep("offload")
    drafted.rollout.wake()
    assert accepted(drafted) > 0.6


def test_a_replacement_has_the_weights_of_both(drafted):
    drafted.update(4, seed=6)
    give(drafted.model.draft, weights(), 6)
    starts = drafted.model.replica.starts
    os.killpg(drafted.model.replica._process.pid, signal.SIGKILL)
    same(*drafted.generate(PROMPTS, GREEDY))
    assert starts + 1 == drafted.model.replica.starts
    assert {} == drafted.model.check()
    assert {} == drafted.model.draft.check()


@pytest.mark.parametrize("updates", [pytest.param("memory", marks=pytest.mark.extra), "group"])
def test_a_frozen_draft_model_stays_as_it_is(updates):
    """The policy moves on, and what its options draft with is still the first policy."""
    said = rf.Speculative(algorithm="STANDALONE", draft_model=TINY, draft_tokens=3)
    pair = paired(*start(options=options(speculative=said, updates=updates)))
    good = accepted(pair)
    assert good > 0.5
    pair.update(1, 8)
    other = accepted(pair)
    assert {} == pair.model.check()
    pair.update(2, None)
    assert pytest.approx(good, abs=0.02) == accepted(pair)
    assert other < good
    pair.model.close()
