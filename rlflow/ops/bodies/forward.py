"""Bodies that score tokens with a model: log-probs and values, without gradient."""

from __future__ import annotations

from rlflow.batch import Batch, ragged_like
from rlflow.ops.bodies.common import inputs_of, model_of, num_rows
from rlflow.ops.bodies.stats import mean_of
from rlflow.ops.body import Call, ModelInUse, Output


def log_probs(call: Call) -> Output:
    """Log-probs of the response tokens, under the name that the node gives the field.

    Of one forward, where there are several fields with a temperature each, or others beside.
    """
    inputs, temperature = inputs_of(call), call.params["temperature"]
    if isinstance(temperature, tuple):
        return _at_temperatures(call, inputs, temperature)
    if len(call.outputs) > 1:
        return _with_others(call, inputs, float(temperature))
    return _scored(call, "log_probs", float(temperature))


def values(call: Call) -> Output:
    """The value of the state before each response token."""
    return _scored(call, "values", 1.0)


def _scored(call: Call, output: str, temperature: float) -> Output:
    inputs = inputs_of(call)
    made = _model(call).forward(inputs, outputs=(output,), temperature=temperature)[output]
    field = ragged_like(made, inputs["response_tokens"])
    return Output(
        fields={call.outputs[0]: field},
        rows=num_rows(inputs),
        metrics={"mean": mean_of(made)},
    )


def _with_others(call: Call, inputs: Batch, temperature: float) -> Output:
    """Log-probs and, of the same forward, what else the node makes and somebody reads."""
    own, *others = call.outputs
    wanted = {own: "log_probs", **{name: name for name in others if name in call.wanted}}
    made = _model(call).forward(
        inputs,
        outputs=tuple(wanted.values()),
        temperature=temperature,
        top_k=call.params.get("top_k", 0),
    )
    of = {"prompt_experts": "prompt_tokens"}
    return Output(
        fields={
            field: ragged_like(made[name], inputs[of.get(name, "response_tokens")])
            for field, name in wanted.items()
        },
        rows=num_rows(inputs),
        metrics={"mean": mean_of(made["log_probs"])},
    )


def _at_temperatures(call: Call, inputs: Batch, temperatures: tuple[float, ...]) -> Output:
    """The log-probs of every field; the mean of the first is logged as that of one would be."""
    distinct = tuple(dict.fromkeys(temperatures))
    made = _model(call).forward(inputs, outputs=("log_probs",), temperature=distinct)["log_probs"]
    fields, metrics = {}, {}
    for number, (name, temperature) in enumerate(zip(call.outputs, temperatures, strict=True)):
        values = made[:, distinct.index(temperature)].contiguous()
        fields[name] = ragged_like(values, inputs["response_tokens"])
        metrics[f"{name}_mean" if number else "mean"] = mean_of(values)
    return Output(fields=fields, rows=num_rows(inputs), metrics=metrics)


def _model(call: Call) -> ModelInUse:
    model = model_of(call)
    return model.base if ("adapters", "off") in call.params.items() else model
