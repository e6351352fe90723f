"""Rows that go on in the real engine from call to call, against the embedded one.

Greedy rows have one continuation whatever is beside them, so both have the same tokens.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch

from rlflow.batch import flat, joined_rows, lengths, ragged, ragged_rows, select_field
from rlflow.contract.values import InFlight, SampleKey, Sampling
from rlflow.engines.process.client.rows.answers import CompleteGroups
from tests.engines.sglang.conftest import start

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


def both_advance(engines, flight, sampling, least):
    """Two engines go on with the same rows and tell each other which have ended, in threads."""
    barrier, said = threading.Barrier(2, timeout=120), [[], []]

    def told(own, ended):
        said[own] = list(ended)
        barrier.wait()
        found = sorted({*said[0], *said[1]})
        barrier.wait()
        return found

    def one(own):
        mine = replace(
            flight,
            replicas=2,
            own=own,
            told=partial(told, own),
            met=lambda begun, ended: len(ended) >= least,
        )
        return engines[own].advance(mine, sampling, KEY)

    with ThreadPoolExecutor(2) as pool:
        return [each.result() for each in [pool.submit(one, own) for own in range(2)]]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.extra
def test_replicas_share_the_groups_and_agree_on_what_has_ended(pair):
    """Groups are dealt to two engines; what begins later goes to the one that has room."""
    sampling = Sampling(max_new_tokens=60, temperature=0.0, stop_tokens=(11,))
    other_model, other = start()
    try:
        count = len(PROMPTS) * N
        groups = torch.arange(count) // N
        prompts = select_field(ragged_rows(PROMPTS, torch.int64), groups)
        flight = InFlight(
            seen=prompts,
            made=torch.zeros(count, dtype=torch.int64),
            draws=torch.zeros(count, dtype=torch.int64),
            ids=torch.arange(count),
            groups=groups,
            begun=frozenset(),
            at_once=2 * N,
            met=lambda begun, ended: False,
        )
        first, second = both_advance((pair.rollout, other), flight, sampling, len(PROMPTS))
        early = both_advance((pair.rollout, other), flight, sampling, 1)
        for made in ((first, second), early):
            assert made[0].ended == made[1].ended
            assert made[0].begun == made[1].begun
            assert made[0].over.tolist() == made[1].over.tolist()
        # Room for two groups: no third begins before a row has ended.
        assert {0, 1, 2, 3} == first.begun
        assert first.over.all()
        assert len(early[0].begun) < len(PROMPTS)
        sizes = [lengths(made.response_tokens) for made in (first, second)]
        assert not (sizes[0] * sizes[1]).any()
        assert all(each[:count].sum() for each in sizes)
        tokens = [
            (a if len(a) else b).tolist()
            for a, b in zip(
                first.response_tokens.unbind(), second.response_tokens.unbind(), strict=True
            )
        ]
        whole = pair.plain.generate(
            ragged_rows(PROMPTS, torch.int64), replace(sampling, n=N), KEY, torch.arange(count)
        )
        assert [row.tolist() for row in whole.response_tokens.unbind()] == tokens
    finally:
        other_model.close()


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.sglang
def test_rows_go_on_with_other_weights(pair):
    """After an update both engines go on alike from the tokens that rows have already.

    Token 11 ends two of the groups at once, the others go on to the limit.
    """
    sampling = Sampling(max_new_tokens=110, temperature=0.0, stop_tokens=(11,))
    real, plain = Flow(pair.rollout, sampling), Flow(pair.plain, sampling)
    prompts = ragged_rows(PROMPTS, torch.int64)
    first = replace(sampling, n=N, max_new_tokens=40)
    begun = pair.plain.generate(prompts, first, KEY, real.rows)
    for flow in (real, plain):
        flow.made, flow.scores = begun.response_tokens, begun.log_probs
        flow.over, flow.begun = begun.finished.clone(), frozenset(range(len(PROMPTS)))
    assert {True, False} == set(real.over.tolist())
    pair.update(1, 5)
    for flow in (real, plain):
        flow.advance(len(PROMPTS))
        assert flow.over.all()
    assert plain.tokens() == real.tokens()
    assert 1e-4 > float((flat(plain.scores) - flat(real.scores)).abs().max())
