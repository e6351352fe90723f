"""Answers out of a model's text, on the forms that models write."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.data.answers import (
    extract_boxed,
    extract_gsm8k,
    last_number,
    parse_number,
    same_number,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {x^{2}} and }{", "x^{2}"),
        (r"\fbox{7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"line\\\boxed{5}", "5"),
        (r"\boxed{a \boxed{5}}", "5"),
        (r"\boxed{5} or \boxed{6", "5"),
        (r"{ \boxed{5}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{6", None),
        (r"\boxed 6", None),
        (r"\\boxed{6}", None),
        ("42", None),
        ("", None),
    ],
)
def test_extract_boxed(text, answer):
    assert answer == extract_boxed(text)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("6*7=42\n#### 42", "42"),
        ("#### 1,234,567", "1234567"),
        ("####$5", "5"),
        ("#### 1\n#### 2\nbye", "2"),
        ("#### 3 apples", "3 apples"),
        ("#### red, green", "red, green"),
        ("#### -7", "-7"),
        ("42", None),
        ("####", None),
        ("", None),
    ],
)
def test_extract_gsm8k(text, answer):
    assert answer == extract_gsm8k(text)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("it is 42.", "42"),
        ("costs $1,234.50!", "1234.50"),
        ("1,2,3", "3"),
        ("12,34", "34"),
        ("x = -5", "-5"),
        ("x = \u22125", "-5"),
        ("10-5", "5"),
        ("(10)-5", "5"),
        ("it falls to -$5", "-5"),
        ("it falls to $-5", "-5"),
        ("about .5", ".5"),
        ("fig.5", "5"),
        ("3.0 kg", "3.0"),
        ("no number", None),
        ("", None),
    ],
)
def test_last_number(text, answer):
    assert answer == last_number(text)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("1,234", "1234"),
        ("$5", 5),
        ("-$5", "-5"),
        ("$-5.00", -5.0),
        ("3.0", "3"),
        ("3.", "3"),
        (" 007 ", "7"),
        ("+4", "4"),
        (".5", "0.50"),
        ("1/2", "0.5"),
        ("-6/4", "-1.5"),
        ("1e3", "1000"),
        ("1E-2", "0.01"),
        (1e22, "10000000000000000000000"),
        ("50%", "50"),
        ("0", "-0"),
    ],
)
def test_same_numbers(a, b):
    assert same_number(a, b)
    assert same_number(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("1", "2"),
        ("0.3333", "1/3"),
        ("10000000000000000000001", "10000000000000000000000"),
        ("1,23", "123"),
        ("five", "five"),
        ("", ""),
        (None, None),
        (None, "3"),
        ("1/0", "1/0"),
        ("nan", "nan"),
        (float("inf"), float("inf")),
        ("--5", "5"),
        ("+-5", "-5"),
        ("1 2", "12"),
        ("1_0", "10"),
        ("\u0663", "3"),
    ],
)
def test_different_or_no_numbers(a, b):
    assert not same_number(a, b)
    assert not same_number(b, a)


@given(number=st.integers(-(10**30), 10**30))
def test_thousands_separators_change_nothing(number):
    assert same_number(f"{number:,}", number)
    assert str(number) == last_number(f"that makes {number:,}.")


@given(text=st.text())
def test_any_text_is_taken(text):
    extract_boxed(text)
    extract_gsm8k(text)
    found = last_number(text)

    assert found is None or isinstance(parse_number(found[:200]), Fraction)


@pytest.mark.parametrize(
    "text",
    ["1e999999999", "9" * 10**6, "\\boxed{" * 10**5, "1," * 10**5, "-" * 10**5, "{" * 10**5],
)
def test_hostile_text_costs_no_time(text):
    start = time.process_time()
    extract_boxed(text)
    extract_gsm8k(text)
    last_number(text)
    same_number(text, "1")

    assert time.process_time() - start < 1
