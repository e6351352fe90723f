"""`@rf.op`: an operator made of a user's annotated function.

The parameters' names are the fields it reads, the annotations their types; the return
annotation says what it makes: `rf.Row[float]` makes one field named after the
function, a `TypedDict` makes one field per key. The function is not called here.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from rlflow.errors import Finding, GraphError, Source
from rlflow.graph.callables import code_of, hints_of, name_of, parameters_of
from rlflow.graph.fields import TEXTS, Field, Granularity, is_optional, read_annotation
from rlflow.graph.model import Model
from rlflow.graph.op import DISPATCHES, Input, Op, Uneven, Use, register
from rlflow.graph.roles import AdaptersOff, Role, SamplingOptions, Sharing
from rlflow.graph.source import declared_at, short_path
from rlflow.graph.trace import Handle, add_node, numbered_name, report_finding
from rlflow.graph.user.iterations import schedule
from rlflow.graph.user.models import USES
from rlflow.strict import problem

DRAWN = ("max_new_tokens", "temperature", "top_p", "top_k")
"""The options of an op that say how its model samples."""
DUE = ("every", "when")
"""What every op of a user's takes besides its own options."""
BEGINS = "state_begins"
USER_BODY = "rlflow.ops.bodies.user.call:call"


class UserOp:
    """A user's function as an op: calling it with handles declares a node."""

    def __init__(
        self,
        op: Op,
        options: tuple[str, ...],
        drawn: Mapping[str, Any],
        state: Mapping[str, float] | None = None,
    ) -> None:
        self.op = op
        self._options = options
        self._drawn = drawn
        self._state = state

    def __call__(self, *given: Model | Handle, name: str | None = None, **params: Any) -> Handle:
        """Declare a node of this op; keywords are the function's keyword-only options.

        An op that uses a model is given it first. `every=` and `when=` say in which iterations it
        runs, unless they are options of its own.
        """
        model, handles = self._model(given)
        due = {key: params.pop(key) for key in DUE if key in params and key not in self._options}
        unknown = sorted(set(params) - set(self._options))
        if unknown:
            raise TypeError(f"op {self.op.name!r} has no option {unknown[0]!r}")
        every, within, findings = schedule("an op", due.get("every", 1), due.get("when"))
        for finding in findings:
            report_finding(finding)
        if self._state is not None:
            name = name or numbered_name(self.op.name)
            params |= {"state": name, BEGINS: tuple(sorted(self._state.items()))}
        when: dict[str, Any] = {"every": every, "within": within}
        when["model"] = model
        params = {**self._drawn, **params}
        return add_node(self.op, handles, params=params, name=name, **when)

    def _model(self, given: tuple[Any, ...]) -> tuple[Model | None, tuple[Any, ...]]:
        """The model that is given where the op uses one, and the handles."""
        if self.op.use is None:
            return None, given
        if given and isinstance(given[0], Model):
            return given[0], given[1:]
        raise GraphError(
            Finding(
                code="E165",
                what=f"op {self.op.name!r} uses a model, and was given none",
                where=declared_at(),
                fix=f"{self.op.name}(model, samples)",
            )
        )


def op(
    *,
    per: Granularity,
    dispatch: str = "",
    uneven: Uneven = "pad",
    effect: bool = False,
    state: Mapping[str, float] | None = None,
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

    A function that returns None, `-> None`, acts for its effect alone: it writes a file, say. With
    `effect=True` one that makes fields has an effect too. Such an op is never left out, merged or
    cut, and runs in one process, once an iteration and iteration after iteration, unless
    `dispatch` says otherwise. A resumed run does again what came after its checkpoint. Whatever
    the op, a keyword-only parameter `iteration` is given the iteration's number.

    With a first parameter annotated `rf.Scorer` or `rf.Sampler` the op uses a model, which it is
    given first: `mine(model, samples)`. It is `per="row"`, placed where that use of the model
    is, and called by every rank there, also without a row, so how often it asks may not depend on
    rows.

    An op that learns from call to call says `state={"mean": 0.0}`: numbers with what they are
    at first, which the function reads and changes in its keyword-only parameter `state`, a dict.
    They are part of every checkpoint. It takes `per="batch"` and one device, so that there is
    one state.

    Raises GraphError where an annotation is missing or is not a field type, and for options
    that cannot be.
    """
    check_options(per, dispatch, uneven, effect)
    check_state(state, per, dispatch)

    def decorate(function: Callable[..., Any]) -> UserOp:
        return _user_op(function, per, dispatch, uneven, effect, state)

    return decorate


def _user_op(
    function: Callable[..., Any],
    per: Granularity,
    dispatch: str,
    uneven: Uneven,
    effect: bool,
    state: Mapping[str, float] | None,
) -> UserOp:
    """The op that a function's signature and these options make of it."""
    where = _where(function)
    hints = _hints(function, where)
    inputs, options = [], []
    parameters = tuple(parameters_of(function))
    use = _use(parameters, hints)
    for parameter in parameters[1:] if use else parameters:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            if state is None or parameter.name != "state":
                options.append(parameter.name)
        else:
            inputs.append(_input(function, parameter.name, hints, where))
    if per == "group" and "group" not in {wanted.name for wanted in inputs}:
        inputs.append(Input(name="group", dtype="int64", levels=("row",)))
    nothing = hints.get("return") is type(None)
    acts = effect or nothing or state is not None
    if use is not None:
        _require_usable(use, name_of(function), where, per, acts, tuple(options))
    drawn = {p.name: p.default for p in parameters if p.name in DRAWN and use == "rollout"}
    drawn = {key: value for key, value in drawn.items() if value is not inspect.Parameter.empty}
    made = Op(
        name=name_of(function),
        body=USER_BODY,
        inputs=tuple(inputs),
        outputs=() if nothing else _outputs(function, hints, where),
        per=per,
        rows="none" if nothing else "same",
        effect="effectful" if acts else "pure",
        dispatch=dispatch or ("first" if acts else ""),
        uneven=uneven,
        use=use,
        collective=use == "rollout",
        roles=_roles(use, state),
        function=function,
    )
    return UserOp(register(made), tuple(options), drawn, state)


def _roles(use: Use | None, state: Mapping[str, float] | None) -> tuple[type[Role], ...]:
    """What options of a function may say that a node of it is; the others are its own words."""
    found: tuple[type[Role], ...] = (Sharing,) if state is not None else ()
    found += (SamplingOptions,) if use == "rollout" else ()
    return found + ((AdaptersOff,) if use == "forward" else ())


def _use(parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]) -> Use | None:
    """How an op uses the model that its first parameter stands for, if it does."""
    return USES.get(hints.get(parameters[0].name)) if parameters else None


