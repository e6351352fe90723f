"""The reward of a program: taken from a response, run in a jail, compared with its tests.

What the program does wrong, and every limit it breaks, is a reward of 0. What goes wrong around
it (no jail, tests that cannot be read) is an error and never a number.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
import secrets
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, get_args

from rlflow.errors import Finding, UsageError, near_names
from rlflow.rewards.sandbox import Ran, run_beside, run_python, walls_here
from rlflow.rewards.walls import Bounded, Isolation, Limits

BLOCK = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "py", "python3", "")

# Modules that both sides of a dialogue need, which a jail does not see.
SHARED = ("wire", "dialogue")
LOADER = """
import sys, types
for name, text in {sources!r}.items():
    sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), vars(sys.modules[name]))
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
    isolation: Isolation = "auto",
    cgroup: Bounded = "auto",
) -> Callable[..., Coroutine[Any, Any, float]]:
    """A reward function that runs the Python program in a response against the column `tests`.

    Tests are JSON: a list of {"input": ..., "output": ...}, compared with what the program
    prints, or a list of texts of assertions about what it defines; or one text of assertions.
    The reward is 1 where all pass, with `partial` the share that does.

    Outputs are compared outside. Assertions run in a jail of their own and ask the program, in
    another one, for what it defines: plain data is compared beside the assertions, and an object
    of the program's own classes equals no data. Raises UsageError (E285) for an unknown isolation
    or cgroup.
    """
    _known("isolation", isolation, get_args(Isolation))
    _known("cgroup", cgroup, get_args(Bounded))
    most = limits or Limits()

    async def code_reward(**fields: str) -> float:
        return await asyncio.to_thread(
            share_passed,
            fields[response],
            fields[tests],
            limits=most,
            partial=partial,
            isolation=isolation,
            cgroup=cgroup,
        )

    here = functools.partial(walls_here, isolation, cgroup)
    code_reward.require = here  # type: ignore[attr-defined]
    code_reward.walls = lambda: here().describe()  # type: ignore[attr-defined]
    code_reward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=str)
            for name in (response, tests)
        ]
    )
    code_reward.__annotations__ = {response: str, tests: str, "return": float}
    return code_reward


def _known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(
            Finding(
                code="E285",
                what=f"{name} {value!r} of rf.rewards.code is not known",
                expected=" or ".join(map(repr, known)),
                near=near_names(str(value), known),
            )
        )


def share_passed(
    response: str,
    tests: str,
    *,
    limits: Limits,
    partial: bool,
    isolation: Isolation,
    cgroup: Bounded,
) -> float:
    """The share of tests that the program in a response passes; ValueError for unusable tests."""
    program = extract_code(response)
    cases = read_tests(tests)
    passed = 0
    for case in cases:
        if _passes(program, case, limits=limits, isolation=isolation, cgroup=cgroup):
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


def _passes(program: str, case: Case, **within: Any) -> bool:
    if isinstance(case, str):
        token = secrets.token_hex(16)
        ran = run_beside(
            f"{_loader()}sys.modules[name].ask()\n",
            f"{_loader()}sys.modules[name].answer({program!r})\n",
            lambda reading, writing: json.dumps([case, token, reading, writing]),
            **within,
        )
        return _ended_well(ran) and ran.stdout == token
    given, expected = case
    ran = run_python(program, given, **within)
    return _ended_well(ran) and _lines(ran.stdout) == _lines(expected)


@functools.cache
def _loader() -> str:
    folder = Path(__file__).parent
    sources = {f"{__package__}.{name}": (folder / f"{name}.py").read_text() for name in SHARED}
    return LOADER.format(sources=sources)


def _ended_well(ran: Ran) -> bool:
    return ran.code == 0 and not ran.cut


def _lines(text: str) -> list[str]:
    """The lines without spaces at their ends, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
