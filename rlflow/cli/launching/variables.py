"""The environment of a launched run: values that are written, and names whose values are not."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.errors import Finding, UsageError, near_names
from rlflow.runtime.record.edges.secrets import (
    looks_like_a_key,
    named_like_a_key,
    without_secrets,
)

NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchVariables:
    """`written` are names and values for a script; of `passed` the name alone is written."""

    written: tuple[tuple[str, str], ...]
    passed: tuple[str, ...]

    def exports(self) -> list[str]:
        """The lines of a shell that set what is written."""
        return [f"export {name}={shlex.quote(value)}" for name, value in self.written]


def read_variables(said: Sequence[str], *, here: bool) -> LaunchVariables:
    """The variables that `--env` says; UsageError E382 for keys, E386 for names that are not set.

    Values of names alone come from the environment of the command, where they are looked for
    `here`.
    """
    findings: list[Finding] = []
    written, passed = [], []
    for text in said:
        name, equals, value = text.partition("=")
        if not NAME.fullmatch(name):
            findings.append(_no_name(text))
        elif not equals:
            passed.append(name)
            findings += [_not_set(name)] if here and name not in os.environ else []
        elif is_key(name, value):
            findings.append(_a_key(name))
        else:
            written.append((name, value))
    if findings:
        raise UsageError(*findings, summary="Nothing was submitted.")
    return LaunchVariables(written=tuple(written), passed=tuple(passed))


def is_key(name: str, value: str) -> bool:
    """Whether a variable is named like a key, or its value looks like one."""
    return named_like_a_key(name) or looks_like_a_key(value)


def require_no_key(words: Sequence[str], what: str) -> None:
    """Raise UsageError E382 where words that would be written have a key in them."""
    if without_secrets(words) != [*words]:
        raise UsageError(
            Finding(
                code="E382",
                what=f"{what} a key, which would be written into the script",
                got=shlex.join(without_secrets(words)),
                expected="keys in the environment: the pipeline reads os.environ",
                fix="--env NAME, which passes a variable by its name",
            ),
            summary="Nothing was submitted.",
        )


def _no_name(text: str) -> Finding:
    return Finding(
        code="E386",
        what=f"--env {text.partition('=')[0]} is no name of a variable",
        expected="KEY=VALUE, or a NAME whose value is passed and not written",
        fix="--env NCCL_DEBUG=WARN",
    )


def _not_set(name: str) -> Finding:
    return Finding(
        code="E386",
        what=f"--env {name}: the variable is not set here",
        expected="a variable of this environment, or KEY=VALUE",
        near=near_names(name, os.environ),
        fix=f"export {name}=...",
    )


def _a_key(name: str) -> Finding:
    return Finding(
        code="E382",
        what=f"--env {name}=... is a key, which would be written into the script",
        expected="its name alone: the value is passed and written nowhere",
        fix=f"export {name}=...   then --env {name}",
    )
