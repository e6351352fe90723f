"""What a user says of the lengths of prompts and responses: `rf.Lengths`, `rf.Length`.

Estimates read them; no run does, and no graph computes otherwise for them. The same words are the
option `--lengths`: `prompt=512,response=mean:1800,p95:4000,max:8192`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rlflow.errors import Finding, GraphError, RlflowError, Source, near_names
from rlflow.graph.source import declared_at

PARTS = ("prompt", "response")
FIGURES = ("mean", "p95", "max")
WORDS = "PART=TOKENS, or PART=mean:TOKENS,p95:TOKENS,max:TOKENS, of prompt and response"
EXAMPLE = "prompt=512,response=mean:1800,p95:4000,max:8192"
# Of a log-normal variable no 95th percentile is more means than exp(1.645 ** 2 / 2).
MOST_TAIL = 3.86
NINETY_FIFTH = 0.95
MOST_TOKENS = 100_000_000
NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Length:
    """How many tokens prompts, or responses, have: `mean` of them, 95 % at most `p95`, all `max`.

    A `mean` alone is the mean of responses, whose tail is then assumed, and of prompts the length
    of each. With `values`, lengths that were seen, their own distribution counts, and figures
    follow from them: `rf.Length.of([812, 1204, 3991])`. Lengths are log-normal, cut off at `max`;
    see `docs/lengths.md`.

    Raises GraphError E355 for what is no number of tokens, E356 for figures of no such lengths.
    """

    mean: float
    p95: float | None = None
    max: int | None = None
    values: tuple[int, ...] = ()
    seen: bool = field(default=False, repr=False)
    """Whether `max` is the longest that was seen of an iteration's rows, and bounds no others."""

    def __post_init__(self) -> None:
        if found := _impossible(self):
            raise GraphError(*found)

    @classmethod
    def of(cls, values: Sequence[int]) -> Length:
        """The lengths that were seen, in tokens, one of each row. GraphError E355 for none."""
        if not values or any(isinstance(v, bool) or not isinstance(v, int) for v in values):
            raise GraphError(
                _no_number("rf.Length.of", values, "whole numbers of tokens, one a row")
            )
        ordered = tuple(sorted(values))
        if ordered[0] < 0 or not ordered[-1]:
            raise GraphError(_no_number("rf.Length.of", ordered[0], "tokens of rows: 0 or more"))
        place = min(math.ceil(NINETY_FIFTH * len(ordered)), len(ordered)) - 1
        mean = fmean(ordered)
        return cls(mean, max(ordered[place], math.ceil(mean)), max(ordered), ordered)

    def __str__(self) -> str:
        """The words of `--lengths` for it; values become figures, as far as words can say them."""
        said = {name: getattr(self, name) for name in FIGURES}
        if self.values and self.p95 is not None:
            said["p95"] = min(self.p95, math.floor(MOST_TAIL * self.mean))
        if set(filter(said.get, said)) == {"mean"}:
            return f"{self.mean:g}"
        return ",".join(f"{name}:{value:g}" for name, value in said.items() if value is not None)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of a pipeline's `prompt` and `response`, each an `rf.Length` or a number of tokens.

    What is left out is what an earlier run has measured, what data and tokenizer say, or assumed.
    `source` says in a plan where they are from.
    """

    prompt: Length | float | None = None
    response: Length | float | None = None
    source: str = field(default="given", compare=False)

    def __post_init__(self) -> None:
        for name in PARTS:
            said = getattr(self, name)
            if said is not None and not isinstance(said, Length):
                object.__setattr__(self, name, Length(said))

    @property
    def prompts(self) -> Length | None:
        """Of prompts; None where it is not said."""
        return self.prompt if isinstance(self.prompt, Length) else None

    @property
    def responses(self) -> Length | None:
        """Of responses; None where it is not said."""
        return self.response if isinstance(self.response, Length) else None

    def __str__(self) -> str:
        """The words of `--lengths` that say it, without the values of a file."""
        said = {"prompt": self.prompts, "response": self.responses}
        return ",".join(f"{name}={length}" for name, length in said.items() if length is not None)


def says_lengths(text: str) -> bool:
    """Whether a text says lengths, where it could name a file: `prompt=512`."""
    return "=" in text


def read_lengths(
    text: str, error: type[RlflowError] = GraphError, where: Source | None = None
) -> Lengths:
    """The lengths that `prompt=512,response=mean:1800,p95:4000,max:8192` says.

    Raises `error` E355 for other words, E356 for figures of no lengths.
    """
    said: dict[str, dict[str, float]] = {}
    part = ""
    for word in (word.strip() for word in text.split(",")):
        name, equals, rest = (each.strip() for each in word.partition("="))
        if equals:
            part = _known(name, PARTS, f"no lengths of {name!r}", error, where)
            if part in said:
                raise error(_not_understood(f"lengths of {part!r} twice", where, text))
            said[part] = {}
        if not part:
            raise error(_not_understood(f"{word!r} does not say of which rows", where, text))
        figure, number = _figure(rest if equals else word, part, error, where)
        if figure in said[part]:
            raise error(_not_understood(f"{figure} of {part} is said twice", where, text))
        said[part][figure] = number
    try:
        known = {name: _length(name, figures) for name, figures in said.items()}
        return Lengths(prompt=known.get("prompt"), response=known.get("response"))
    except GraphError as wrong:
        raise error(*wrong.findings) from None


def _figure(
    word: str, part: str, error: type[RlflowError], where: Source | None
) -> tuple[str, float]:
    """The figure that a word says, `mean:1800`, and its value; a number alone is the mean."""
    name, colon, said = word.partition(":")
    name, said = (name.strip(), said.strip()) if colon else ("mean", word)
    name = _known(name, FIGURES, f"no figure {name!r} of lengths", error, where)
    if NUMBER.fullmatch(said) is None:
        raise error(_not_understood(f"{name} of {part}: {said!r} is no number", where, word))
    return name, float(said)


def lengths_of_columns(columns: Mapping[str, Sequence[int]], source: str) -> Lengths:
    """The lengths of rows that were seen, by `prompt` and `response`. GraphError E355 for none."""
    said: dict[str, Any] = {name: Length.of(values) for name, values in columns.items() if values}
    return Lengths(**said, source=source)


def _length(part: str, figures: Mapping[str, float]) -> Length:
    """The length that figures say; a mean that is not said follows from the others."""
    most = figures.get("max")
    if most is not None and not most.is_integer():
        raise GraphError(_not_understood(f"max of {part}: {most:g} is no whole number", None))
    mean = figures.get("mean")
    if mean is None:
        raise GraphError(
            _not_understood(f"lengths of {part} without their mean", None, fix=f"{part}=mean:1800")
        )
    return Length(mean, figures.get("p95"), None if most is None else int(most))


def _impossible(length: Length) -> list[Finding]:
    """What is wrong with the figures of a length."""
    for name in FIGURES:
        value = getattr(length, name)
        if value is None and name != "mean":
            continue
        whole = name != "max" or isinstance(value, int)
        number = isinstance(value, int | float) and not isinstance(value, bool) and whole
        if not number or not 0 < value <= MOST_TOKENS:
            wanted = f"tokens: more than 0, at most {MOST_TOKENS:,}"
            return [_no_number(f"a length with {name}={value!r:.40}", value, wanted)]
    mean, tail, most = length.mean, length.p95, length.max
    top = math.inf if most is None else most
    if tail is not None and not mean <= tail <= top:
        what = f"a 95th percentile of {tail:g} tokens"
        most_said = "" if most is None else f", at most the longest, {most}"
        return [_contradicted(what, length, f"at least the mean, {mean:g}{most_said}")]
    if mean > top:
        return [
            _contradicted(f"a mean of {mean:g} tokens", length, f"at most the longest, {top:g}")
        ]
    if tail is not None and not length.values and tail > MOST_TAIL * mean:
        what = f"a 95th percentile of {tail:g} tokens, {tail / mean:.1f} means"
        wanted = (
            f"at most {MOST_TAIL} means ({MOST_TAIL * mean:.0f}): no log-normal has a longer tail"
        )
        return [_contradicted(f"{what}", length, f"{wanted}; or a file of lengths")]
    return []


def _contradicted(what: str, length: Length, expected: str) -> Finding:
    return Finding(
        code="E356",
        what=f"no lengths have {what}",
        where=declared_at(),
        got=str(length),
        expected=expected,
        fix=f"--lengths {EXAMPLE}",
    )


def _no_number(what: str, value: object, expected: str) -> Finding:
    where, got = declared_at(), f"{value!r:.80}"
    return Finding(code="E355", what=what, where=where, got=got, expected=expected)


def _known(
    name: str,
    names: Sequence[str],
    what: str,
    error: type[RlflowError],
    where: Source | None,
) -> str:
    if name in names:
        return name
    near = near_names(name, names)
    raise error(_not_understood(what, where, expected=" or ".join(names), near=near))


def _not_understood(
    what: str,
    where: Source | None,
    got: str = "",
    *,
    expected: str = WORDS,
    near: tuple[str, ...] = (),
    fix: str = "",
) -> Finding:
    return Finding(
        code="E355",
        what=what,
        where=where,
        got=got,
        expected=expected,
        near=near,
        fix=f"--lengths {fix or EXAMPLE}",
    )
