"""`@rf.loss`: a loss made of a user's annotated function of tensors.

The parameters' names are the fields it reads, the annotations their types; what the training
forward makes (`log_probs`, `entropy`, `values`) carries a gradient. It returns the loss of every
token or of every row; rlflow averages that over the whole optimizer step. No torch here.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, overload

from pydantic import ConfigDict, Field, SkipValidation, TypeAdapter, ValidationError

from rlflow.errors import Finding, GraphError, Source, known_names, near_names
from rlflow.graph.fields import Field as Typed
from rlflow.graph.fields import is_optional, read_annotation
from rlflow.graph.op import Input, param_text
from rlflow.graph.pipeline import validation_findings
from rlflow.graph.source import declared_at, short_path
from rlflow.ops.losses.base import Aggregation, Count, Loss

FORWARD = ("log_probs", "entropy", "values")
"""What a training forward makes, with gradient; the last of a model with a value head."""
LOSS = "loss"
MASK = "response_mask"
HINTS = {
    "old_log_probs": "old_log_probs = ops.log_probs(actor, samples)",
    "ref_log_probs": "ref_log_probs = ops.log_probs(ref, samples)",
    "advantages": 'adv = ops.advantage("grpo", samples, reward)',
}
KEYWORD = inspect.Parameter.KEYWORD_ONLY
SIGNATURE = (
    "parameters annotated rf.Token[...] or rf.Row[...] of float, int or bool, options after *, "
    "-> rf.Token[float] (one loss a token), rf.Row[float] (one a row), or a TypedDict of such"
)


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What a function of a user's says of itself.

    `forward` are the outputs of the training forward that it reads, `inputs` the fields of the
    batch; `made` is the field `loss` and those of its metrics; `options` has the type of each.
    """

    name: str
    where: Source
    parameters: tuple[str, ...]
    levels: Mapping[str, str]
    forward: tuple[str, ...]
    inputs: tuple[Input, ...]
    made: tuple[Typed, ...]
    options: Mapping[str, Any]
    defaults: Mapping[str, Any]

    @property
    def per(self) -> str:
        """Whether it makes one loss a `token` or one a `row`."""
        return next(made.level for made in self.made if made.name == LOSS)


class FunctionLoss(Loss):
    """A loss of a user's own, as `@rf.loss` makes it: called with options it is one with those."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    body: ClassVar[str] = "rlflow.ops.bodies.steps.userloss:objective"

    function: SkipValidation[Callable[..., Any]] = Field(exclude=True)
    signature: SkipValidation[Signature] = Field(exclude=True)
    options: tuple[tuple[str, Any], ...] = ()
    corrected: bool = False

    def __call__(self, **options: Any) -> FunctionLoss:
        """The same loss with options: the function's own, `aggregate` and `constant`.

        Raises GraphError for one that it has not, or of another type.
        """
        averaging = {key: options.pop(key) for key in ("aggregate", "constant") if key in options}
        found = [self._refused(key, value) for key, value in options.items()]
        findings = [finding for finding in found if finding is not None]
        if findings:
            raise GraphError(*findings)
        own = {key: getattr(self, key) for key in self.model_fields_set} | averaging
        return _made({**own, "options": tuple((dict(self.options) | options).items())})

    def _refused(self, key: str, value: Any) -> Finding | None:
        """Why an option is none of this loss."""
        known = self.signature.options
        what = f"loss {self.signature.name!r} with {key}={value!r}"
        if key not in known:
            names = [*known, "aggregate", "constant"]
            return Finding(
                code="E162",
                what=f"{what}, which is no option of it",
                where=declared_at(),
                expected=known_names(names),
                near=near_names(key, names),
            )
        try:
            TypeAdapter(known[key]).validate_python(value, strict=True)
        except ValidationError as error:
            wanted = getattr(known[key], "__name__", str(known[key]))
            got = error.errors()[0]["msg"]
            return Finding(code="E162", what=what, where=declared_at(), got=got, expected=wanted)
        return None

    def missing(self) -> list[Finding]:
        """A finding for every option that has no value."""
        given = dict(self.signature.defaults) | dict(self.options)
        return [
            Finding(
                code="E162",
                what=f"loss {self.signature.name!r} without its option {key!r}",
                where=declared_at(),
                fix=f"loss={self.signature.name}({key}=...)",
            )
            for key in self.signature.options
            if key not in given
        ]

    def needs(self) -> tuple[str, ...]:
        """The mask, and the fields that its function names."""
        names = (wanted.name for wanted in self.signature.inputs)
        return tuple(dict.fromkeys((MASK, *names)))

    def outputs(self) -> tuple[str, ...]:
        """What of the training forward its function names."""
        return self.signature.forward

    def corrects(self, old: str, *, own: bool) -> bool:
        """As declared: `@rf.loss(corrects=True)`."""
        return self.corrected

    def corrections(self) -> tuple[str, ...]:
        """The declaration, and the plainest losses that correct."""
        declared = "@rf.loss(corrects=True), where it weighs by rollout_log_probs"
        return (declared, *super().corrections())

    def counted(self, metric: str = LOSS) -> Count:
        """As in `Loss`; rows of one number a row."""
        levels = {made.name: made.level for made in self.signature.made}
        return "rows" if levels.get(metric) == "row" else super().counted(metric)

    def idle(self) -> dict[str, str]:
        """As in `Loss`; one number a row has a mean over rows."""
        if self.signature.per == "token":
            return super().idle()
        reason = f"{self.signature.name} makes one loss a row, whose mean is over rows"
        return dict.fromkeys(("aggregate", "constant"), reason)

    def describe(self) -> str:
        """One line, stable: the function's name and the options that were given."""
        words = [f"{key}={param_text(value)}" for key, value in self.options]
        averaging = ("aggregate", "constant")
        given = [key for key in averaging if getattr(self, key) != self.default(key)]
        words += [f"{key}={getattr(self, key)}" for key in given]
        words += ["corrects=True"] if self.corrected else []
        return f"{self.signature.name}({', '.join(words)})"


