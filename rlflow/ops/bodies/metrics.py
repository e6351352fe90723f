"""Bodies that only count: numbers of fields, of a user's function, and of samples of a prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.batch import flat, is_ragged, strings
from rlflow.contract.values import Stat
from rlflow.errors import Finding, RunError, error_text
from rlflow.graph.callables import name_of
from rlflow.ops.bodies.common import inputs_of
from rlflow.ops.bodies.reward import python_rows
from rlflow.ops.bodies.stats import max_of, mean_of, min_of
from rlflow.ops.body import Call, Output
from rlflow.ops.evaluating.passing import DRAWS, HIGH, LEVEL, LOW, PassRule
from rlflow.ops.math.passing import bootstrap_interval, majority_at, pass_at


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
                what=f"metrics {name_of(function)}: {error_text(error)}",
                where=call.where,
                expected="a dict of names and numbers",
            )
        ) from error


def pass_rates(call: Call) -> Output:
    """Mean reward, pass@k and maj@k over prompts, with the ends of their bootstrap intervals.

    Rows of a group are samples of one prompt. Raises RunError E363 where the function that reads
    answers raises, or makes something else than text.
    """
    inputs, ks = inputs_of(call), call.params["ks"]
    ids, prompt = torch.unique(inputs["group"], return_inverse=True)
    n = len(prompt) // len(ids)
    by_prompt = torch.argsort(prompt, stable=True).reshape(len(ids), n)
    reward = inputs["reward"].double()[by_prompt]
    rule: PassRule = call.params["rule"]
    right = reward >= rule.bound if rule.sign == ">=" else reward > rule.bound
    passed = torch.stack([pass_at(n, right.sum(1), k) for k in ks], 1)
    found = torch.cat(
        [reward.mean(1, keepdim=True), passed, _majorities(call, by_prompt, right)], 1
    )
    names = ["mean", *(f"{of}@{k}" for of in ("pass", "maj") for k in ks)]
    low, high = bootstrap_interval(found, draws=DRAWS, level=LEVEL, seed=call.seed)
    metrics = {}
    for column, name in enumerate(names):
        metrics[name] = found[:, column].mean().item()
        metrics[name + LOW] = low[column].item()
        metrics[name + HIGH] = high[column].item()
    return Output(metrics={"prompts": float(len(ids)), "samples": float(n), **metrics})


def _majorities(call: Call, by_prompt: Tensor, right: Tensor) -> Tensor:
    """maj@k of every prompt, `[prompts, ks]`."""
    responses = strings(inputs_of(call)["response"])
    answers = [_answer(call, response) for response in responses]
    rows = zip(by_prompt.tolist(), right.tolist(), strict=True)
    ks = call.params["ks"]
    return torch.stack([majority_at([answers[i] for i in own], good, ks) for own, good in rows])


def _answer(call: Call, response: str) -> str | None:
    """What a response votes for."""
    read = call.params["answer"]
    try:
        found = read(response)
        if found is None or isinstance(found, str):
            return found
        problem = f"it returned {type(found).__name__}"
    except Exception as error:
        problem = error_text(error)
    raise RunError(
        Finding(
            code="E363",
            what=f"--answer {read.__name__} does not make a text: {problem}",
            where=call.where,
            got=f"the response {response!r:.120}",
            expected="a text, or None for a response without an answer",
        )
    )
