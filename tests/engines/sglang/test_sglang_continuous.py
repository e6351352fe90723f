"""Rows that go on in the real engine from call to call, against the embedded one.

Greedy rows have one continuation whatever is beside them, so both have the same tokens.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlflow.batch import flat, joined_rows, lengths, ragged, ragged_rows, select_field
from rlflow.contract.values import InFlight, SampleKey, Sampling
from rlflow.engines.process.client.rows import CompleteGroups

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10], [11, 3], [9, 12, 4, 13, 5, 14]]
KEY = SampleKey(seed=1, iteration=0, stream="gen")
N = 2


def test_a_group_is_complete_with_its_last_row():
    groups = CompleteGroups([4, 4, 7, 9, 9])
    groups.note([0, 3])
    assert [] == groups.complete
    groups.note([0, 4, 2])
    assert [9, 7] == groups.complete
    groups.note([1, 2])
    assert [9, 7, 4] == groups.complete
    assert frozenset({4, 7, 9}) == groups.all


class Flow:
    """The rows of one engine: what they have, which are over, and which groups have begun."""

    def __init__(self, engine, sampling):
        self.engine, self.sampling, self.calls = engine, sampling, 0
        count = len(PROMPTS) * N
        self.rows = torch.arange(count)
        self.prompts = select_field(ragged_rows(PROMPTS, torch.int64), self.rows // N)
        self.made = ragged_rows([[]] * count, torch.int64)
        self.scores = ragged_rows([[]] * count, torch.float32)
        self.over, self.begun = torch.zeros(count).bool(), frozenset()

    def advance(self, each):
        """Go on until so many groups more are complete."""
        left = torch.nonzero(~self.over).flatten()
        have, groups = select_field(self.made, left), left // N
        flight = InFlight(
            seen=joined_rows(select_field(self.prompts, left), have),
            made=lengths(have),
            draws=torch.zeros(len(left), dtype=torch.int64),
            ids=left,
            groups=groups,
            begun=self.begun & frozenset(groups.tolist()),
            at_once=len(self.rows),
            met=lambda _, ended: len(ended) >= each,
        )
        found = self.engine.advance(flight, self.sampling, KEY)
        assert found.begun >= flight.begun
        assert set(found.ended) <= set(groups.tolist())
        self.begun |= found.begun
        sizes = torch.zeros(len(self.rows), dtype=torch.int64)
        sizes[left] = lengths(found.response_tokens)
        self.made = joined_rows(self.made, ragged(flat(found.response_tokens), sizes))
        self.scores = joined_rows(self.scores, ragged(flat(found.log_probs), sizes))
        self.over[left] = found.over
        self.calls += 1

    def tokens(self):
        return [row.tolist() for row in self.made.unbind()]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.parametrize("stops", [(), (11,)])
def test_rows_that_are_ended_go_on_with_what_they_have(pair, stops):
    """Each call stops after one group more, the others come back with what they have."""
    sampling = Sampling(max_new_tokens=110, temperature=0.0, stop_tokens=stops)
    flow = Flow(pair.rollout, sampling)
    while not flow.over.all():
        flow.advance(1)
    assert flow.calls <= len(PROMPTS)
    prompts, ids = ragged_rows(PROMPTS, torch.int64), torch.arange(len(PROMPTS) * N)
    whole = pair.plain.generate(prompts, replace(sampling, n=N), KEY, ids)
    assert [row.tolist() for row in whole.response_tokens.unbind()] == flow.tokens()
    assert 1e-4 > float((flat(whole.log_probs) - flat(flow.scores)).abs().max())


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.sglang
def test_rows_go_on_with_other_weights(pair):
    """After an update both engines go on alike from what the real one has left.

    Token 11 ends two of the groups at once, the others go on to the limit.
    """
    sampling = Sampling(max_new_tokens=110, temperature=0.0, stop_tokens=(11,))
    real, plain = Flow(pair.rollout, sampling), Flow(pair.plain, sampling)
    real.advance(1)
    assert real.begun
    assert not real.over.all()
    plain.made, plain.scores, plain.over = real.made, real.scores, real.over.clone()
    plain.begun = real.begun
    pair.update(1, 5)
    for flow in (real, plain):
        flow.advance(len(PROMPTS))
        assert flow.over.all()
    assert plain.tokens() == real.tokens()
    assert 1e-4 > float((flat(plain.scores) - flat(real.scores)).abs().max())
