"""Bodies that run a user's Python function on rows: rewards, and metrics.

An exception, a wrong length or a number that is not finite is an error that names the
sample; it never becomes a reward.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.batch import is_ragged, split_rows, strings
from rlflow.errors import Finding, RewardError
from rlflow.ops.bodies.common import inputs_of, row_numbers
from rlflow.ops.bodies.stats import max_of, mean_of, min_of, std_of
from rlflow.ops.body import Call, Output

SHOWN = 160


def reward(call: Call) -> Output:
    """One float32 reward a row."""
    inputs = inputs_of(call)
    options = {key: v for key, v in call.params.items() if key not in ("function", "batched")}
    columns = {name: rows_of(inputs[name]) for name in inputs.keys()}  # noqa: SIM118  rows otherwise
    function = call.params["function"]
    numbers = row_numbers(call).tolist()
    scores = score(call, function, columns, numbers, call.params["batched"], options)
    rewards = torch.tensor(scores, dtype=torch.float32)
    metrics = {
        "mean": mean_of(rewards),
        "std": std_of(rewards),
        "min": min_of(rewards),
        "max": max_of(rewards),
    }
    return Output(fields={"reward": rewards}, rows=len(scores), metrics=metrics)


def rows_of(field: Tensor) -> list[Any]:
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
    options: Mapping[str, Any] | None = None,
) -> list[float]:
    """Run a reward function over rows; it is not called where there are none.

    `numbers` are the row numbers. Raises RewardError with the sample that broke it.
    """
    wanted = inspect.signature(function).parameters
    used = {name: column for name, column in columns.items() if name in wanted}
    extra = dict(options or {})
    if batched and numbers:
        return _whole(call, function, used, numbers, extra)
    results = []
    for place, index in enumerate(numbers):
        sample = {name: column[place] for name, column in used.items()}
        try:
            value = function(**sample, **extra)
        except Exception as error:
            raise _broken(
                call, function, index, sample, f"{type(error).__name__}: {error}"
            ) from error
        results.append(_number(call, function, index, sample, value))
    return results


def _whole(
    call: Call,
    function: Callable[..., Any],
    columns: Mapping[str, Sequence[Any]],
    numbers: Sequence[int],
    extra: Mapping[str, Any],
) -> list[float]:
    try:
        values = list(function(**{name: list(c) for name, c in columns.items()}, **extra))
    except Exception as error:
        raise _broken(call, function, None, {}, f"{type(error).__name__}: {error}") from error
    if len(values) != len(numbers):
        problem = f"{len(values)} rewards for {len(numbers)} samples"
        raise _broken(call, function, None, {}, problem)
    return [
        _number(call, function, index, {n: c[place] for n, c in columns.items()}, value)
        for place, (index, value) in enumerate(zip(numbers, values, strict=True))
    ]


def _number(
    call: Call, function: Callable[..., Any], index: int, sample: Mapping[str, Any], value: Any
) -> float:
    """A reward as a float; text, None and numbers that are not finite are refused."""
    if isinstance(value, str | bytes) or value is None:
        raise _broken(call, function, index, sample, f"returned {value!r:.40}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _broken(call, function, index, sample, f"returned {value!r:.40}: {error}") from None
    if not math.isfinite(number):
        raise _broken(call, function, index, sample, f"returned {number}")
    return number


def _broken(
    call: Call,
    function: Callable[..., Any],
    index: int | None,
    sample: Mapping[str, Any],
    problem: str,
) -> RewardError:
    name = getattr(function, "__qualname__", repr(function))
    at = "" if index is None else f" on sample {index} of iteration {call.iteration}"
    shown = [f"{key}: {value!r:.{SHOWN}}" for key, value in sample.items()]
    return RewardError(
        Finding(
            code="E640",
            what=f"reward {name}{at}: {problem}",
            where=call.where,
            got="\n".join(shown),
            expected="one finite number per sample",
        )
    )
