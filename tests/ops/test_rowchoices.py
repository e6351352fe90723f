"""Rows that are kept, duplicated or divided: what is declared, refused, counted and made."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from types import FunctionType, SimpleNamespace

import pytest
import torch

import rlflow as rf
from rlflow import ops
from rlflow.batch import flat, make_batch, ragged_rows
from rlflow.errors import RunError
from rlflow.graph.rules.counts import Counts
from rlflow.ops.bodies.rows import choices as rowchoices
from rlflow.ops.bodies.user import call as user
from rlflow.scheduler.verify.row_sets import row_sets_are_counted
from tests.ops.calls import call_of
from tests.ops.test_loops import traced
from tests.ops.test_rowsets import exact

pytestmark = pytest.mark.torch


@rf.op(per="row")
def good(reward: rf.Row[float]) -> rf.Row[bool]:
    return reward > 0


def learning(choose, **update):
    """A pipeline that learns from what `choose` makes of 4 groups of 3 samples."""

    def declare():
        actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(actor, prompts, n=3, max_new_tokens=4)
        reward = ops.reward(exact, samples)
        batch = choose(samples, reward, good(reward))
        loss = rf.PolicyLoss()
        ops.update(actor, batch, ops.advantage("grpo", batch), loss=loss, **update)

    return declare


COUNTED = {
    "keep": (
        lambda *given: ops.keep(*given, by="good", at_least=2, expected=0.25),
        Counts(groups=4, rows=12, least=2, expected=Fraction(1, 4)),
    ),
    "keep_rows": (
        lambda *given: ops.keep(*given, by="good", per="row", name="keep_rows"),
        Counts(groups=4, rows=12, least=1),
    ),
    "keep_two": (
        lambda *given: ops.keep(*given, by="good", groups=2, name="keep_two"),
        Counts(groups=2, rows=6, least=2),
    ),
    "duplicate": (
        lambda *given: ops.duplicate(*given, times=3),
        Counts(groups=4, rows=36, least=4),
    ),
    "apart": (
        lambda *given: ops.duplicate(*given, times=3, groups="apart", name="apart"),
        Counts(groups=12, rows=36, least=12),
    ),
    "split": (
        lambda *given: ops.split(*given, sizes=(1, 3))[0],
        Counts(groups=1, rows=3, least=1),
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_rows_are_counted_as_declared_and_by_the_verifier(name):
    choose, counts = COUNTED[name]
    graph, findings = traced(learning(choose))
    assert {"E112"} >= {code for code, _, _ in findings}, findings
    assert counts == graph.node(name).counts
    facts = SimpleNamespace(plan=SimpleNamespace(graph=graph))
    assert [] == list(row_sets_are_counted(facts))
    wrong = replace(graph.node(name), counts=replace(counts, rows=counts.rows + 1))
    nodes = tuple(wrong if node.name == name else node for node in graph.nodes)
    facts = SimpleNamespace(plan=SimpleNamespace(graph=replace(graph, nodes=nodes)))
    (said,) = row_sets_are_counted(facts)
    assert f"it makes {counts.groups} groups, {counts.rows} rows" in said


@pytest.mark.parametrize(
    ("choose", "code"),
    [
        (lambda *given: ops.keep(*given, by="reward"), "E154"),
        (lambda *given: ops.keep(*given, by="god"), "E154"),
        (lambda *given: [ops.keep(by="good"), given[0]][1], "E154"),
        (lambda *given: ops.keep(*given, by="good", at_least=5), "E118"),
        (lambda *given: ops.keep(*given, by="good", at_least=0), "E118"),
        (lambda *given: ops.keep(*given, by="good", groups=2, per="row"), "E118"),
        (lambda *given: ops.keep(*given, by="good", short="drop"), "E118"),
        (lambda *given: ops.keep(*given, by="good", expected=1.5), "E118"),
        (lambda *given: ops.duplicate(*given, times=1), "E118"),
        (lambda *given: ops.duplicate(*given, times=2, groups="same"), "E118"),
        (lambda *given: ops.split(*given, sizes=(1, 2))[0], "E118"),
        (lambda *given: ops.split(ops.keep(*given, by="good"), sizes=(1, 3))[0], "E118"),
    ],
)
def test_misuse_is_told(choose, code):
    _, findings = traced(learning(choose))
    assert code in {found for found, _, _ in findings}


def test_mini_batches_want_as_many_groups_in_every_iteration():
    _, findings = traced(learning(lambda *given: ops.keep(*given, by="good"), mini_batches=2))
    assert ["E155"] == [code for code, _, _ in findings if code != "E112"]
    exactly = learning(lambda *given: ops.keep(*given, by="good", groups=2), mini_batches=2)
    assert "E155" not in {code for code, _, _ in traced(exactly)[1]}


GROUP = [5, 5, 2, 2, 7, 7]


def made(body, flags=None, group=GROUP, **params):
    rows = {
        "x": torch.arange(6.0),
        "response_tokens": ragged_rows([[k] * (k % 3) for k in range(6)], torch.int64),
        **({} if group is None else {"group": torch.tensor(group)}),
        **({} if flags is None else {"good": torch.tensor(flags, dtype=torch.bool)}),
        "sample": torch.arange(6) + 40,
    }
    wanted = {"x", "response_tokens", "sample"} | ({"group"} if group is not None else set())
    return body(call_of(inputs=make_batch(rows, 6), params=params, wanted=wanted))


@pytest.mark.parametrize(
    ("flags", "params", "kept"),
    [
        ([1, 1, 1, 0, 1, 1], {"per": "group", "at_least": 1}, [0, 1, 4, 5]),
        ([1, 1, 1, 0, 1, 1], {"per": "row", "at_least": 1}, [0, 1, 2, 4, 5]),
        ([1, 1, 1, 1, 1, 1], {"per": "group", "groups": 2}, [0, 1, 2, 3]),
        ([0, 0, 1, 0, 1, 1], {"per": "group", "groups": 2, "short": "fill"}, [0, 1, 4, 5]),
        ([0, 0, 0, 0, 0, 0], {"per": "row", "at_least": 1, "short": "fill"}, [0, 1]),
    ],
)
def test_rows_that_stay(flags, params, kept):
    found = made(rowchoices.keep, flags, by="good", **params)
    assert kept == found.fields["x"].tolist()
    assert [GROUP[k] for k in kept] == found.fields["group"].tolist()
    assert [k for k in kept for _ in range(k % 3)] == flat(found.fields["response_tokens"]).tolist()
    assert len(kept) / 6 == found.metrics["kept"]


def test_too_few_end_the_run_with_how_many_there_were():
    with pytest.raises(RunError, match=r"(?s)E790.*0 with a true good"):
        made(rowchoices.keep, [1, 0, 0, 0, 0, 0], by="good", per="group", at_least=1)
    with pytest.raises(RunError, match=r"(?s)E790.*too few rows"):
        made(rowchoices.keep, [0] * 6, group=None, by="good", per="row", at_least=1)


def test_copies_are_in_the_group_of_their_row_or_in_one_of_their_own():
    within = made(rowchoices.duplicate, times=2, groups="shared")
    assert [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5] == within.fields["x"].tolist()
    assert [g for g in GROUP for _ in range(2)] == within.fields["group"].tolist()
    assert 12 == within.fields["sample"].unique().numel()
    apart = made(rowchoices.duplicate, times=2, groups="apart")
    assert [*range(6), *range(6)] == apart.fields["x"].tolist()
    assert [1, 1, 0, 0, 2, 2, 4, 4, 3, 3, 5, 5] == apart.fields["group"].tolist()


@pytest.mark.parametrize(("group", "kept"), [(GROUP, [2, 3, 4, 5]), (None, [1, 2])])
def test_a_part_has_its_groups_in_their_order(group, kept):
    assert kept == made(rowchoices.split, group=group, groups=(1, 3)).fields["x"].tolist()


def test_a_function_as_a_rank_gets_it_needs_no_name_of_its_annotations():
    function = FunctionType(good.op.function.__code__, {}, "good")
    function.__annotations__ = dict(good.op.function.__annotations__)
    given = call_of(inputs=make_batch({"reward": torch.tensor([0.0, 1.0])}, 2), wanted={"good"})
    made = user.call(replace(given, op=replace(good.op, function=function)))
    assert [False, True] == made.fields["good"].tolist()
