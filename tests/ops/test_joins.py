"""Fields of other rows by a key: what is declared, refused and made."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import rlflow as rf
from rlflow import ops
from rlflow.batch import flat, make_batch, ragged_rows, text
from rlflow.errors import RunError
from rlflow.ops.bodies.rows import joins
from rlflow.ops.rows.sets import Fill
from rlflow.scheduler.verify.row_sets import row_sets_are_counted
from tests.ops.calls import call_of
from tests.ops.test_loops import traced
from tests.ops.test_rowsets import exact

pytestmark = pytest.mark.torch


def learning(join):
    """A pipeline that learns from samples and the baseline that `join` brings them."""

    def declare():
        actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
        ref = rf.Model("ref", "models/tiny")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(actor, prompts, n=3, max_new_tokens=4)
        greedy = ops.rollout(ref, prompts, max_new_tokens=4)
        earned = ops.reward(exact, greedy, name="earned").rename(baseline="reward")
        reward = ops.reward(exact, samples)
        adv = ops.advantage("remax", samples, reward, join(samples, greedy, earned))
        ops.update(actor, samples, adv, loss=rf.PolicyLoss("reinforce"))

    return declare


def test_rows_stay_and_what_they_lack_is_added():
    graph, findings = traced(
        learning(lambda samples, greedy, earned: ops.join(samples, (greedy, earned), by="row_id"))
    )
    assert [] == findings
    node = graph.node("join")
    assert ["baseline"] == [field.name for field in node.op.outputs]
    assert "actor.rollout" == node.rows_of
    read = [(b.part, b.source, b.name) for b in node.inputs]
    wanted = [
        (0, "actor.rollout", "row_id"),
        (1, "ref.rollout", "row_id"),
        (1, "earned", "baseline"),
    ]
    assert wanted == read
    facts = SimpleNamespace(plan=SimpleNamespace(graph=graph))
    assert [] == list(row_sets_are_counted(facts))
    half = replace(node, inputs=tuple(b for b in node.inputs if b.part or b.name != "row_id"))
    nodes = tuple(half if other.name == node.name else other for other in graph.nodes)
    facts = SimpleNamespace(plan=SimpleNamespace(graph=replace(graph, nodes=nodes)))
    assert any("does not read it of both" in said for said in row_sets_are_counted(facts))


@pytest.mark.parametrize(
    "options",
    [
        {"by": "rowid"},
        {"by": "version"},
        {"by": "row_id", "several": "last"},
        {"by": "row_id", "fill": {"reward": 0.0}},
    ],
)
def test_misuse_is_told(options):
    _, findings = traced(
        learning(lambda samples, greedy, earned: ops.join(samples, (greedy, earned), **options))
    )
    assert "E157" in {code for code, _, _ in findings}


def test_there_is_something_to_add():
    _, findings = traced(
        learning(lambda samples, greedy, earned: ops.join(samples, greedy, by="row_id"))
    )
    assert "E157" in {code for code, _, _ in findings}


def made(keys, known, *, kind=torch.tensor, **params):
    other = {
        "key": kind(known),
        "score": torch.arange(len(known)) + 0.5,
        "ids": ragged_rows([[k] * k for k in range(len(known))], torch.int64),
    }
    call = call_of(
        inputs=make_batch({"key": kind(keys)}, len(keys)),
        params={"by": "key"} | params,
        wanted={"score"} if "fill" in params else {"score", "ids"},
    )
    return joins.join(replace(call, others=(make_batch(other, len(known)),)))


@pytest.mark.parametrize(
    ("kind", "keys", "known"),
    [(torch.tensor, [7, 3, 3, 9], [9, 7, 3, 1]), (text, ["b", "ä", "ä", ""], ["", "b", "ä", "z"])],
)
def test_every_row_has_the_fields_of_its_key(kind, keys, known):
    found = made(keys, known, kind=kind)
    assert [1.5, 2.5, 2.5, 0.5] == found.fields["score"].tolist()
    assert [1, 2, 2, 2, 2] == flat(found.fields["ids"]).tolist()
    assert 4 == found.rows


def test_keys_without_a_row_or_with_several_end_the_run_unless_said():
    with pytest.raises(RunError, match=r"(?s)E791.*no row of a key.*key 4 and 5|E791.*4, 5"):
        made([4, 5, 1], [1, 2])
    assert [0.0, 0.5] == made([4, 1], [1, 2], fill=Fill(values=(("score", 0.0),))).fields[
        "score"
    ].tolist()
    with pytest.raises(RunError, match=r"(?s)E791.*several rows of one key"):
        made([1], [1, 1])
    assert [0.5] == made([1], [1, 1], several="first").fields["score"].tolist()