@overload
def loss(function: Callable[..., Any], /) -> FunctionLoss: ...


@overload
def loss(
    *, corrects: bool = ..., aggregate: Aggregation = ..., constant: float | None = ...
) -> Callable[[Callable[..., Any]], FunctionLoss]: ...


def loss(
    function: Callable[..., Any] | None = None,
    /,
    *,
    corrects: bool = False,
    aggregate: Aggregation | None = None,
    constant: float | None = None,
) -> FunctionLoss | Callable[[Callable[..., Any]], FunctionLoss]:
    """Make a loss of a function of tensors: `ops.update(..., loss=mine)` or `loss=mine(beta=0.1)`.

    Parameters before `*` name what it reads. `log_probs` and `entropy`, or `values` for a model
    with a value head, are those of the weights that are trained, with gradient. All others are
    fields of the handles that the update is given. `rf.Token` is a tensor `[rows, tokens]`, zero
    where the mask is false; a field with one value a row may be read so too, and is repeated.
    `rf.Row` is a tensor `[rows]`. Parameters after `*` are options. A parameter annotated `X |
    None` is optional.

    It returns the loss of each token or row, or a TypedDict with that as `loss` and metrics beside
    it. Metrics are logged as means over the tokens or rows of the optimizer step, or as the
    largest value where the name ends in `_max`. The numbers of a row may depend on that row alone,
    so that micro-batches and ranks add up to the gradient of the whole batch; this is checked as
    it runs. `aggregate` and `constant` average tokens as for `rf.PolicyLoss`. `corrects` declares
    that the loss corrects for rows of older weights, so that it may run with staleness.

    Raises GraphError for a signature that is not of this form.
    """
    averaging = {"aggregate": aggregate, "constant": constant}
    if not isinstance(corrects, bool):
        raise GraphError(
            Finding(
                code="E162",
                what=f"a loss with corrects={corrects!r}",
                where=declared_at(),
                expected="True or False",
            )
        )

    def decorate(function: Callable[..., Any]) -> FunctionLoss:
        signature = _signature(function)
        given = {key: value for key, value in averaging.items() if value is not None}
        corrected = {"corrected": True} if corrects else {}
        return _made({"function": function, "signature": signature, **corrected, **given})

    return decorate if function is None else decorate(function)


def _made(values: Mapping[str, Any]) -> FunctionLoss:
    """The loss of these values; GraphError where they do not fit together."""
    try:
        return FunctionLoss(**values)
    except ValidationError as error:
        raise GraphError(*validation_findings(error, "E162", where=declared_at())) from None


