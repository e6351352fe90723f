"""Bodies that score tokens with a model: log-probs and values, without gradient."""

from __future__ import annotations

from rlflow.batch import ragged_like
from rlflow.ops.bodies.common import inputs_of, model_of, num_rows
from rlflow.ops.bodies.stats import mean_of
from rlflow.ops.body import Call, Output


def log_probs(call: Call) -> Output:
    """Log-probs of the response tokens, under the name that the node gives the field."""
    return _scored(call, "log_probs", float(call.params["temperature"]))


def values(call: Call) -> Output:
    """The value of the state before each response token."""
    return _scored(call, "values", 1.0)


def _scored(call: Call, output: str, temperature: float) -> Output:
    inputs = inputs_of(call)
    made = model_of(call).forward(inputs, outputs=(output,), temperature=temperature)[output]
    field = ragged_like(made, inputs["response_tokens"])
    return Output(
        fields={call.outputs[0]: field},
        rows=num_rows(inputs),
        metrics={"mean": mean_of(made)},
    )
