"""`@rf.op`: an operator made of a user's annotated function.

The parameters' names are the fields it reads, the annotations their types; the return
annotation says what it makes: `rf.Row[float]` makes one field named after the
function, a `TypedDict` makes one field per key. The function is not called here.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any, get_args

from rlflow.errors import Finding, GraphError, Source
from rlflow.graph.fields import Field, Granularity, is_optional, read_annotation
from rlflow.graph.op import DISPATCHES, Input, Op, Uneven, register
from rlflow.graph.trace import Handle, add_node, declared_at, short_path

USER_BODY = "rlflow.ops.bodies.user:call"


class UserOp:
    """A user's function as an op: calling it with handles declares a node."""

    def __init__(self, op: Op, options: tuple[str, ...]) -> None:
        self.op = op
        self._options = options

    def __call__(self, *handles: Handle, name: str | None = None, **params: Any) -> Handle:
        """Declare a node of this op; keywords are the function's keyword-only options."""
        unknown = sorted(set(params) - set(self._options))
        if unknown:
            raise TypeError(f"op {self.op.name!r} has no option {unknown[0]!r}")
        return add_node(self.op, handles, params=params, name=name)


def op(
    *, per: Granularity, dispatch: str = "", uneven: Uneven = "pad"
) -> Callable[[Callable[..., Any]], UserOp]:
    """Make an op of a function.

    `per="row"`: the function gets all rows at once and treats each by itself.
    `per="group"`: it is called once per group with the group's rows.
    `per="batch"`: it is called once with everything. Parameters before `*` are fields,
    keyword-only parameters are options. A parameter annotated `X | None` is optional.

    Where the op runs on several devices, `dispatch` says how rows reach them: `split` (groups
    whole, the default but for batch ops), `all`, `first` (the default of batch ops), `parts`
    (as they lie), or a name given to `rf.register_dispatch`. With `uneven="refuse"` a plan
    whose rows do not divide over the devices is refused.

    Raises GraphError where an annotation is missing or is not a field type, and for options
    that cannot be.
    """
    check_options(per, dispatch, uneven)

    def decorate(function: Callable[..., Any]) -> UserOp:
        where = _where(function)
        hints = _hints(function, where)
        inputs, options = [], []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                options.append(parameter.name)
            else:
                inputs.append(_input(function, parameter.name, hints, where))
        if per == "group" and "group" not in {wanted.name for wanted in inputs}:
            inputs.append(Input(name="group", dtype="int64", levels=("row",)))
        made = Op(
            name=function.__name__,
            body=USER_BODY,
            inputs=tuple(inputs),
            outputs=_outputs(function, hints, where),
            per=per,
            dispatch=dispatch,
            uneven=uneven,
            function=function,
        )
        return UserOp(register(made), tuple(options))

    return decorate


def check_options(per: object, dispatch: object, uneven: object) -> None:
    """Raise GraphError for options of an op that no op can have."""
    cuts = ("split", "parts")
    checks = (
        (per in get_args(Granularity), f"per={per!r}", "row, group or batch"),
        (
            isinstance(dispatch, str),
            f"dispatch={dispatch!r}",
            f"{', '.join(DISPATCHES)}, or a name given to rf.register_dispatch",
        ),
        (
            per != "batch" or dispatch not in cuts,
            f'per="batch" and dispatch={dispatch!r}',
            'all rows together: dispatch="first" or dispatch="all"',
        ),
        (uneven in get_args(Uneven), f"uneven={uneven!r}", "pad or refuse"),
    )
    findings = [
        Finding(code="E123", what=f"an op with {got}", where=declared_at(), expected=expected)
        for holds, got, expected in checks
        if not holds
    ]
    if findings:
        raise GraphError(*findings)


def _where(function: Callable[..., Any]) -> Source:
    code = function.__code__
    return Source(
        path=short_path(code.co_filename),
        line=code.co_firstlineno,
        text=f"def {function.__name__}(...)",
    )


def _hints(function: Callable[..., Any], where: Source) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except NameError as error:
        raise GraphError(
            Finding(
                code="E104",
                what=f"an annotation of op {function.__name__!r} cannot be read: {error}",
                where=where,
            )
        ) from None


def _input(
    function: Callable[..., Any], parameter: str, hints: dict[str, Any], where: Source
) -> Input:
    optional, annotation = is_optional(hints.get(parameter))
    read = read_annotation(annotation)
    if read is None:
        raise GraphError(_not_a_field(function, f"parameter {parameter!r}", parameter, where))
    dtype, level = read
    return Input(name=parameter, dtype=dtype, levels=(level,), required=not optional)


def _outputs(
    function: Callable[..., Any], hints: dict[str, Any], where: Source
) -> tuple[Field, ...]:
    returned = hints.get("return")
    if typing.is_typeddict(returned):
        named = typing.get_type_hints(returned)
    else:
        named = {function.__name__: returned}
    fields = []
    for name, annotation in named.items():
        read = read_annotation(annotation)
        if read is None or read[0] == "text":
            raise GraphError(_not_a_field(function, f"result {name!r}", "-> ", where))
        dtype, level = read
        mask = "response_mask" if level == "token" else None
        fields.append(Field(name=name, dtype=dtype, level=level, mask=mask))
    return tuple(fields)


def _not_a_field(function: Callable[..., Any], what: str, paste: str, where: Source) -> Finding:
    fix = "-> rf.Row[float]" if paste == "-> " else f"{paste}: rf.Row[float]"
    return Finding(
        code="E104",
        what=f"{what} of op {function.__name__!r} has no field type",
        where=where,
        expected="rf.Token or rf.Row of int, float or bool (a parameter: or str)",
        fix=fix,
    )