def _require_usable(
    use: Use, name: str, where: Source, per: str, acts: bool, options: tuple[str, ...]
) -> None:
    """Raise GraphError for an op with a model that no plan could place."""
    checks = (
        (per == "row", f'per="{per}"', 'per="row": every rank of the model has some of the rows'),
        (not acts, "an effect", "fields; an op that reads them may act"),
        (
            use != "rollout" or "max_new_tokens" in options,
            "no option max_new_tokens",
            "*, max_new_tokens: int, which a plan counts with",
        ),
    )
    findings = [
        Finding(
            code="E165", what=f"op {name!r} uses a model and has {got}", where=where, expected=e
        )
        for holds, got, e in checks
        if not holds
    ]
    if findings:
        raise GraphError(*findings)


def check_options(per: object, dispatch: object, uneven: object, effect: object) -> None:
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
        (isinstance(effect, bool), f"effect={effect!r}", "True or False"),
    )
    findings = [
        Finding(code="E123", what=f"an op with {got}", where=declared_at(), expected=expected)
        for holds, got, expected in checks
        if not holds
    ]
    if findings:
        raise GraphError(*findings)


def check_state(state: object, per: object, dispatch: object) -> None:
    """Raise GraphError for a state that is not numbers, or that several devices would keep."""
    if state is None:
        return
    numbers = isinstance(state, Mapping) and all(
        isinstance(name, str) and not problem(value, ("float",)) for name, value in state.items()
    )
    got = "" if numbers and state else f"state={state!r}"
    if not got and (per != "batch" or dispatch not in ("", "first")):
        got = f"state= and per={per!r}" + (f", dispatch={dispatch!r}" if dispatch else "")
    if got:
        raise GraphError(
            Finding(
                code="E656",
                what=f"an op with {got}",
                where=declared_at(),
                expected="finite numbers by name, of an op that has all rows on one device",
                fix='@rf.op(per="batch", state={"mean": 0.0})',
            )
        )


def _where(function: Callable[..., Any]) -> Source:
    code = code_of(function)
    if code is None:
        return declared_at() or Source(path="?", line=0, text=name_of(function))
    return Source(
        path=short_path(code.co_filename),
        line=code.co_firstlineno,
        text=f"def {name_of(function)}(...)",
    )


def _hints(function: Callable[..., Any], where: Source) -> dict[str, Any]:
    try:
        return hints_of(function)
    except NameError as error:
        raise GraphError(
            Finding(
                code="E104",
                what=f"an annotation of op {name_of(function)!r} cannot be read: {error}",
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
    return Input(
        name=parameter,
        dtype=dtype,
        levels=(level,),
        required=not optional,
        as_list=annotation == TEXTS,
    )


def _outputs(
    function: Callable[..., Any], hints: dict[str, Any], where: Source
) -> tuple[Field, ...]:
    returned = hints.get("return")
    if typing.is_typeddict(returned):
        named = typing.get_type_hints(returned)
    else:
        named = {name_of(function): returned}
    fields = []
    for name, annotation in named.items():
        read = read_annotation(annotation)
        if read is None or (read[0] == "text" and annotation != TEXTS):
            raise GraphError(_not_a_field(function, f"result {name!r}", "-> ", where))
        dtype, level = read
        mask = "response_mask" if level == "token" else None
        fields.append(Field(name=name, dtype=dtype, level=level, mask=mask))
    return tuple(fields)


def _not_a_field(function: Callable[..., Any], what: str, paste: str, where: Source) -> Finding:
    fix = "-> rf.Row[float]" if paste == "-> " else f"{paste}: rf.Row[float]"
    return Finding(
        code="E104",
        what=f"{what} of op {name_of(function)!r} has no field type",
        where=where,
        expected="rf.Token or rf.Row of int, float or bool; list[str] for one text a row; "
        "-> None for no result",
        fix=fix,
    )
