"""Several sources as one: whose turn it is, which row it brings, and what cannot be mixed."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlflow.data as data
from rlflow.data.mixing import rows_by_source
from rlflow.errors import UsageError

WEIGHTS = st.lists(st.integers(1, 50), min_size=1, max_size=6)


def numbered(name, size, *columns):
    def row(index):
        return {"prompt": f"{name} {index}", **{column: f"{column}{index}" for column in columns}}

    return data.generator(row, size=size, columns=["prompt", *columns])


def two(weights=None, **options):
    sources = {"a": numbered("a", 5, "answer"), "b": numbered("b", 7, "answer")}
    return data.mix(sources, weights, **options)


def drawn(source, count, size=4, seed=0):
    return [row for i in range(count // size) for row in source.batch(i, size, seed)]


# --- turns ----------------------------------------------------------------------------------


@given(WEIGHTS, st.integers(0, 10**9))
def test_every_position_is_one_sources_turn(weights, position):
    now, then = rows_by_source(weights, position), rows_by_source(weights, position + 1)
    assert position == sum(now)
    assert [1] == [b - a for a, b in zip(now, then, strict=True) if a != b]


@given(WEIGHTS, st.integers(0, 10**9))
def test_counts_stay_near_their_shares(weights, position):
    for place, (count, weight) in enumerate(
        zip(rows_by_source(weights, position), weights, strict=True)
    ):
        share = position * weight / sum(weights)
        assert abs(count - share) <= (place + 1) / 2 + 1e-6


@given(WEIGHTS)
def test_a_whole_round_is_exact(weights):
    assert weights == rows_by_source(weights, sum(weights))


def test_turns_by_hand():
    whose = []
    for position in range(8):
        now, then = rows_by_source([3, 1], position), rows_by_source([3, 1], position + 1)
        whose.append("ab"[[a != b for a, b in zip(now, then, strict=True)].index(True)])
    # Shares of a are 0.75, 1.5, 2.25, 3: rounded 1, 2, 2, 3.
    assert ["a", "a", "b", "a"] * 2 == whose


# --- rows -----------------------------------------------------------------------------------


def test_rows_come_in_proportion_and_say_where_from():
    rows = drawn(two({"a": 3, "b": 1}), 40)
    assert {"a": 30, "b": 10} == Counter(row["data_source"] for row in rows)
    assert all(row["prompt"].startswith(row["data_source"]) for row in rows)
    assert {"prompt", "answer", "data_source", "row_id"} == set(rows[0])


def test_each_source_goes_through_epochs_of_its_own():
    rows = drawn(two({"a": 1, "b": 1}), 140)
    for name, size in (("a", 5), ("b", 7)):
        own = [row["prompt"] for row in rows if row["data_source"] == name]
        epochs = [own[at : at + size] for at in range(0, len(own) - size + 1, size)]
        assert {size} == {len(set(epoch)) for epoch in epochs}
        assert len({tuple(epoch) for epoch in epochs}) > 1


def test_row_ids_count_through_all_rows():
    source = two()
    rows = source.rows()
    assert 12 == len(rows) == source.size()
    assert [*[f"a {i}" for i in range(5)], *[f"b {i}" for i in range(7)]] == [
        row["prompt"] for row in rows
    ]
    for row in drawn(source, 24):
        assert rows[row["row_id"]] == {k: v for k, v in row.items() if k != "row_id"}


@given(st.integers(1, 9), st.integers(0, 5), st.integers(0, 2**40))
def test_batches_continue_where_the_last_one_ended(size, iteration, seed):
    source = two({"a": 2, "b": 5})
    whole = [row for i in range((iteration + 1) * size) for row in source.batch(i, 1, seed)]
    assert whole[iteration * size :] == source.batch(iteration, size, seed)
    assert whole[iteration * size :] == two({"a": 2, "b": 5}).batch(iteration, size, seed)


def test_seeds_and_equal_sources_have_orders_of_their_own():
    same = {"a": numbered("x", 50), "b": numbered("x", 50)}
    rows = drawn(data.mix(same), 40)
    a, b = ([r["prompt"] for r in rows if r["data_source"] == name] for name in "ab")
    assert a != b
    assert rows != drawn(data.mix(same), 40, seed=1)


@pytest.mark.parametrize(
    ("weights", "whole"),
    [({"a": 0.3, "b": 0.7}, (3, 7)), ({"a": 0.1, "b": 1}, (1, 10)), (None, (1, 1))],
)
def test_weights_are_exact(weights, whole):
    assert whole == two(weights).weights


def test_a_mix_is_declared_without_reading_and_travels():
    source = data.mix({"a": data.jsonl("nowhere.jsonl", columns=["prompt"])}, column="from")
    assert ("prompt", "from") == source.columns
    sent = pickle.loads(pickle.dumps(data.mix({"sum": data.arithmetic()})))
    assert "mix of 1 sum (arithmetic + of 2 digits, train split, 9,488 rows)" == sent.describe()


# --- columns --------------------------------------------------------------------------------


def uneven(**options):
    return data.mix({"a": numbered("a", 2, "answer"), "b": numbered("b", 2, "tests")}, **options)


def test_different_columns_are_an_error():
    with pytest.raises(UsageError) as caught:
        _ = uneven().columns
    (finding,) = caught.value.findings
    assert ("E283", "a lacks tests\nb lacks answer") == (finding.code, finding.got)
    assert [finding] == uneven().check()


def test_or_are_filled():
    source = uneven(fill="-")
    assert ("prompt", "answer", "tests", "data_source") == source.columns
    assert [] == source.check()
    rows = {row["data_source"]: row for row in drawn(source, 4)}
    assert ("-", "answer") == (rows["a"]["tests"], rows["a"]["answer"][:6])
    assert ("tests", "-") == (rows["b"]["tests"][:5], rows["b"]["answer"])


def test_a_column_of_the_mixs_own_name():
    source = data.mix({"a": numbered("a", 2, "data_source")})
    with pytest.raises(UsageError) as caught:
        _ = source.columns
    assert "'a' has a column 'data_source', which the mix adds" == caught.value.findings[0].what
    again = data.mix({"a": numbered("a", 2, "data_source")}, column="from")
    assert ("prompt", "data_source", "from") == again.columns


# --- what cannot be -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sources", "weights", "what"),
    [
        ({}, None, "a mix of no sources"),
        ({"a": 3}, None, "'a' in a mix is no data source"),
        ({"gsm8k": numbered("a", 2)}, {"gsm8": 1}, "a mix has a weight without a source, 'gsm8'"),
        ({"a": numbered("a", 2)}, {}, "a mix has no weight for 'a'"),
        ({"a": numbered("a", 2)}, {"a": 1, "b": 1}, "a mix has a weight without a source, 'b'"),
        ({"a": numbered("a", 2)}, {"a": 0}, "weight 0 of 'a' in a mix"),
        ({"a": numbered("a", 2)}, {"a": -1.0}, "weight -1.0 of 'a' in a mix"),
        ({"a": numbered("a", 2)}, {"a": "1"}, "weight 1 of 'a' in a mix"),
    ],
)
def test_what_is_no_mix(sources, weights, what):
    with pytest.raises(UsageError) as caught:
        data.mix(sources, weights)
    finding = caught.value.findings[0]
    assert ("E282", True) == (finding.code, finding.what.startswith(what)), finding.what
    assert finding.where.path.endswith("test_mixing.py")


def test_what_is_wrong_with_a_source_is_wrong_with_the_mix(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "x"}\n{"prompt": ""}\n')
    source = data.mix({"a": data.jsonl(path), "b": numbered("b", 10_001)})
    assert ["E605"] == [finding.code for finding in source.check()]
    assert source.notes()
    assert source.remote is False
