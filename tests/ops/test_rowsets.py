"""Rows of several row sets below each other: what is declared, refused, counted and made."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

import rlflow as rf
from rlflow import ops
from rlflow.batch import flat, lengths, make_batch, ragged_rows, strings, text
from rlflow.graph.rules.check import row_counts
from rlflow.graph.rules.counts import Counts
from rlflow.ops.bodies.rows import sets as rowsets
from rlflow.ops.rows import sets as declared
from rlflow.ops.rows.sets import Fill
from rlflow.scheduler.verify.row_sets import row_sets_are_counted
from tests.ops.calls import call_of
from tests.ops.test_loops import traced

pytestmark = pytest.mark.torch
DRAW = rowsets.OF_A_DRAW


def exact(response: str, answer: str) -> float:
    return float(response == answer)


@rf.op(per="row")
def doubled(reward: rf.Row[float]) -> rf.Row[float]:
    return 2 * reward


def mixture(join, temperature=1.0, loss=None):
    """Two rollouts of the same prompts and written rows, in `join`, and an update of that."""

    def declare():
        actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        one = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
        two = ops.rollout(actor, prompts, n=3, max_new_tokens=6, temperature=temperature)
        shown = ops.prompts(rf.data.arithmetic(digits=2), batch=5)
        written = ops.tokenize(actor, shown)
        reward = ops.reward(exact, one)
        batch = join(one, two, written, reward)
        ops.update(actor, batch, loss=loss or rf.SFTLoss())

    return declare


def misuse(join, **options):
    _, findings = traced(mixture(join, **options))
    return [code for code, _, _ in findings if code != "E112"]


def test_it_has_what_all_have_and_counts_them():
    graph, findings = traced(mixture(lambda one, two, written, reward: ops.concat(one, written)))
    assert {"E112"} == {code for code, _, _ in findings}, findings
    concat = graph.node("concat")
    names = ["prompt_tokens", "response_tokens", "response_mask", "group"]
    assert names == [field.name for field in concat.op.outputs]
    assert Counts(groups=4 + 5, rows=4 * 2 + 5, least=9) == concat.counts
    assert concat.counts == row_counts(graph, graph.node("actor.update"))
    assert {0, 1} == {bound.part for bound in concat.inputs}


@pytest.mark.parametrize(
    ("join", "code"),
    [
        (lambda one, two, written, reward: ops.concat(one), "E150"),
        (lambda one, two, written, reward: ops.concat(one, 3), "E150"),
        (lambda one, two, written, reward: ops.concat(reward, written), "E150"),
        (lambda one, two, written, reward: ops.concat((two, reward), written), "E150"),
        (
            lambda one, two, written, reward: ops.concat(
                one, two.only("prompt_tokens").rename(response_tokens="prompt_tokens")
            ),
            "E151",
        ),
        (lambda one, two, written, reward: ops.concat(one, two, fill={"reward": 1.0}), "E152"),
        (lambda one, two, written, reward: ops.concat(one, two, fill={"version": 1}), "E152"),
        (lambda one, two, written, reward: ops.concat(one, written, fill={"version": 0.5}), "E152"),
        (lambda one, two, written, reward: ops.concat(one, written, fill={"answer": 1}), "E152"),
        (lambda one, two, written, reward: ops.concat(one, written, groups="shared"), "E153"),
        (lambda one, two, written, reward: ops.concat(one, two, groups="same"), "E118"),
    ],
)
def test_misuse_is_told(join, code):
    assert code in misuse(join)


def test_rows_of_two_temperatures_are_not_compared_with():
    def join(one, two, written, reward):
        adv = ops.advantage("grpo", two, ops.reward(exact, two, name="other"))
        return ops.concat(one, (two, adv), fill={"advantages": 0.0})

    assert ["E244"] == misuse(join, temperature=0.7, loss=rf.PolicyLoss(old="rollout"))[-1:]


def test_shared_groups_have_rows_of_both_and_are_as_many_as_the_prompts():
    both = lambda one, two, written, reward: ops.concat(one, two, groups="shared")  # noqa: E731
    graph, _ = traced(mixture(both))
    assert Counts(groups=4, rows=4 * 5, least=4) == graph.node("concat").counts


def test_expected_rows_are_weighed_by_how_many_there_are():
    part = Counts(groups=4, rows=8, least=1, expected=Fraction(1, 2))
    fixed = Counts(groups=2, rows=24, least=2)
    made = declared.joined_counts([part, fixed], shared=False)
    assert Counts(groups=6, rows=32, least=3, expected=Fraction(28, 32)) == made
    assert not made.fixed
    assert "3 to 6 groups, at most 32 rows, 28 expected" == made.describe()
    assert made == Counts.from_data(made.as_data())


def made_of(parts, wanted, **params):
    first, *others = [make_batch(part, len(next(iter(part.values())))) for part in parts]
    call = call_of(inputs=first, params=params, wanted=wanted)
    return rowsets.concat(replace(call, others=tuple(others), draw=3))


def test_rows_keep_their_values_and_groups_stay_apart():
    one = {
        "response_tokens": ragged_rows([[1], [2, 3], [4]], torch.int64),
        "version": ragged_rows([[7], [7, 6], [7]], torch.int64),
        "answer": text(["a", "é", ""]),
        "group": torch.tensor([9, 9, 2]),
        "sample": torch.tensor([18, 19, 4]),
    }
    two = {name: value for name, value in one.items() if name != "group"}
    made = made_of([one, two], ["response_tokens", "version", "answer", "group", "sample"])
    assert [1, 2, 3, 4, 1, 2, 3, 4] == flat(made.fields["response_tokens"]).tolist()
    assert [7, 7, 6, 7, 7, 7, 6, 7] == flat(made.fields["version"]).tolist()
    assert ["a", "é", "", "a", "é", ""] == strings(made.fields["answer"])
    assert [1, 1, 0, 2, 3, 4] == (made.fields["group"] - 3 * DRAW).tolist()
    assert list(range(6)) == (made.fields["sample"] - 3 * DRAW).tolist()
    assert 6 == made.rows


def test_rows_of_shared_groups_stand_together_in_the_order_of_sources():
    one = {"group": torch.tensor([4, 4, 5, 5]), "x": torch.tensor([0.0, 1, 2, 3])}
    two = {"group": torch.tensor([4, 5]), "x": torch.tensor([4.0, 5])}
    made = made_of([one, two], ["x", "group"], groups="shared")
    assert [4, 4, 4, 5, 5, 5] == made.fields["group"].tolist()
    assert [0, 1, 4, 2, 3, 5] == made.fields["x"].tolist()


def test_a_field_is_filled_where_a_source_lacks_it():
    one = {
        "response_tokens": ragged_rows([[1], [2, 3]], torch.int64),
        "weight": ragged_rows([[0.5], [0.5, 0.25]], torch.float32),
        "reward": torch.tensor([1.0, 0.0]),
    }
    two = {"response_tokens": ragged_rows([[5, 6, 7]], torch.int64)}
    made = made_of(
        [one, two], ["weight", "reward"], fill=Fill(values=(("reward", 2.0), ("weight", 1.0)))
    )
    assert [1.0, 0.0, 2.0] == made.fields["reward"].tolist()
    assert [1, 2, 3] == lengths(made.fields["weight"]).tolist()
    assert [0.5, 0.5, 0.25, 1, 1, 1] == flat(made.fields["weight"]).tolist()


def wrong(change):
    """What the verifier says of a concat that is changed after it was declared."""
    graph, _ = traced(mixture(lambda one, two, written, reward: ops.concat(one, written)))
    nodes = tuple(change(n) if n.name == "concat" else n for n in graph.nodes)
    plan = SimpleNamespace(graph=replace(graph, nodes=nodes))
    return list(row_sets_are_counted(SimpleNamespace(plan=plan)))


CHANGES = {
    "which row set 0 lacks": lambda n: {
        "inputs": tuple(b for b in n.inputs if b.part or b.name == "group")
    },
    "says 14 rows": lambda n: {"counts": Counts(groups=9, rows=14, least=9)},
    "says 10 groups": lambda n: {"counts": Counts(groups=10, rows=13, least=9)},
    "does not say how many": lambda n: {"counts": None},
    "not all rows": lambda n: {"op": replace(n.op, dispatch="split")},
    "as one row set": lambda n: {"inputs": (replace(n.inputs[0], part=1), *n.inputs[1:])},
}


@pytest.mark.parametrize("said", CHANGES)
def test_the_verifier_counts_rows_by_itself(said):
    assert any(said in text for text in wrong(lambda n: replace(n, **CHANGES[said](n))))


def test_the_verifier_has_nothing_to_say_of_what_is_declared():
    assert [] == wrong(lambda n: n)
