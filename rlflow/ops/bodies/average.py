"""The body of `average`: a model's weights follow those of another."""

from __future__ import annotations

from rlflow.ops.bodies.common import model_of
from rlflow.ops.body import Call, Output


def average(call: Call) -> Output:
    """Take the source's weights into the average, in every n-th iteration with `every=n`."""
    if call.source is None:
        raise AssertionError(f"node {call.node} was called without the model it averages")
    if (call.iteration + 1) % call.params["every"] == 0:
        model_of(call).average(call.source, call.params["decay"])
    return Output()
