"""Arithmetic problems and users' functions: complete, disjoint, checked."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlflow.data as data
from rlflow.errors import DataError, UsageError


def prompts(source):
    return [row["prompt"] for row in source.rows()]


@pytest.mark.slow
@given(
    digits=st.integers(1, 2),
    operators=st.sampled_from(["+", "-", "*", "+-", "*+", "+-*"]),
    test_size=st.integers(1, 99),
)
def test_the_splits_are_disjoint_and_hold_every_problem(digits, operators, test_size):
    train, test = (
        prompts(data.arithmetic(digits, operators, split, test_size)) for split in ("train", "test")
    )
    numbers = range(10**digits)
    everything = {f"{a}{op}{b}=" for op in operators for a in numbers for b in numbers}

    assert test_size == len(test)
    assert len(everything) == len(train) + len(test)
    assert everything == {*train, *test}


@pytest.mark.parametrize("operators", ["+", "+-*"])
def test_answers_are_right(operators):
    rows = itertools.chain(
        *(data.arithmetic(1, operators, s, 50).rows() for s in ("train", "test"))
    )
    wrong = [row for row in rows if str(eval(row["prompt"][:-1])) != row["answer"]]

    assert [] == wrong


def test_the_default_is_the_task_of_the_baselines():
    train, test = data.arithmetic(), data.arithmetic(split="test")

    assert (9488, 512) == (train.size(), test.size())
    assert ("prompt", "answer") == train.columns
    assert [] == train.check() == train.notes()
    assert "arithmetic + of 2 digits, train split, 9,488 rows" == train.describe()


def test_the_held_out_problems_never_change():
    rows = data.arithmetic(split="test").rows()

    assert ["0+10=", "0+36=", "0+58="] == [row["prompt"] for row in rows[:3]]
    assert {"prompt": "99+82=", "answer": "181"} == rows[-1]


def test_many_digits_cost_nothing_to_declare():
    source = data.arithmetic(digits=6)

    assert 10**12 - 512 == source.size()
    assert 10**12 - 512 == len(source.rows())
    assert {"prompt": "999999+999999=", "answer": "1999998"} == source.rows()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"split": "tset"},
            "error[E608]: arithmetic has no split 'tset'\n"
            "  expected     'train' or 'test'\n"
            "  did you mean 'test'",
        ),
        (
            {"operators": "+/"},
            "error[E608]: arithmetic has no operators '+/'\n"
            "  expected     one or more of +-*, each once",
        ),
        (
            {"digits": 0},
            "error[E608]: digits=0\n  expected     between 1 and 8",
        ),
        (
            {"digits": 1},
            "error[E608]: test_size=512 of 100 problems\n"
            "  expected     between 1 and 99\n"
            "  fix          test_size=20",
        ),
    ],
)
def test_arguments_that_cannot_be_right(arguments, message):
    with pytest.raises(UsageError) as error:
        data.arithmetic(**arguments)

    head, place, *rest = str(error.value).splitlines()
    assert message == "\n".join([head, *rest])
    assert "data.arithmetic(**arguments)" in place


def test_a_generator_needs_a_row():
    with pytest.raises(UsageError, match="size=0 leaves no rows"):
        data.generator(str, size=0, columns=["prompt"])


def test_a_generator_keeps_the_declared_columns():
    source = data.generator(
        lambda i: {"prompt": str(i), "x": i, "y": i}, size=3, columns=["prompt", "x"]
    )

    assert [{"prompt": "0", "x": 0}, {"prompt": "1", "x": 1}] == source.rows()[:2]
    assert [] == source.check()


def sums(index):
    if index == 2:
        raise KeyError("b")
    return {"prompt": "1", "anser": 2} if index == 1 else {"prompt": 1, "answer": 2}


def test_what_a_generator_does_wrong():
    source = data.generator(sums, size=3, columns=["prompt", "answer"])
    lines = [line for f in source.check() for line in f.lines() if "test_generators.py" not in line]

    assert [
        "error[E605]: row 0 of sums has a 'prompt' that is no prompt",
        "  got          int 1",
        '  expected     a text, or chat messages: [{"role": "user", "content": "..."}]',
        "error[E605]: row 2 of sums raised KeyError",
        "  got          'b'",
        '  expected     a row: {"prompt": ..., "answer": ...}',
        "error[E603]: row 1 of sums has no 'answer'",
        "  got          columns prompt, anser",
        "  expected     a value for 'answer' in every row",
        "  did you mean 'anser'",
    ] == lines
    with pytest.raises(DataError, match="E605"):
        source.rows()[0]


def test_a_generator_must_repeat_itself():
    count = itertools.count()
    source = data.generator(lambda i: {"prompt": f"{next(count)}"}, size=1, columns=["prompt"])

    (finding,) = source.check()
    assert "E610" == finding.code
    assert "{'prompt': '1'}\n{'prompt': '2'}" == finding.got


def test_a_large_generator_is_checked_in_part_and_says_so():
    source = data.generator(lambda i: {"prompt": str(i)}, size=10**9, columns=["prompt"])

    assert [] == source.check()
    assert [
        "generator <lambda>, 1,000,000,000 rows: checked the first 10,000 rows only"
    ] == source.notes()
