"""What may be said about the options of an advantage estimator, and what would do nothing.

A name means the same wherever it is an option. This file holds no torch and no formula.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.errors import Finding, Source
from rlflow.ops.controllers import AdaptiveKL
from rlflow.ops.estimators import Estimator, Settings, in_force

CHOICES: dict[str, tuple[Any, ...]] = {
    "scale": ("group", "batch", "none"),
    "single": ("zero", "reward"),
    "over": ("rows", "tokens"),
    "alpha": ("degenerate", "zero_reward", "none"),
    "kl": ("k1", "k2", "k3", "abs", "given"),
    "whiten": (True, False),
    "bootstrap": (True, False),
    "leave_one_out": (True, False),
    "zero_tail": (True, False),
}

RANGES: dict[str, tuple[float, float]] = {
    "gamma": (0.0, 1.0),
    "lam": (0.0, 1.0),
    "std_eps": (0.0, math.inf),
    "kl_coef": (0.0, math.inf),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardWeights(Mapping[str, float]):
    """The rewards of an estimator that reads several: the weight of each field by its name."""

    weights: tuple[tuple[str, float], ...]

    def __getitem__(self, name: str) -> float:
        return dict(self.weights)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self.weights))

    def __len__(self) -> int:
        return len(self.weights)

    def describe(self) -> str:
        """As a plan prints it: `{correct: 1, short: 0.5}`."""
        return f"{{{', '.join(f'{name}: {weight:g}' for name, weight in self.weights)}}}"


def checked_options(
    estimator: Estimator, given: Mapping[str, Any], where: Source | None
) -> tuple[dict[str, Any], list[Finding]]:
    """The options in the form that bodies read, and a finding for each that is wrong.

    Wrong is what the estimator does not have, a value that it cannot take, and what would do
    nothing as the others stand. What is wrong is left out.
    """
    findings = [*_unknown(estimator, given, where), *_values(estimator, given, where)]
    wrong = {name for name, _ in findings}
    good = {name: value for name, value in given.items() if name not in wrong}
    findings += _idle(estimator, good, where)
    if "rewards" in estimator.options and "rewards" not in wrong:
        weights = _weights(estimator, given.get("rewards"), where)
        if isinstance(weights, Finding):
            findings.append(("rewards", weights))
            good.pop("rewards", None)
        else:
            good["rewards"] = weights
    return good, [finding for _, finding in findings]


def _unknown(
    estimator: Estimator, given: Mapping[str, Any], where: Source | None
) -> Iterator[tuple[str, Finding]]:
    for name in given:
        if name not in estimator.options:
            yield (
                name,
                Finding(
                    code="E117",
                    what=f"estimator {estimator.name!r} has no option {name!r}",
                    where=where,
                    expected=", ".join(estimator.options),
                    near=tuple(difflib.get_close_matches(name, estimator.options, n=3)),
                ),
            )


def _values(
    estimator: Estimator, given: Mapping[str, Any], where: Source | None
) -> Iterator[tuple[str, Finding]]:
    for name, value in given.items():
        if name not in estimator.options:
            continue
        expected = ""
        if name in CHOICES and not _among(value, CHOICES[name]):
            expected = ", ".join(map(repr, CHOICES[name]))
        if name in RANGES and not _within(value, *RANGES[name]) and not _follows(name, value):
            low, high = RANGES[name]
            expected = f"a number from {low:g} to {high:g}"
        if name == "reward_clip_range" and not _is_range(value):
            expected = "a pair of rising numbers, such as (-1.0, 1.0); math.inf for no bound"
        if expected:
            yield (
                name,
                Finding(
                    code="E118",
                    what=f"estimator {estimator.name!r} with {name}={value!r}",
                    where=where,
                    expected=expected.replace(" to inf", " on"),
                ),
            )


def _idle(
    estimator: Estimator, given: Mapping[str, Any], where: Source | None
) -> Iterator[tuple[str, Finding]]:
    options = in_force(estimator, given)
    if "kl" in given and not options["kl_coef"]:
        yield (
            "kl",
            Finding(
                code="E117",
                what="option kl= does nothing while kl_coef is 0",
                where=where,
                fix=f"kl_coef=0.05, kl={given['kl']!r}",
            ),
        )
    for name, alternatives in estimator.only_with.items():
        if name in given and not any(_holds(settings, options) for settings in alternatives):
            decisive = dict.fromkeys(key for settings in alternatives for key in settings)
            stands = ", ".join(f"{key}={options[key]!r}" for key in decisive)
            yield (
                name,
                Finding(
                    code="E117",
                    what=f"option {name}= does nothing with {stands}",
                    where=where,
                    fix=f"remove {name}=",
                ),
            )


def _weights(estimator: Estimator, given: Any, where: Source | None) -> RewardWeights | Finding:
    """The weight of each reward field, or what is wrong with them."""
    example = 'rewards={"correct": 1.0, "short": 0.5}'
    if given is None:
        return Finding(
            code="E117",
            what=f"estimator {estimator.name!r} needs rewards=: the fields it reads and their "
            "weights",
            where=where,
            fix=example,
        )
    usable = isinstance(given, Mapping) and given and all(isinstance(name, str) for name in given)
    if not usable or not all(_within(weight, -math.inf, math.inf) for weight in given.values()):
        return Finding(
            code="E118",
            what=f"estimator {estimator.name!r} with rewards={given!r}",
            where=where,
            expected="names of reward fields and finite numbers",
            fix=example,
        )
    silent = [name for name, weight in given.items() if weight == 0]
    if silent:
        return Finding(
            code="E117",
            what=f"reward {silent[0]!r} of estimator {estimator.name!r} does nothing: its weight "
            "is 0",
            where=where,
            fix=f"remove {silent[0]!r}",
        )
    return RewardWeights(weights=tuple((name, float(weight)) for name, weight in given.items()))


def _holds(settings: Settings, options: Mapping[str, Any]) -> bool:
    return all(options[name] in values for name, values in settings.items())


def _among(value: Any, choices: tuple[Any, ...]) -> bool:
    """Whether a value is a choice, of the same type: 1 is not True."""
    return any(type(value) is type(choice) and value == choice for choice in choices)


def _follows(name: str, value: Any) -> bool:
    """Whether a value is a coefficient that follows what is measured."""
    return name == "kl_coef" and isinstance(value, AdaptiveKL)


def _is_range(value: Any) -> bool:
    """Whether a value is a pair of numbers, the first below the second."""
    pair = isinstance(value, tuple | list) and len(value) == 2
    numbers = pair and all(type(side) in (int, float) for side in value)
    return value is None or (numbers and value[0] < value[1])


def _within(value: Any, low: float, high: float) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and low <= value <= high
