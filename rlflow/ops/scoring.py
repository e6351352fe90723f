"""`ops.reward`: which functions score which rows, how they are called, and what a failure does.

Contracts only; the bodies are in `rlflow.ops.bodies.reward`. Nothing here imports torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from rlflow.data import Mix
from rlflow.errors import Finding, Source, near_names
from rlflow.graph.fields import row
from rlflow.graph.op import Input, Op, register
from rlflow.graph.roles import Calling, Drawn
from rlflow.graph.source import declared_at
from rlflow.graph.trace import Handle, add_node, declared_node, report_finding
from rlflow.ops.declare import plain_inputs
from rlflow.rewards.bounds import PLAIN, Bounds, is_async

OnError = Literal["error", "drop_sample", "drop_group"]
Functions = Callable[..., Any] | Mapping[str, Callable[..., Any]]

MAX_FAILURES = 0.1
SHOWN = ("prompt", "response")

REWARD = register(
    Op(
        name="reward",
        body="rlflow.ops.bodies.reward:reward",
        roles=(Calling,),
        inputs=(),
        outputs=(row("reward"),),
        per="row",
    )
)
FAILURES = Op(
    name="reward_failures",
    body="rlflow.ops.bodies.reward:failures",
    inputs=(
        Input(name="valid", dtype="bool", levels=("row",)),
        Input(name="failure", dtype="text", levels=("row",)),
        *(Input(name=name, dtype="text", levels=("row",), required=False) for name in SHOWN),
        Input(name="sample", dtype="int64", levels=("row",), required=False),
        Input(name="group", dtype="int64", levels=("row",), required=False),
    ),
    outputs=(),
    per="batch",
    rows="none",
    effect="effectful",
)
GROUP = Input(name="group", dtype="int64", levels=("row",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a reward's functions are called and what a sample without a reward does.

    `max_failures` is the share of an iteration's samples above which the run stops.
    """

    bounds: Bounds = PLAIN
    on_error: OnError = "error"
    max_failures: float = 0.0

    def describe(self) -> str:
        """What differs from calling in order and stopping at the first failure."""
        limits = {name: getattr(self.bounds, name) for name in Bounds.__slots__}
        said = [f"{k}={v}" for k, v in limits.items() if v != getattr(PLAIN, k)]
        if self.on_error != "error":
            said += [f"on_error={self.on_error}", f"max_failures={self.max_failures:g}"]
        return f"({', '.join(said)})"


STRICT = Policy()


class Dispatch:
    """A reward function for each value of a column; `batched` names those called with lists."""

    def __init__(
        self, functions: Mapping[str, Callable[..., Any]], column: str, batched: frozenset[str]
    ) -> None:
        called = (f"{key}={_name(function)}" for key, function in functions.items())
        self.functions = dict(functions)
        self.column = column
        self.batched = batched
        self.__name__ = f"{{{', '.join(functions)}}}"
        self.__qualname__ = f"{{{', '.join(called)}}} by {column}"

    def describe(self) -> str:
        """The data sets with their functions."""
        return self.__qualname__


def reward(
    function: Functions,
    *handles: Handle,
    by: str = "data_source",
    on_error: OnError = "error",
    max_failures: float | None = None,
    concurrency: int | None = None,
    timeout: float | None = None,
    retries: int = 0,
    backoff: float = 1.0,
    name: str | None = None,
    **options: Any,
) -> Handle:
    """Score rows with any Python function; its parameters are the fields it reads.

    Annotated with plain types (`response: str, answer: str`) it is called per sample
    and returns a number; annotated with lists (`list[str]`, one entry a row) it is
    called per batch and returns one number a row. A mapping of functions is one for each
    value of the column `by`. An `async def` is awaited for `concurrency` samples at a time,
    16 unless given; a plain function with a `timeout` runs in as many processes, which are
    killed after it. A call that fails is repeated up to `retries` times, after `backoff`
    seconds and then twice as long each time.

    An exception, a timeout, a wrong length or a number that is not finite never becomes a
    reward. It stops the run with the sample; with `on_error="drop_sample"` or "drop_group"
    the sample, or all samples of its prompt, take no part in the iteration instead, and the
    run stops where more than the share `max_failures` (0.1) of the samples have failed.
    """
    policy = Policy(
        bounds=Bounds(concurrency=concurrency, timeout=timeout, retries=retries, backoff=backoff),
        on_error=on_error,
        max_failures=_most(on_error, max_failures),
    )
    chosen, inputs, batched = as_function(function, handles, by, options)
    for finding in _wrong(policy, chosen, max_failures):
        report_finding(finding)
    params = {"function": chosen, "batched": batched, **options}
    op = replace(REWARD, inputs=inputs, function=chosen)
    if policy == STRICT:
        return add_node(op, handles, params=params, name=name)
    params["policy"] = policy
    if on_error == "error":
        return add_node(op, handles, params=params, name=name)
    grouped = on_error == "drop_group"
    if grouped:
        op = replace(op, per="group", inputs=(*(i for i in inputs if i.name != "group"), GROUP))
    made = (*op.outputs, row("valid", "bool"), row("failure", "text"))
    scored = add_node(replace(op, outputs=made), handles, params=params, name=name)
    shown = [h.only(*_shown(h)) for h in handles if isinstance(h, Handle) and _shown(h)]
    watch = {"reward": scored.node, "max_failures": policy.max_failures}
    add_node(FAILURES, (*shown, scored), params=watch, name=f"{scored.node}_failures")
    return scored.only("reward", "valid")


