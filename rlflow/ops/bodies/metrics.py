"""The body of `metrics`: numbers of fields, or of a user's function."""

from __future__ import annotations

from rlflow.batch import flat, is_ragged
from rlflow.contract.values import Stat
from rlflow.errors import Finding, RunError
from rlflow.ops.bodies.common import inputs_of
from rlflow.ops.bodies.reward import python_rows
from rlflow.ops.bodies.stats import max_of, mean_of, min_of
from rlflow.ops.body import Call, Output


def metrics(call: Call) -> Output:
    """The function's dict of numbers, or mean, min and max of every field.

    Raises RunError where the function raises or returns something else.
    """
    inputs = inputs_of(call)
    function = call.op.function
    if function is None:
        found: dict[str, Stat] = {}
        for name in inputs.keys():  # noqa: SIM118  a TensorDict iterates over rows
            field = inputs[name]
            values = flat(field) if is_ragged(field) else field
            if values.numel():
                found[f"{name}_mean"] = mean_of(values)
                found[f"{name}_min"] = min_of(values)
                found[f"{name}_max"] = max_of(values)
        return Output(metrics=found)
    columns = {name: python_rows(inputs[name]) for name in inputs.keys()}  # noqa: SIM118  as above
    try:
        made = function(**columns)
        return Output(metrics={str(key): float(value) for key, value in made.items()})
    except Exception as error:
        raise RunError(
            Finding(
                code="E641",
                what=f"metrics {function.__name__}: {type(error).__name__}: {error}",
                where=call.where,
                expected="a dict of names and numbers",
            )
        ) from error
