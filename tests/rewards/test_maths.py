"""Mathematical answers: equal objects in other words, and what is no answer."""

from __future__ import annotations

import pytest

import rlflow as rf
from rlflow.errors import UsageError
from rlflow.rewards import maths
from rlflow.rewards.bounds import Bounds
from rlflow.rewards.judging import Failure, judge

CASES = [
    (r"so it is $\boxed{\frac{1}{2}}$", "0.5", 1.0),
    ("the answer is 42.", "42", 1.0),
    ("the answer is 43.", "42", 0.0),
    (r"\boxed{(x+1)^2}", r"$x^2+2x+1$", 1.0),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
    ("I do not know", "7", 0.0),
    (r"\boxed{(1, 2)}", "(1,2)", 1.0),
    ("it costs 1,234 dollars", "1234", 1.0),
    (r"first $3$, then \boxed{4}", "4", 1.0),
]


def judged(cases, **bounds):
    samples = [{"response": response, "answer": answer} for response, answer, *_ in cases]
    return judge(rf.rewards.math_verify, samples, bounds=Bounds(**bounds)).values


def test_equal_mathematics_is_a_reward_of_one():
    assert [expected for *_, expected in CASES] == judged(CASES)


def test_an_answer_without_mathematics_is_a_failure_of_the_data():
    (failure,) = judged([("42", "")])
    assert isinstance(failure, Failure)
    assert "no mathematics in the answer ''" in failure.problem


@pytest.mark.slow
def test_a_comparison_that_takes_for_ever_is_a_timeout(monkeypatch):
    monkeypatch.setattr(maths, "SECONDS", 4.0)  # a process starts within it
    values = judged([(r"\boxed{9^{9^{9^{9}}}}", "1"), ("1", "1")])
    assert ["timeout", 1.0] == [getattr(value, "cause", value) for value in values]


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(maths.importlib.util, "find_spec", lambda name: None)
    maths.require_package.cache_clear()
    with pytest.raises(UsageError) as caught:
        maths.require_package()
    maths.require_package.cache_clear()
    assert "E286" == caught.value.findings[0].code
