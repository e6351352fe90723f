"""Bodies that run a user's Python function on rows: rewards, and what became of failures.

An exception, a timeout, a wrong length or a number that is not finite is a failure, and a
failure is never a reward: it stops the run with the sample, or the sample is not valid.
"""

from __future__ import annotations

import json
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlflow.batch import is_ragged, split_rows, strings, text
from rlflow.contract.progress import advance
from rlflow.contract.values import Stat
from rlflow.errors import Finding, RewardError, error_text, value_text
from rlflow.ops.bodies.common import inputs_of, num_rows, row_numbers
from rlflow.ops.bodies.stats import max_of, mean_of, min_of, std_of
from rlflow.ops.body import Call, Output
from rlflow.ops.scoring import STRICT, Dispatch, Policy, unknown_set, wanted_names
from rlflow.rewards.judging import Failure, judge, number

SHOWN = 160
NAMED = 3
NO_FUNCTION_OPTIONS = frozenset({"function", "batched", "policy"})


def reward(call: Call) -> Output:
    """One float32 reward a row; NaN, with `valid` false and the cause in `failure`, without one."""
    inputs = inputs_of(call)
    policy: Policy = call.params.get("policy", STRICT)
    numbers = row_numbers(call).tolist()
    columns = {name: python_rows(inputs[name]) for name in inputs.keys()}  # noqa: SIM118  rows otherwise
    options = {key: v for key, v in call.params.items() if key not in NO_FUNCTION_OPTIONS}
    tell_walls(call.params["function"])
    scorer = _Scorer(call=call, policy=policy, columns=columns, numbers=numbers, options=options)
    scores, retried = scorer.scored(call.params["function"], call.params["batched"])
    failed = [isinstance(score, Failure) for score in scores]
    values = [math.nan if isinstance(score, Failure) else score for score in scores]
    rewards = torch.tensor(values, dtype=torch.float32)
    valid = ~torch.tensor(failed, dtype=torch.bool)
    if policy.on_error == "drop_group" and not valid.all():
        valid &= ~torch.isin(inputs["group"], inputs["group"][~valid])
    counted = rewards[valid]
    metrics: dict[str, float | Stat] = {
        "mean": mean_of(counted),
        "std": std_of(counted),
        "min": min_of(counted),
        "max": max_of(counted),
    }
    if policy.bounds.retries:
        metrics["retries"] = Stat(kind="mean", total=float(retried), count=float(len(scores)))
    fields = {"reward": rewards}
    if policy.on_error != "error":
        told = [_told(score) if isinstance(score, Failure) else "" for score in scores]
        fields |= {"valid": valid, "failure": text(told)}
    return Output(fields=fields, rows=len(scores), metrics=metrics)


def tell_walls(function: Callable[..., Any]) -> None:
    """Print once a run and process what programs are jailed in, for functions that do so."""
    for each in getattr(function, "functions", {"": function}).values():
        describe = getattr(each, "walls", None)
        if describe and sys.stdout not in _TOLD:
            _TOLD.add(sys.stdout)
            print(f"programs run in {describe()}")  # noqa: T201  a run keeps what is printed


_TOLD: weakref.WeakSet[Any] = weakref.WeakSet()


def failures(call: Call) -> Output:
    """Count the samples of an iteration without a reward, and those that take no part in it.

    Raises RewardError (E288) with some of them where they are more than allowed.
    """
    inputs, most = inputs_of(call), call.params["max_failures"]
    rows = num_rows(inputs)
    told = [json.loads(entry) if entry else None for entry in strings(inputs["failure"])]
    places = [place for place, entry in enumerate(told) if entry]
    if len(places) > most * rows:
        raise RewardError(_too_many(call, places, told))
    causes = Counter(entry["cause"] for entry in told if entry)
    invalid = ~inputs["valid"]
    numbers = {
        "failed": float(len(places)),
        "dropped": float(invalid.sum()),
        **{cause.replace(" ", "_"): float(causes[cause]) for cause in CAUSES},
    }
    groups = inputs.get("group", None)
    if groups is not None:
        numbers["dropped_groups"] = float(len(groups.unique()) - len(groups[~invalid].unique()))
    return Output(metrics=numbers)


CAUSES = ("raised", "timeout", "not a number", "lost")


def _counted(value: Any) -> float:
    """A reward as a float, counted as done."""
    advance(1, "rewards")
    return number(value)


def _told(failure: Failure) -> str:
    return json.dumps({"cause": failure.cause, "problem": failure.problem})


def _too_many(call: Call, places: list[int], told: list[Any]) -> Finding:
    inputs = inputs_of(call)
    most, rows = call.params["max_failures"], num_rows(inputs)
    names = [name for name in ("prompt", "response") if name in inputs.keys()]  # noqa: SIM118
    columns = {name: strings(inputs[name]) for name in names}
    samples = inputs.get("sample", row_numbers(call)).tolist()
    shown = []
    for place in places[:NAMED]:
        shown.append(f"sample {samples[place]}: {told[place]['problem']}")
        shown += [f"  {name}: {column[place]!r:.{SHOWN}}" for name, column in columns.items()]
    if len(places) > NAMED:
        rest = ", ".join(str(samples[place]) for place in places[NAMED:][:SHOWN])
        shown.append(f"and samples {rest}")
    return Finding(
        code="E288",
        what=f"{call.params['reward']}: {len(places)} of {rows} samples of iteration "
        f"{call.iteration} have no reward",
        where=call.where,
        got="\n".join(shown),
        expected=f"at most the share max_failures={most:g} of them",
    )