def no_loss(given: object) -> Finding:
    """What to say of something that was given as a loss and is none."""
    name = getattr(given, "__name__", type(given).__name__)
    fix = 'loss=rf.PolicyLoss("ppo_clip")'
    if isinstance(given, type) and issubclass(given, Loss):
        fix = f"loss=rf.{name}()"
    elif inspect.isfunction(given):
        fix = f"@rf.loss\ndef {name}(...) -> rf.Token[float]: ..."
    elif isinstance(given, str):
        fix = f'loss=rf.PolicyLoss("{given}")'
    return Finding(
        code="E160",
        what="an update was given a loss that is none",
        where=declared_at(),
        got=f"{type(given).__name__}: {given!r:.80}",
        expected="rf.PolicyLoss, rf.ValueLoss, rf.SFTLoss, rf.DPOLoss, rf.RewardModelLoss, "
        "rf.DistillLoss, or a function with @rf.loss",
        fix=fix,
    )


def _signature(function: Callable[..., Any]) -> Signature:
    """What a function reads and makes; GraphError where it does not say."""
    where = _where(function)
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise GraphError(_unreadable(function, f"an annotation cannot be read: {error}")) from None
    parameters = inspect.signature(function).parameters
    read = {name: hints.get(name) for name, p in parameters.items() if p.kind is not KEYWORD}
    options = {name: hints.get(name, Any) for name, p in parameters.items() if p.kind is KEYWORD}
    defaults = {
        name: parameters[name].default
        for name in options
        if parameters[name].default is not inspect.Parameter.empty
    }
    wrong = [name for name, p in parameters.items() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    wrong += [name for name in ("aggregate", "constant") if name in options]
    inputs = [_input(name, annotation) for name, annotation in read.items() if name not in wrong]
    findings = [_unreadable(function, f"parameter {name!r}") for name in wrong]
    findings += [_unreadable(function, f"parameter {i}") for i in inputs if isinstance(i, str)]
    made = _results(hints.get("return"))
    if isinstance(made, str):
        findings.append(_unreadable(function, made))
    typed = [wanted for wanted in inputs if not isinstance(wanted, str)]
    forward = tuple(wanted.name for wanted in typed if wanted.name in FORWARD)
    if not forward and not findings:
        findings.append(_unreadable(function, f"none of {', '.join(FORWARD)} is read"))
    if findings or isinstance(made, str):
        raise GraphError(*findings)
    return Signature(
        name=function.__name__,
        where=where,
        parameters=tuple(read),
        levels={wanted.name: wanted.levels[0] for wanted in typed},
        forward=forward,
        inputs=tuple(wanted for wanted in typed if wanted.name not in FORWARD),
        made=made,
        options=options,
        defaults=defaults,
    )


def _input(name: str, annotation: Any) -> Input | str:
    """What a parameter reads, or what is wrong with it."""
    optional, wanted = is_optional(annotation)
    read = read_annotation(wanted)
    if read is None or read[0] == "text":
        return f"{name!r} has no type of a number"
    if name == "prompt_tokens":
        return f"{name!r} is no field of response tokens"
    dtype, level = read
    if name in FORWARD and ((dtype, level) != ("float32", "token") or optional):
        return f"{name!r} is what the forward makes: rf.Token[float]"
    return Input(
        name=name,
        dtype=dtype,
        levels=("token", "row") if level == "token" else ("row",),
        required=not optional,
        hint=HINTS.get(name, ""),
    )


def _results(returned: Any) -> tuple[Typed, ...] | str:
    """The fields that a function makes, or what is wrong with them."""
    named = typing.get_type_hints(returned) if typing.is_typeddict(returned) else {LOSS: returned}
    if LOSS not in named:
        return f"its result has no {LOSS!r}"
    made = []
    for name, annotation in named.items():
        read = read_annotation(annotation)
        if read is None or read[0] == "text" or (name == LOSS and read[0] != "float32"):
            return f"its result {name!r} has no type of a number"
        made.append(Typed(name=name, dtype=read[0], level=read[1]))
    return tuple(made)


def _where(function: Callable[..., Any]) -> Source:
    code = getattr(function, "__code__", None)
    if code is None:
        raise GraphError(
            Finding(
                code="E161",
                what="@rf.loss of something that is no function",
                where=declared_at(),
                got=f"{type(function).__name__}: {function!r:.80}",
                expected="def mine(log_probs: rf.Token[float], ...) -> rf.Token[float]: ...",
            )
        )
    text = f"def {function.__name__}(...)"
    return Source(path=short_path(code.co_filename), line=code.co_firstlineno, text=text)


def _unreadable(function: Callable[..., Any], what: str) -> Finding:
    return Finding(
        code="E161",
        what=f"loss {function.__name__!r}: {what}",
        where=_where(function),
        expected=SIGNATURE,
        fix=f"def {function.__name__}(log_probs: rf.Token[float], advantages: rf.Token[float]) "
        "-> rf.Token[float]: ...",
    )