def as_function(
    function: Functions, handles: tuple[Any, ...], by: str, options: Mapping[str, Any]
) -> tuple[Any, tuple[Input, ...], bool]:
    """What scores, the fields it reads, and whether it takes whole batches.

    `options` are keywords that are no fields. Of a mapping a field is read if any of its
    functions reads it; findings are reported.
    """
    if not isinstance(function, Mapping):
        inputs, batched = plain_inputs(function, skip=tuple(options))
        return function, inputs, batched
    read: dict[str, Input] = {}
    lists = set()
    for key, each in function.items():
        inputs, batched = plain_inputs(each, skip=tuple(options))
        lists |= {key} if batched else set()
        for wanted in inputs:
            known = read.setdefault(wanted.name, wanted)
            if (known.dtype, known.levels) != (wanted.dtype, wanted.levels):
                report_finding(_two_types(wanted.name, known, wanted))
            read[wanted.name] = replace(known, required=known.required or wanted.required)
    column = Input(
        name=by,
        dtype="text",
        levels=("row",),
        hint='rf.data.mix(...), or by="a column that says which function"',
    )
    for finding in _unknown_sets(function, handles, by):
        report_finding(finding)
    dispatch = Dispatch(function, by, frozenset(lists))
    return dispatch, (*read.values(), *(() if by in read else (column,))), False


def unknown_set(name: str, known: Mapping[str, Any], column: str, where: Source | None) -> Finding:
    """The finding for a value of the column that has no reward function."""
    near = near_names(name, known)
    return Finding(
        code="E281",
        what=f"no reward function for {column} {name!r}",
        where=where,
        got=f"functions for {', '.join(known) or 'nothing'}",
        expected="one for every data set",
        near=near,
        fix=f'{{"{name}": ...}}',
    )


def _unknown_sets(functions: Mapping[str, Any], handles: tuple[Any, ...], by: str) -> list[Finding]:
    """Data sets of a mix that no function scores, as far as the declarations tell."""
    for handle in handles:
        offers = handle.offers if isinstance(handle, Handle) else ()
        for source in [offer.source for offer in offers if offer.name == by]:
            data = _source_of(source, by)
            if isinstance(data, Mix) and by == data.column:
                names = [name for name in data.names if name not in functions]
                return [unknown_set(name, functions, by, declared_at()) for name in names]
    return []


def _source_of(node: str, column: str) -> Any:
    """The data source of the node that first made a column."""
    found = declared_node(node)
    while (drawn := found.role(Drawn)) is None:
        above = [bound.source for bound in found.inputs if bound.name == column]
        if not above:
            return None
        found = declared_node(above[0])
    return drawn.data


def _two_types(name: str, one: Input, other: Input) -> Finding:
    return Finding(
        code="E104",
        what=f"two reward functions read {name!r} as different types",
        where=declared_at(),
        got=f"{one} and {other}",
        expected="one type of each field in all functions",
    )


def _most(on_error: str, given: float | None) -> float:
    if given is not None:
        return given
    return 0.0 if on_error == "error" else MAX_FAILURES


def _shown(handle: Handle) -> list[str]:
    wanted = (*SHOWN, "sample", "group")
    return [offer.name for offer in handle.offers if offer.name in wanted]


def _wrong(policy: Policy, function: Any, max_failures: float | None) -> list[Finding]:
    """Options out of range, and those that would do nothing."""
    bounds = policy.bounds
    several = list(function.functions.values()) if isinstance(function, Dispatch) else [function]
    at_a_time = bounds.timeout is not None or any(is_async(each) for each in several)
    share, drops = policy.max_failures, policy.on_error != "error"
    rules = (
        (bounds.timeout is None or bounds.timeout > 0, "timeout", "timeout > 0, in seconds"),
        (bounds.concurrency is None or bounds.concurrency >= 1, "concurrency", "concurrency >= 1"),
        (bounds.concurrency is None or at_a_time, "concurrency", "an async def, or a timeout"),
        (bounds.retries >= 0, "retries", "retries >= 0"),
        (bounds.backoff >= 0, "backoff", "backoff >= 0, in seconds"),
        (bounds.backoff == PLAIN.backoff or bounds.retries > 0, "backoff", "retries >= 1 with it"),
        (0 <= share < 1, "max_failures", "0 <= max_failures < 1, a share of the samples"),
        (max_failures is None or drops, "max_failures", 'on_error="drop_sample" or "drop_group"'),
    )
    values = {name: getattr(bounds, name) for name in Bounds.__slots__} | {"max_failures": share}
    found = [
        Finding(
            code="E280",
            what=f"a reward with {option}={values[option]}",
            where=declared_at(),
            expected=expected,
        )
        for holds, option, expected in rules
        if not holds
    ]
    if policy.on_error not in get_args(OnError):
        near = near_names(str(policy.on_error), get_args(OnError))
        found.append(
            Finding(
                code="E280",
                what=f"a reward with on_error={policy.on_error!r}",
                where=declared_at(),
                expected=", ".join(map(repr, get_args(OnError))),
                near=near,
                fix=f'on_error="{(near or get_args(OnError))[0]}"',
            )
        )
    return found


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def wanted_names(function: Callable[..., Any]) -> frozenset[str]:
    """The names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters)