def python_rows(field: Tensor) -> list[Any]:
    """A field as one Python value a row: text as str, tokens as a list, numbers as they are."""
    if not is_ragged(field):
        return list(field.tolist())
    if field.dtype == torch.uint8:
        return list(strings(field))
    return [part.tolist() for part in split_rows(field)]


def score(
    call: Call,
    function: Callable[..., Any],
    columns: Mapping[str, Sequence[Any]],
    numbers: Sequence[int],
    batched: bool,
) -> list[float]:
    """Run a reward function over rows; it is not called where there are none.

    `numbers` are the row numbers. Raises RewardError with the sample that broke it.
    """
    scorer = _Scorer(call=call, policy=STRICT, columns=columns, numbers=numbers, options={})
    scores, _ = scorer.scored(function, batched)
    return [value for value in scores if not isinstance(value, Failure)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scorer:
    """Rows by column, their numbers, and how functions are called on them."""

    call: Call
    policy: Policy
    columns: Mapping[str, Sequence[Any]]
    numbers: Sequence[int]
    options: Mapping[str, Any]

    def scored(
        self, function: Callable[..., Any] | Dispatch, batched: bool
    ) -> tuple[list[float | Failure], int]:
        """A number or a failure for each row, and how many calls were repeated."""
        everything = list(range(len(self.numbers)))
        if not isinstance(function, Dispatch):
            return self._of(function, batched, everything, self.options)
        made: dict[int, float | Failure] = {}
        retried = 0
        for name, places in self._by_set(function).items():
            own = function.functions[name]
            options = {k: v for k, v in self.options.items() if k in wanted_names(own)}
            scores, again = self._of(own, name in function.batched, places, options)
            made |= dict(zip(places, scores, strict=True))
            retried += again
        return [made[place] for place in everything], retried

    def _by_set(self, dispatch: Dispatch) -> dict[str, list[int]]:
        """The rows of each data set, in the order of the functions; RewardError for another."""
        found: dict[str, list[int]] = {name: [] for name in dispatch.functions}
        for place, name in enumerate(self.columns[dispatch.column]):
            if name not in found:
                where = self.call.where
                raise RewardError(unknown_set(name, dispatch.functions, dispatch.column, where))
            found[name].append(place)
        return found

    def _of(
        self,
        function: Callable[..., Any],
        batched: bool,
        places: list[int],
        options: Mapping[str, Any],
    ) -> tuple[list[float | Failure], int]:
        wanted = wanted_names(function)
        used = {name: column for name, column in self.columns.items() if name in wanted}
        if batched and places:
            return self._whole(function, used, places, options)
        samples = [{name: column[place] for name, column in used.items()} for place in places]

        def failed(place: int, failure: Failure) -> None:
            advance(1, "failures")
            self._failed(function, places[place], samples[place], failure)

        keywords = [{**sample, **options} for sample in samples]
        judged = judge(function, keywords, bounds=self.policy.bounds, check=_counted, failed=failed)
        return judged.values, judged.retried

    def _whole(
        self,
        function: Callable[..., Any],
        columns: Mapping[str, Sequence[Any]],
        places: list[int],
        options: Mapping[str, Any],
    ) -> tuple[list[float | Failure], int]:
        """One call for all rows; a failure of the call is one of each row."""

        def listed(values: Any) -> list[Any]:
            try:
                found = list(values)
            except Exception as error:  # what is iterated may be a function of theirs
                raise ValueError(f"returned {value_text(values)}: {error_text(error)}") from None
            if len(found) != len(places):
                raise ValueError(f"{len(found)} rewards for {len(places)} samples")
            return found

        lists = {name: [column[place] for place in places] for name, column in columns.items()}
        judged = judge(
            function,
            [{**lists, **options}],
            bounds=self.policy.bounds,
            check=listed,
            failed=lambda _, failure: self._failed(function, None, {}, failure),
        )
        (values,) = judged.values
        if isinstance(values, Failure):
            return [values] * len(places), judged.retried
        made: list[float | Failure] = []
        for place, value in zip(places, values, strict=True):
            try:
                made.append(number(value))
            except ValueError as error:
                failure = Failure(cause="not a number", problem=str(error))
                sample = {name: column[place] for name, column in columns.items()}
                self._failed(function, place, sample, failure)
                made.append(failure)
        return made, judged.retried

    def _failed(
        self,
        function: Callable[..., Any],
        place: int | None,
        sample: Mapping[str, Any],
        failure: Failure,
    ) -> None:
        """Raise RewardError for a failure where the policy says so."""
        if self.policy.on_error == "error":
            index = None if place is None else self.numbers[place]
            raise _broken(self.call, function, index, sample, failure.problem) from failure.error


def _broken(
    call: Call,
    function: Callable[..., Any],
    index: int | None,
    sample: Mapping[str, Any],
    problem: str,
) -> RewardError:
    name = getattr(function, "__qualname__", repr(function))
    at = "" if index is None else f" on sample {index} of iteration {call.iteration}"
    values = [f"{key}: {value_text(value, SHOWN)}" for key, value in sample.items()]
    return RewardError(
        Finding(
            code="E640",
            what=f"reward {name}{at}: {problem}",
            where=call.where,
            got="\n".join(values),
            expected="one finite number per sample",
        )
    )
