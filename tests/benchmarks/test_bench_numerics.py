from __future__ import annotations

import math

import pytest
import torch
from numerics import ours
from numerics.compare import Case, apart, compare, difference, shown, summary, tables
from numerics.inputs import BATCHES, batches
from vs_numerics import others

pytestmark = pytest.mark.torch

X = torch.tensor([1.0, -4.0], dtype=torch.float64)


def doubled(fields, variant):
    return {"value": variant.get("times", 2) * fields["x"], "gradient": fields["x"]}


def tripled(fields, variant):
    return {"value": 3 * fields["x"], "gradient": fields["x"]}


def case(**changed):
    return Case(
        **{
            "name": "double",
            "kind": "k",
            "function": "f",
            "ours": doubled,
            "batches": ("one",),
            **changed,
        }
    )


def line(case, value, gradient=X, seen=None):
    made = {"made": {"value": value, "gradient": gradient}, "seen": seen or {}}
    results = [{call["id"]: {"one": made} for call in case.calls()}]
    return compare(case, "other", [{"one": {"x": X}}], results)


def test_a_difference_is_relative_to_the_largest_entry_of_the_other():
    assert 0.25 == apart(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0]))
    assert 0.5 == apart(torch.tensor([0.5]), torch.tensor([0.0]))
    assert 0.0 == apart(torch.zeros(0), torch.zeros(0))


def test_what_is_no_number_differs_and_what_would_broadcast_is_refused():
    assert math.inf == apart(torch.tensor([math.nan]), torch.tensor([math.nan]))
    with pytest.raises(ValueError, match="shapes"):
        apart(torch.zeros(2, 1), torch.zeros(2))


def test_values_and_the_gradient_are_told_apart_and_names_have_to_agree():
    found = difference({"a": X, "gradient": X}, {"a": 2 * X, "gradient": X})
    assert (0.5, 0.0) == (found.value, found.gradient)
    only = difference({"a": X, "gradient": X}, {"a": 2 * X, "gradient": X}, ("gradient",))
    assert (None, 0.0) == (only.value, only.gradient)
    with pytest.raises(ValueError, match="results"):
        difference({"a": X}, {"b": X})


@pytest.mark.parametrize(
    ("value", "changed", "verdict"),
    [
        (2 * X, {}, "same"),
        (3 * X, {}, "UNEXPLAINED"),
        (3 * X, {"reason": "r", "option": "o", "reached": tripled}, "explained"),
        (4 * X, {"reason": "r", "option": "o", "reached": tripled}, "NOT REACHED"),
        (3 * X, {"reason": "r", "option": "none"}, "choice"),
        (2 * X, {"reason": "r", "option": "none"}, "NO DIFFERENCE"),
        (2.001 * X, {"tolerance": 1e-2}, "same"),
    ],
)
def test_a_difference_needs_a_reason_and_a_reason_a_difference(value, changed, verdict):
    found = line(case(**changed), value)

    assert verdict == found.verdict
    assert (verdict in ("same", "explained", "choice")) == found.passed
    assert verdict == found.as_json()["verdict"]
    if not found.passed:
        assert verdict in found.row()[5]


def test_a_gradient_alone_makes_a_difference():
    assert "UNEXPLAINED" == line(case(), 2 * X, gradient=2 * X).verdict


def test_every_variant_and_what_the_other_computed_itself_count():
    variants = ({"times": 2}, {"times": 3})
    assert 2 == line(case(variants=variants), 2 * X).inputs
    assert "UNEXPLAINED" == line(case(variants=variants), 2 * X).verdict
    assert "same" == line(case(), 4 * X, gradient=2 * X, seen={"x": 2 * X}).verdict


def test_a_failure_of_the_other_side_ends_the_run():
    wanted = case()
    results = [{wanted.calls()[0]["id"]: {"one": {"error": "Traceback: no such loss"}}}]
    with pytest.raises(SystemExit, match="no such loss"):
        compare(wanted, "other", [{"one": {"x": X}}], results)


def test_a_reason_without_an_option_is_refused():
    with pytest.raises(ValueError, match="belong together"):
        case(reason="because")
    with pytest.raises(ValueError, match="belong together"):
        case(reached=tripled)


def test_tables_part_what_differs_from_what_agrees():
    lines = [line(case(), 2 * X), line(case(reason="r", option="none"), 3 * X)]
    different, same = tables(lines)

    assert [("double", "other f", "3e-01", "0", "", "r", "none")] == different[1]
    assert [("double", "other f", "0", "0")] == same[1]
    assert "2 cases: 1 same, 1 choice" == summary(lines)
    assert [same] == tables(lines[:1])
    assert ("", "0", "1e-16") == (shown(None), shown(0.0), shown(1.04e-16))


def test_batches_follow_from_the_seed_and_hold_what_they_say():
    drawn, again = batches(3), batches(3)
    assert set(BATCHES) == set(drawn)
    assert all(torch.equal(drawn[b][k], again[b][k]) for b in drawn for k in drawn[b])
    edge, ragged = drawn["edge"], drawn["ragged"]
    assert not torch.equal(ragged["reward"], batches(4)["ragged"]["reward"])
    assert 1 == (~edge["response_mask"].any(-1)).sum()
    assert 1 in edge["group"].unique(return_counts=True)[1]
    assert ragged["response_mask"].any(-1).all()
    assert (edge["log_probs"] == edge["old_log_probs"]).any()
    far = drawn["far"]
    assert (far["log_probs"] - far["old_log_probs"]).abs().max() > 20


def test_calls_have_names_of_their_own():
    for other in others():
        names = [call["id"] for case in other.cases for call in case.calls()]
        assert len(set(names)) == len(names)


def test_ours_beside_itself_agrees_and_beside_another_option_does_not():
    loss, clipped = ours.policy("ppo_clip"), ours.policy("ppo_clip", clip=0.05, old="recomputed")
    way = {**ours.averaged("token-mean"), "advantages": "row_advantages"}
    fields = batches(0)["edge"]
    made = loss(fields, way)

    assert 0.0 == difference(loss(fields, way), made).largest
    assert 1e-3 < difference(clipped(fields, way), made).largest
