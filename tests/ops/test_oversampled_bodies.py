"""A rollout that drops groups that are late makes rows of the rollout that makes all of them."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

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
from tests.ops.parts import Meeting, Peer

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


def made(body, engine, iteration: int, peers=None, **more):
    fields = {"prompt": text(QUESTIONS), "answer": text([f"<{q}>" for q in QUESTIONS])}
    params = {"n": N, "max_new_tokens": 20, "temperature": 2.5, **more}
    inputs = make_batch(fields, len(QUESTIONS))
    call = call_of(inputs=inputs, params=params, wanted=WANTED, model=engine, iteration=iteration)
    call = call if peers is None else replace(call, peers=peers)
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


class Replica(Peer):
    """A replica that passes rows on through a queue for each pair."""

    def __init__(self, meeting, part, mail):
        super().__init__(meeting, part)
        self.mail = mail

    def share(self, n):
        return range(self.part, n, self.meeting.count)

    def pass_on(self, named, source, target, device):
        if self.part == target:
            return self.mail[source, target].get(timeout=60)
        self.mail[source, target].put({name: each.clone() for name, each in named.items()})
        return {}


@pytest.mark.parametrize("first", [{}, {"first_groups": 4}], ids=["all", "first"])
def test_replicas_that_move_rows_make_those_of_one_to_the_bit(first):
    said = {"balance": 1, "moves": "cache", **first}
    alone = made(first_complete, Engine(1), 1, **said)
    meeting, mail = Meeting(2), {pair: queue.Queue() for pair in ((0, 1), (1, 0))}
    peers = [Replica(meeting, part, mail) for part in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(made, first_complete, Engine(1), 1, peer, **said) for peer in peers]
        found = [call.result(120) for call in calls]
    for each in found:
        assert rows_of(alone) == rows_of(each)
    numbers = join_metrics([found[0].metrics])
    assert 0 == alone.metrics["moved"] < numbers.pop("moved")
    assert numbers.pop("row_turns") < alone.metrics["row_turns"]
    assert numbers.items() <= join_metrics([alone.metrics]).items()
