"""What is looked at before a run starts: each source once, whoever reads it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlflow as rf
from rlflow import ops
from rlflow.engines.hf.loading import load_tokenizer
from rlflow.errors import UsageError
from rlflow.runtime import preflight
from rlflow.scheduler.models.shapes import model_shape
from tests.conftest import TINY

pytestmark = pytest.mark.torch


def graph_of(*lengths):
    """Rollouts of one source, of several lengths."""

    @rf.pipeline()
    def made(cfg: rf.Config) -> None:
        actor = rf.Model("actor", str(TINY))
        data = rf.data.arithmetic(digits=2)
        for most in lengths:
            prompts = ops.prompts(data, batch=4)
            ops.metrics(ops.rollout(actor, prompts, n=2, max_new_tokens=most))

    return made.trace()


@pytest.fixture
def tokenized(monkeypatch):
    """How many prompts each call tokenized."""
    calls = []
    real = preflight.token_rows
    monkeypatch.setattr(preflight, "token_rows", lambda *a: calls.append(len(a[2])) or real(*a))
    return calls


def test_a_source_is_looked_at_once_for_all_that_read_it(tokenized):
    preflight.check_prompts(graph_of(4, 4, 8, 8), None)
    assert tokenized == [1]


def test_each_length_is_measured(tokenized):
    with pytest.raises(UsageError) as caught:
        preflight.check_prompts(graph_of(4, 10**6), None)
    assert tokenized == [1, 9_488]
    assert "actor.rollout_2" in str(caught.value)


def graph_of_rows(texts, most):
    @rf.pipeline()
    def made(cfg: rf.Config) -> None:
        actor = rf.Model("actor", str(TINY))
        data = rf.data.generator(
            lambda row: {"prompt": texts[row]}, size=len(texts), columns=["prompt"]
        )
        ops.metrics(
            ops.rollout(actor, ops.prompts(data, batch=1), n=2, max_new_tokens=most),
        )

    return made.trace()


@given(
    st.lists(st.text("0123456789+= ", min_size=1, max_size=40), min_size=1, max_size=12),
    st.integers(80, 126),
)
def test_the_refused_are_those_whose_tokens_do_not_fit(texts, most):
    """The quick look refuses what tokenizing every prompt refuses, and names the same row."""
    tokenizer = load_tokenizer(str(TINY))
    sizes = [len(tokenizer(text)["input_ids"]) for text in texts]
    context = model_shape(rf.Model("actor", str(TINY)), None).context
    bad = [row for row, size in enumerate(sizes) if size + most > context]
    if not bad:
        preflight.check_prompts(graph_of_rows(texts, most), None)
        return
    with pytest.raises(UsageError) as caught:
        preflight.check_prompts(graph_of_rows(texts, most), None)
    assert f"in row {bad[0]}:" in str(caught.value)
