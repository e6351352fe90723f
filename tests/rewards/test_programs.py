"""Programs against tests: what passes, what does not, and what a program may try."""

from __future__ import annotations

import asyncio
import inspect
import json
import os

import cloudpickle
import pytest

import rlflow as rf
from rlflow.errors import RewardError, UsageError
from rlflow.rewards import walls
from rlflow.rewards.programs import extract_code, read_tests
from rlflow.rewards.sandbox import walls_here
from rlflow.rewards.walls import Limits
from rlflow.runtime.record.printed import printed_by, printing

QUICK = Limits(cpu=1, wall=5)
DOUBLES = [{"input": "2\n", "output": "4"}, {"input": "5\n", "output": "10\n\n"}]
ASSERTIONS = ["assert double(2) == 4", "assert double(5) == 10"]
RIGHT = "def double(x):\n    return 2 * x\n"


def scored(response, tests, **options):
    made = rf.rewards.code(limits=QUICK, isolation="limits", **options)
    text = tests if isinstance(tests, str) else json.dumps(tests)
    return asyncio.run(made(response=response, tests=text))


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("print(1)", "print(1)"),
        ("Here:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```py\na\n```\nand\n```python3\nb\n```", "b\n"),
        ("```python\na\n```\n```text\nout\n```", "a\n"),
        ("```bash\nls\n```", "```bash\nls\n```"),
        ("so\n```python\nfor x in y:\n    pass", "for x in y:\n    pass"),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("", ""),
    ],
)
def test_the_program_in_a_text(text, program):
    assert program == extract_code(text)


@pytest.mark.parametrize(
    ("text", "cases"),
    [
        ("assert f(1) == 1", ["assert f(1) == 1"]),
        (json.dumps(ASSERTIONS), ASSERTIONS),
        (json.dumps(DOUBLES), [("2\n", "4"), ("5\n", "10\n\n")]),
        ('{"output": "4"}', [("", "4")]),
    ],
)
def test_tests_are_assertions_or_inputs_and_outputs(text, cases):
    assert cases == read_tests(text)


@pytest.mark.parametrize(
    "text", ["", " \n", "[]", "[1]", "[1", '[{"input": "x"}]', '[{"output": 4}]', "{}"]
)
def test_tests_that_cannot_be_read(text):
    with pytest.raises(ValueError, match="test"):
        read_tests(text)
    with pytest.raises(ValueError, match="test"):
        scored(RIGHT, text)


@pytest.mark.rows(1)
@pytest.mark.parametrize("tests", [ASSERTIONS, "\n".join(ASSERTIONS)])
def test_assertions_about_what_a_program_defines(tests):
    assert 1.0 == scored(f"So:\n```python\n{RIGHT}```", tests)
    assert 0.0 == scored("def double(x):\n    return 3 * x", tests)


def test_what_a_right_program_prints_does_not_matter():
    assert 1.0 == scored(f"print('noise', flush=True)\n{RIGHT}", ASSERTIONS)


def test_inputs_and_outputs():
    assert 1.0 == scored("print(2 * int(input()), ' ')", DOUBLES)
    assert 0.0 == scored("print(3 * int(input()))", DOUBLES)


@pytest.mark.slow
def test_the_share_of_tests_that_pass():
    assert 0.5 == scored("print(4)", DOUBLES, partial=True)
    assert 0.0 == scored("print(4)", DOUBLES)
    assert 0.5 == scored("def double(x):\n    return 4", ASSERTIONS, partial=True)


@pytest.mark.rows(5)
@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "print('passed')",
        "def double(x):\n    raise SystemExit(0)",
        "def double(x):\n    import os; os._exit(0)",
        "import atexit, os\natexit.register(lambda: os._exit(0))",
        "import builtins\nbuiltins.AssertionError = Exception",
        "import sys\nprint(sys.stdin.read())",
        "def double(x): return",
        "this is no Python",
        "",
    ],
)
def test_a_program_that_does_not_pass_has_no_reward(program):
    assert 0.0 == scored(program, ASSERTIONS)


@pytest.mark.parametrize("program", ["print(4); import sys; sys.exit(1)", "print(4)\n1/0"])
def test_a_program_that_ends_badly_has_not_passed(program):
    assert 0.0 == scored(program, [DOUBLES[0]])


def test_no_jail_is_an_error_and_not_a_reward(monkeypatch):
    monkeypatch.setattr(walls.sys, "platform", "plan9")
    with pytest.raises(RewardError, match="the platform is plan9"):
        scored(RIGHT, ASSERTIONS)


def test_the_names_of_the_fields_are_those_asked_for():
    made = rf.rewards.code("cases", response="solution")
    assert ["solution", "cases"] == list(inspect.signature(made).parameters)
    assert {"solution": str, "cases": str, "return": float} == made.__annotations__


def test_an_unknown_isolation():
    with pytest.raises(UsageError) as caught:
        rf.rewards.code(isolation="namespace")
    finding = caught.value.findings[0]
    assert ("E285", ("namespaces",)) == (finding.code, finding.near)


def test_a_reward_travels_to_other_processes():
    made = rf.rewards.code("cases", limits=QUICK, isolation="limits")
    sent = cloudpickle.loads(cloudpickle.dumps(made))
    assert ["response", "cases"] == list(inspect.signature(sent).parameters)
    assert 1.0 == asyncio.run(sent(response=RIGHT, cases=json.dumps(ASSERTIONS)))


def test_an_unknown_cgroup():
    with pytest.raises(UsageError) as caught:
        rf.rewards.code(cgroup="require")
    finding = caught.value.findings[0]
    assert ("E285", ("required",)) == (finding.code, finding.near)


def test_a_run_with_programs_needs_a_jail_before_it_starts(monkeypatch):
    monkeypatch.setattr(walls, "visible_paths", lambda: ["/usr", "/no/such/folder"])
    walls_here.cache_clear()
    try:
        with pytest.raises(RewardError) as caught:
            rf.rewards.code().require()
        assert "E284" == caught.value.findings[0].code
        assert "limits" == rf.rewards.code(isolation="limits", cgroup="none").require().isolation
    finally:
        walls_here.cache_clear()


@pytest.mark.torch
def test_a_run_says_once_what_its_programs_run_in():
    from rlflow.ops.bodies.reward import tell_walls

    made = rf.rewards.code(isolation="limits", cgroup="none")
    lines = []
    for _ in range(2):
        with printing(lines.append), printed_by("iteration 3 reward"):
            tell_walls(made)
            tell_walls(made)
    (name, text), again = lines
    assert ("iteration 3 reward", text) == (name, text) == again
    assert text.startswith("programs run in an audit hook and limits, no wall: native code gets")
    assert ("this user is root" in text) is (os.geteuid() == 0)
