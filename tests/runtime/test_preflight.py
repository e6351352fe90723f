"""What is looked at before a run starts: each source once, whoever reads it."""

from __future__ import annotations

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import UsageError
from rlflow.runtime import preflight
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
def read(monkeypatch):
    calls = []
    real = preflight.token_rows
    monkeypatch.setattr(preflight, "token_rows", lambda *a: calls.append(a[0].node) or real(*a))
    return calls


def test_a_source_is_tokenized_once_for_all_that_read_it(read):
    preflight.check_prompts(graph_of(4, 4, 8, 8), None)
    assert ["actor.rollout"] == read


def test_each_length_is_measured(read):
    with pytest.raises(UsageError) as caught:
        preflight.check_prompts(graph_of(4, 10**6), None)
    assert ["actor.rollout"] == read
    assert "actor.rollout_2" in str(caught.value)
