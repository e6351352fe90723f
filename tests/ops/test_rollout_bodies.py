"""Rollouts that bring some rows at a time, stop on the way, and go on: with a scripted model."""

from __future__ import annotations

import pytest
import torch

from rlflow.batch import lengths, make_batch, ragged_rows, strings, text
from rlflow.engines.hf.loading import load_tokenizer
from rlflow.ops.bodies import rollout
from rlflow.runtime.execute.stats import join_metrics
from tests.conftest import TINY
from tests.ops.calls import call_of, generated

pytestmark = pytest.mark.torch

SAMPLING = {"max_new_tokens": 8, "temperature": 1.0}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(TINY))


class Scripted:
    """A model whose token at position p of sample s is s + p; the rows it brings are told.

    Sample s has `sizes[s]` tokens in all, and ends by itself where that is below 8.
    """

    context = 64

    def __init__(self, tokenizer, sizes, rows=None, version=7):
        self.tokenizer = tokenizer
        self.version = version
        self.sizes = sizes
        self.rows = rows
        self.asked = []

    def generate(self, prompts, samples, *, n, first=0, until=None, **options):
        asked = [row.tolist() for row in prompts.unbind()]
        self.asked.append((asked, samples.tolist(), n, first, until))
        chosen = samples.tolist() if self.rows is None else samples[self.rows].tolist()
        last = 8 if until is None else until
        made = [[s + p for p in range(first, min(self.sizes[s], last))] for s in chosen]
        finished = [self.sizes[s] < 8 and self.sizes[s] <= last for s in chosen]
        return generated(made, [[-float(t) for t in row] for row in made], finished, self.rows)


def lists(field):
    return [row.tolist() for row in field.unbind()]


def rollout_call(model, wanted, **params):
    inputs = make_batch({"prompt": text(["1+1=", "2+2="]), "answer": text(["2", "4"])}, 2)
    return call_of(inputs=inputs, params={"n": 2, **SAMPLING} | params, wanted=wanted, model=model)


def test_a_rollout_stops_where_it_is_told(tokenizer):
    model = Scripted(tokenizer, [2, 8, 3, 5])
    wanted = ("response_tokens", "finished", "version", "sample")
    made = rollout.rollout(rollout_call(model, wanted, until=3))
    assert [0, 3] == [model.asked[0][3], model.asked[0][4]]
    assert [[0, 1], [1, 2, 3], [2, 3, 4], [3, 4, 5]] == lists(made.fields["response_tokens"])
    assert [True, False, True, False] == made.fields["finished"].tolist()
    assert [[7] * 2, [7] * 3, [7] * 3, [7] * 3] == lists(made.fields["version"])
    assert {"paused": 0.5} == join_metrics([made.metrics])


def test_rows_that_come_first_bring_their_prompt_and_their_numbers(tokenizer):
    model = Scripted(tokenizer, [2, 8, 3, 5], rows=torch.tensor([0, 2]))
    wanted = ("response_tokens", "prompt_tokens", "group", "sample", "answer", "response_mask")
    made = rollout.rollout(rollout_call(model, wanted))
    assert (2, [0, 2], 2) == (made.rows, made.kept.tolist(), made.factor)
    assert [0, 2] == made.fields["sample"].tolist()
    assert [0, 1] == made.fields["group"].tolist()
    assert ["2", "4"] == strings(made.fields["answer"])
    asked, samples, *_ = model.asked[0]
    assert (2, [0, 1, 2, 3]) == (len(asked), samples)
    assert asked == lists(made.fields["prompt_tokens"])
    assert [2, 3] == lengths(made.fields["response_mask"]).tolist()
    numbers = {"length": 2.5, "length_max": 3.0, "finished": 1.0, "entropy": 2.0}
    assert numbers == join_metrics([made.metrics])


def begun(sizes, finished):
    """Rows as a rollout left them after 3 tokens; the number of a row is its sample's."""
    made = [[s + p for p in range(size)] for s, size in enumerate(sizes)]
    fields = {
        "prompt_tokens": ragged_rows(
            [[30, 31][: 1 + s % 2] for s in range(len(sizes))], torch.int64
        ),
        "response_tokens": ragged_rows(made, torch.int64),
        "rollout_log_probs": ragged_rows([[-float(t) for t in row] for row in made], torch.float32),
        "version": ragged_rows([[6] * size for size in sizes], torch.int64),
        "finished": torch.tensor(finished, dtype=torch.bool),
        "sample": torch.arange(len(sizes)),
    }
    return make_batch(fields, len(sizes))


WHOLE = ("response_tokens", "rollout_log_probs", "finished", "version", "response_mask")


def resume_call(model, inputs, wanted=WHOLE, **changed):
    params = {"n": 2, "first": 3, "resumes": "actor.rollout", **SAMPLING}
    return call_of(inputs=inputs, params=params | changed, wanted=wanted, model=model)


def test_unfinished_rows_go_on_and_the_others_stay(tokenizer):
    model = Scripted(tokenizer, [2, 8, 3, 5])
    made = rollout.resume(resume_call(model, begun([2, 3, 3, 3], [True, False, True, False])))
    ((asked, *others),) = model.asked
    assert [[30, 31, 1, 2, 3], [30, 31, 3, 4, 5]] == asked
    assert [[1, 3], 1, 3, None] == others
    expected = [[0, 1], list(range(1, 9)), [2, 3, 4], list(range(3, 8))]
    assert expected == lists(made.fields["response_tokens"])
    assert [[-t for t in row] for row in expected] == lists(made.fields["rollout_log_probs"])
    assert [True, False, True, True] == made.fields["finished"].tolist()
    versions = [[6] * 2, [6] * 3 + [7] * 5, [6] * 3, [6] * 3 + [7] * 2]
    assert versions == lists(made.fields["version"])
    assert [2, 8, 3, 5] == lengths(made.fields["response_mask"]).tolist()
    numbers = {
        "length": 4.5,
        "length_max": 8.0,
        "finished": 0.75,
        "resumed": 0.5,
        "entropy": 71 / 18,
    }
    assert numbers == join_metrics([made.metrics])
    assert (4, None) == (made.rows, made.kept)


def test_a_row_that_was_cut_before_the_pause_does_not_go_on(tokenizer):
    """An abort leaves rows that are neither finished nor as long as the pause."""
    model = Scripted(tokenizer, [8, 8])
    made = rollout.resume(resume_call(model, begun([1, 3], [False, False])))
    assert [[1], 1, 3, None] == [*model.asked[0][1:]]
    assert [[0], list(range(1, 9))] == lists(made.fields["response_tokens"])
    assert [False, False] == made.fields["finished"].tolist()
    assert 0.5 == join_metrics([made.metrics])["resumed"]


@pytest.mark.parametrize("sizes", [[2, 3], []])
def test_where_all_have_ended_nothing_is_added(tokenizer, sizes):
    model = Scripted(tokenizer, sizes)
    inputs = begun(sizes, [True] * len(sizes))
    made = rollout.resume(resume_call(model, inputs))
    for name in ("response_tokens", "rollout_log_probs", "version"):
        assert lists(inputs[name]) == lists(made.fields[name])
    assert len(sizes) == made.rows


def test_only_what_somebody_reads_is_made(tokenizer):
    inputs = begun([3, 3], [False, False]).exclude("version")
    made = rollout.resume(resume_call(Scripted(tokenizer, [4, 8]), inputs, ("response",)))
    assert {"response"} == set(made.fields)
    assert (
        tokenizer.decode([0, 1, 2, 3], skip_special_tokens=True)
        == strings(made.fields["response"])[0]
    )
