"""The reward of a program: taken from a response, run in a jail, compared with its tests.

What the program does wrong, and every limit it breaks, is a reward of 0. What goes wrong around
it (no jail, tests that cannot be read) is an error and never a number.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, get_args

from rlflow.errors import Finding, UsageError, near_names
from rlflow.rewards.sandbox import Isolation, Limits, Ran, require_namespaces, run_python

BLOCK = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "py", "python3", "")

# The program runs before it could find the tests or the token that says they have passed.
HARNESS = """
import json, os, sys
given, said = os.dup(0), os.dup(1)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)
space = {{"__name__": "solution"}}
exec(compile({program!r}, "solution.py", "exec"), space)
with os.fdopen(given) as file:
    tests, token = json.load(file)
exec(compile(tests, "tests.py", "exec"), space)
os.write(said, token.encode())
os._exit(0)
"""


def extract_code(text: str) -> str:
    """The last fenced block of Python in a text, closed or not; the whole text without one."""
    found = [body for kind, body in BLOCK.findall(text) if kind.lower() in PYTHON]
    return str(found[-1]) if found else text


def code(
    tests: str = "tests",
    *,
    response: str = "response",
    limits: Limits | None = None,
    partial: bool = False,
    isolation: Isolation = "namespaces",
) -> Callable[..., Coroutine[Any, Any, float]]:
    """A reward function that runs the Python program in a response against the column `tests`.

    Tests are JSON: a list of {"input": ..., "output": ...}, compared with what the program
    prints, or a list of texts of assertions about what it defines; or one text of assertions.
    The reward is 1 where all pass, with `partial` the share that does.

    Assertions run in the process of the program, which could be written to deceive them;
    inputs and outputs are compared outside. Raises UsageError (E285) for an unknown isolation.
    """
    if isolation not in get_args(Isolation):
        raise UsageError(
            Finding(
                code="E285",
                what=f"isolation {isolation!r} of rf.rewards.code is not known",
                expected=" or ".join(map(repr, get_args(Isolation))),
                near=near_names(str(isolation), get_args(Isolation)),
            )
        )
    most = limits or Limits()

    async def code_reward(**fields: str) -> float:
        return await asyncio.to_thread(
            share_passed,
            fields[response],
            fields[tests],
            limits=most,
            partial=partial,
            isolation=isolation,
        )

    if isolation == "namespaces":
        code_reward.require = require_namespaces  # type: ignore[attr-defined]
    code_reward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=str)
            for name in (response, tests)
        ]
    )
    code_reward.__annotations__ = {response: str, tests: str, "return": float}
    return code_reward


def share_passed(
    response: str, tests: str, *, limits: Limits, partial: bool, isolation: Isolation
) -> float:
    """The share of tests that the program in a response passes; ValueError for unusable tests."""
    program = extract_code(response)
    cases = read_tests(tests)
    passed = 0
    for case in cases:
        if _passes(program, case, limits, isolation):
            passed += 1
        elif not partial:
            return 0.0
    return passed / len(cases)


Case = str | tuple[str, str]


def read_tests(text: str) -> list[Case]:
    """Tests as assertions, or as pairs of input and output; raises ValueError for neither."""
    if not text.lstrip().startswith(("[", "{")):
        if not text.strip():
            raise ValueError("tests are empty")
        return [text]
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"tests are no JSON: {error}") from None
    cases = [_case(entry) for entry in (found if isinstance(found, list) else [found])]
    if not cases:
        raise ValueError("tests are an empty list")
    return cases


def _case(entry: Any) -> Case:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, dict) and "output" in entry:
        given, expected = entry.get("input", ""), entry["output"]
        if isinstance(given, str) and isinstance(expected, str):
            return given, expected
    raise ValueError(f"a test is {entry!r:.60}, not a text or a pair of input and output")


def _passes(program: str, case: Case, limits: Limits, isolation: Isolation) -> bool:
    if isinstance(case, str):
        token = secrets.token_hex(16)
        ran = run_python(
            HARNESS.format(program=program),
            json.dumps([case, token]),
            limits=limits,
            isolation=isolation,
        )
        return _ended_well(ran) and ran.stdout == token
    given, expected = case
    ran = run_python(program, given, limits=limits, isolation=isolation)
    return _ended_well(ran) and _lines(ran.stdout) == _lines(expected)


def _ended_well(ran: Ran) -> bool:
    return ran.code == 0 and not ran.cut


def _lines(text: str) -> list[str]:
    """The lines without spaces at their ends, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
