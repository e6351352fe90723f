"""Every error that rlflow raises, and the exit code each one ends a command with.

    RlflowError                 1   base
    |-- UsageError              2   the command line: unknown option, key, file, placement
    |-- GraphError              3   the pipeline or its config is wrong (a list of findings)
    |-- PlanError               4   the plan does not fit: devices, memory, an impossible layout
    |-- RunError                1   an op, a worker or an engine failed while running
    |   |-- RewardError         1   a reward function raised or returned something unusable
    |   |-- DataError           1   a data source broke while it was read
    |   |-- NumericsError       1   a loss, gradient or parameter is not finite
    |   |-- DeviceLostError           1   a device, its process or its host is gone or silent
    |   `-- HealthError         5   `--strict`: a rule says that nothing can be learned
    |-- CallbackError           1   a callback of the Python door raised; the run itself did not
    |-- CheckpointError         1   a checkpoint is damaged, incomplete or of another run
    |-- RunDirError             2   a run directory is in use, or holds another run
    |-- InvariantError         70   a bug in rlflow: the verifier refuses a plan it compiled
    `-- Interrupted           130   Ctrl-C: stopped cleanly, a line says how to continue
        `-- Preempted          75   SIGTERM with `--grace`: to be put back in the queue

A message has up to five parts: what, where it was declared, got and expected, the
nearest names, and the fix as a line to paste. Much of it comes from outside: answers of judges,
text of models, names of files; so nothing in it reaches a terminal as more than letters, and no
line of it can be taken for one of ours. This file knows how messages are laid out, and nothing
about graphs, plans or tensors.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

SHORT_LIST = 16
# Letters of a name that files and directories are called by; a file system takes 255.
LONGEST_NAME = 100
# Letters of a line of a user's file, and of the message of an error that is not ours.
LONGEST_LINE, LONGEST_MESSAGE = 400, 4_000
# What a terminal obeys instead of showing: control characters but for tab and end of line, marks
# that turn the direction of text, other ends of lines, and halves of letters.
OBEYED = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A place in a user's file: path, line (from 1) and the text of that line."""

    path: str
    line: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, in five parts; `code` has a heading in docs/errors.md."""

    code: str
    what: str
    where: Source | None = None
    got: str = ""
    expected: str = ""
    near: tuple[str, ...] = ()
    fix: str = ""

    def lines(self) -> list[str]:
        """The finding as it is printed, without colour."""
        what, *more = printable(self.what).splitlines() or [""]
        rows = [f"error[{self.code}]: {what}", *(f"  {'':<12} {line}" for line in more)]
        if self.where is not None:
            line = printable(f"  {self.where}   {self.where.text}".rstrip())
            rows.append(line[:LONGEST_LINE])
        parts = (
            ("got", self.got),
            ("expected", self.expected),
            ("did you mean", " or ".join(repr(name) for name in self.near)),
            ("fix", self.fix),
        )
        for label, value in parts:
            first, *rest = printable(value).splitlines() or [""]
            if value:
                rows.append(f"  {label:<12} {first}")
                rows.extend(f"  {'':<12} {line}" for line in rest)
        return rows


def printable(text: str) -> str:
    """Text from outside as a terminal may have it: what it would obey is written as its code.

    Ends of lines and tabs stay. Text that is printable is the same.
    """
    return OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def error_text(error: BaseException) -> str:
    """The class and the message of an error of others: what is too long of it is cut.

    A message is made by code of theirs, which may fail as well.
    """
    kind = type(error).__name__
    try:
        said = str(error)
    except BaseException as other:
        return f"{kind}, whose message cannot be told ({type(other).__name__})"
    more = len(said) - LONGEST_MESSAGE
    said = said if more <= 0 else f"{said[:LONGEST_MESSAGE]}... ({more:,} more letters)"
    return f"{kind}: {said}" if said else kind


def value_text(value: object, most: int = 40) -> str:
    """The first letters of how a value of others shows itself, or its class where it cannot."""
    try:
        return repr(value)[:most]
    except BaseException:
        return f"a value of class {type(value).__name__}"


class RlflowError(Exception):
    """Base of every error; `findings` say what is wrong, `exit_code` ends the command."""

    exit_code = 1

    def __init__(self, *findings: Finding, summary: str = "") -> None:
        self.findings = findings
        self.summary = summary
        super().__init__(self.render())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its findings: it comes back whole from another process."""
        return partial(type(self), summary=self.summary), self.findings, self.__dict__

    def render(self) -> str:
        """All findings, the summary last."""
        rows = [line for finding in self.findings for line in finding.lines()]
        return "\n".join([*rows, printable(self.summary)] if self.summary else rows)


class UsageError(RlflowError):
    """The command line asks for something that does not exist (exit code 2)."""

    exit_code = 2


class GraphError(RlflowError):
    """The pipeline or its config is wrong; nothing was started (exit code 3)."""

    exit_code = 3


class PlanError(RlflowError):
    """The graph cannot be placed: devices, memory, layout (exit code 4)."""

    exit_code = 4


class RunError(RlflowError):
    """Something failed while the plan was running (exit code 1)."""


class RewardError(RunError):
    """A reward function raised, or returned something that is not a number."""


class DataError(RunError):
    """A data source broke while it was being read."""


class NumericsError(RunError):
    """A loss, a gradient or a parameter is not finite."""


class DeviceLostError(RunError):
    """A device, its process or its host is gone or silent; `--elastic` goes on without it."""


class HealthError(RunError):
    """A strict run shows a sign that it learns nothing, or is about to break (exit code 5)."""

    exit_code = 5


class CallbackError(RlflowError):
    """A callback that a program gave to `rf.run` raised; the run itself has not (exit code 1)."""


class CheckpointError(RlflowError):
    """A checkpoint is damaged, incomplete, or belongs to another run (exit code 1)."""


class RunDirError(RlflowError):
    """A run directory is in use, or holds something else (exit code 2)."""

    exit_code = 2


class InvariantError(RlflowError):
    """The verifier refuses a plan that rlflow itself compiled: a bug (exit code 70)."""

    exit_code = 70


class Interrupted(RlflowError):
    """The user stopped the run; its last iteration is kept (exit code 130)."""

    exit_code = 130


class Preempted(Interrupted):
    """SIGTERM of a scheduler, with a grace: a line says how to continue (exit code 75)."""

    exit_code = 75


class GraceOver(KeyboardInterrupt):
    """The seconds between a scheduler's SIGTERM and its SIGKILL are nearly over."""


def near_names(word: str, names: Iterable[str]) -> tuple[str, ...]:
    """Up to three of `names` that look like `word`, nearest first."""
    return tuple(difflib.get_close_matches(word, list(dict.fromkeys(names)), n=3, cutoff=0.6))


def known_names(names: Sequence[str]) -> str:
    """A short list of names in full, a long one by its length."""
    if not names:
        return "none"
    if len(names) <= SHORT_LIST:
        return ", ".join(names)
    return f"one of {len(names)} names: {', '.join(names[:SHORT_LIST])}, ..."
