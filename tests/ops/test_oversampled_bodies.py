"""A rollout that drops groups that are late makes rows of the rollout that makes all of them."""

from __future__ import annotations

import pytest
import torch

from rlflow.batch import lengths, make_batch, strings, text
from rlflow.contract.values import SampleKey, Sampling
from rlflow.engines.hf.loading import load_model, load_tokenizer
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.ops.bodies.rollout import rollout
from rlflow.ops.bodies.rows.oversampled import first_complete
from rlflow.runtime.execute.stats import join_metrics
from tests.conftest import TINY
from tests.ops.calls import call_of

pytestmark = pytest.mark.torch

QUESTIONS = ["1+1=", "25+48=", "7+2=", "31+30=", "5+5=", "12+9="]
WANTED = ("prompt_tokens", "response_tokens", "response_mask", "rollout_log_probs", "response")
WANTED += ("finished", "group", "sample", "version", "answer")
N = 3


class Engine:
    """The embedded engine, with the random numbers of an iteration."""

    context = 64
    version = 5

    def __init__(self, iteration: int) -> None:
        self.engine = TorchRollout(load_model(str(TINY), dtype=torch.float32, device="cpu"))
        self.tokenizer = load_tokenizer(str(TINY))
        self.key = SampleKey(seed=3, iteration=iteration, stream="rollout")
        self.flight = None

    def sampling(self, n: int) -> Sampling:
        return Sampling(max_new_tokens=20, temperature=2.5, n=n, stop_tokens=(0, 1, 2))

    def generate(self, prompts, samples, *, n, until=None, **options):
        return self.engine.generate(prompts, self.sampling(n), self.key, samples)

    def advance(self, rows, **options):
        self.flight = self.engine.advance(rows, self.sampling(1), self.key)
        return self.flight


def made(body, engine, iteration: int, **more):
    fields = {"prompt": text(QUESTIONS), "answer": text([f"<{q}>" for q in QUESTIONS])}
    params = {"n": N, "max_new_tokens": 20, "temperature": 2.5, **more}
    inputs = make_batch(fields, len(QUESTIONS))
    call = call_of(inputs=inputs, params=params, wanted=WANTED, model=engine, iteration=iteration)
    return body(call)


def rows_of(output) -> dict[int, dict[str, object]]:
    """The fields of each row by the number of its sample."""
    columns = {}
    for name, field in output.fields.items():
        words = name in ("response", "answer")
        columns[name] = strings(field) if words else [row.tolist() for row in field.unbind()]
    samples = columns.pop("sample")
    return {s: {k: v[i] for k, v in columns.items()} for i, s in enumerate(samples)}


@pytest.mark.parametrize(("iteration", "wanted"), [(0, 3), (3, 1), (3, 5)])
def test_the_rows_are_those_of_the_groups_whose_longest_response_is_shortest(iteration, wanted):
    engine = Engine(iteration)
    whole = made(rollout, engine, iteration)
    found = made(first_complete, engine, iteration, first_groups=wanted)
    groups = whole.fields["group"]
    sizes = lengths(whole.fields["response_tokens"])
    longest = {g: int(sizes[groups == g].max()) for g in groups.unique().tolist()}
    assert len(set(longest.values())) > 2, "all groups are equally long, and nothing is chosen"
    first = sorted(sorted(longest, key=lambda group: (longest[group], group))[:wanted])
    assert first == found.fields["group"].unique().tolist()
    expected, rows = rows_of(whole), rows_of(found)
    assert [s for s in expected if expected[s]["group"] in first] == list(rows)
    for sample, row in rows.items():
        scores = row.pop("rollout_log_probs")
        assert expected[sample].pop("rollout_log_probs") == pytest.approx(scores, abs=1e-5)
        assert expected[sample] == row


def test_it_stops_with_the_last_group_that_it_takes_and_counts_what_is_dropped():
    engine = Engine(0)
    found = made(first_complete, engine, 0, first_groups=3)
    metrics, tokens = join_metrics([found.metrics]), lengths(found.fields["response_tokens"])
    assert metrics["turns"] == metrics["length_max"] == int(tokens.max())
    spent = int(lengths(engine.flight.response_tokens).sum())
    assert spent - int(tokens.sum()) == metrics["dropped_tokens"] > 0
    assert 3 == metrics["dropped"]
    all_of_them = lengths(made(rollout, engine, 0).fields["response_tokens"])
    assert spent < int(all_of_them.sum())
    assert metrics["length"] < all_of_them.float().mean()
