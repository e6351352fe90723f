"""The operators that work without a model's weights: data, advantages, metrics.

Contracts only: what each op reads and makes. The bodies are in `rlflow.ops.bodies` and
are looked up by name where they run; nothing here imports torch.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlflow.data import Chat, DataSource
from rlflow.data.pictures.columns import IMAGES
from rlflow.errors import Finding, GraphError
from rlflow.graph.callables import hints_of, name_of, parameters_of
from rlflow.graph.fields import IMAGE, PICTURES, PIXELS, DType, Level, row, token
from rlflow.graph.model import Model
from rlflow.graph.op import Input, Op, register
from rlflow.graph.roles import Calling, Drawn, Sharing, Tokenizing
from rlflow.graph.source import declared_at
from rlflow.graph.trace import Handle, add_node, report_finding
from rlflow.ops.estimator_options import checked_options
from rlflow.ops.estimators import REFERENCE, find_estimator, granularity, needed_inputs
from rlflow.ops.loops.curriculum import PassRates, drawn_by_pass_rates
from rlflow.ops.missing_reward import on_valid_rows
from rlflow.ops.rows.pictures import pictures_of, seeing

PROMPTS = register(
    Op(
        name="prompts",
        body="rlflow.ops.bodies.data:prompts",
        roles=(Drawn, Sharing),
        inputs=(),
        outputs=(row("prompt", "text"), row("row_id", "int64")),
        per="row",
        rows="new",
    )
)
TOKENIZE = register(
    Op(
        name="tokenize",
        body="rlflow.ops.bodies.data:tokenize",
        roles=(Tokenizing,),
        inputs=(Input(name="prompt", dtype="text", levels=("row",)),),
        outputs=(
            token("prompt_tokens", "int64", mask=None),
            token("response_tokens", "int64"),
            token("response_mask", "bool", mask=None),
        ),
        per="row",
    )
)
ADVANTAGE = register(
    Op(
        name="advantage",
        body="rlflow.ops.bodies.advantage:grpo",
        inputs=(),
        outputs=(row("advantages"), token("returns")),
        per="group",
    )
)
METRICS = register(
    Op(
        name="metrics",
        body="rlflow.ops.bodies.metrics:metrics",
        roles=(Calling,),
        inputs=(),
        outputs=(),
        per="batch",
        rows="none",
        effect="effectful",
    )
)

PLAIN_TYPES: dict[Any, tuple[DType, Level]] = {
    str: ("text", "row"),
    int: ("int64", "row"),
    float: ("float32", "row"),
    bool: ("bool", "row"),
    list[int]: ("int64", "token"),
    list[float]: ("float32", "token"),
}
# Within a list of one entry a row: of its own, a list of bools is one bool a row.
ROW_TYPES: dict[Any, tuple[DType, Level]] = {**PLAIN_TYPES, list[bool]: ("bool", "token")}


def prompts(
    data: DataSource,
    *,
    batch: int,
    weights: PassRates | None = None,
    name: str | None = None,
) -> Handle:
    """Draw `batch` rows of a data source in every iteration, shuffled anew each epoch.

    Makes one row field per column; `prompt` is text (or chat messages as JSON), `images` pictures
    where the source says so, other columns are text. With `weights` the rows of some buckets
    come more often than others, by the pass rates that `ops.track` has measured.
    """
    if batch < 1:
        report_finding(
            Finding(
                code="E118",
                what=f"a batch of {batch} prompts",
                where=declared_at(),
                expected="batch >= 1",
            )
        )
    columns = [column for column in data.columns if column not in ("prompt", "row_id")]
    if "prompt" not in data.columns:
        report_finding(
            Finding(
                code="E119",
                what=f"data source {data.describe()} has no column 'prompt'",
                where=declared_at(),
                got=f"columns: {', '.join(data.columns)}",
                fix='rename={"question": "prompt"}',
            )
        )
    pictured = (IMAGES,) if data.pictured else ()
    extra = tuple(row(column, IMAGE if column in pictured else "text") for column in columns)
    op = replace(PROMPTS, outputs=(*PROMPTS.outputs, *extra))
    params: dict[str, Any] = {"data": data, "batch": batch}
    if weights is not None:
        op, more = drawn_by_pass_rates(op, data, weights)
        params |= more
    return add_node(op, (), params=params, name=name)


def tokenize(
    model: Model,
    prompts: Handle,
    *,
    response: str = "answer",
    chat: bool | Chat = False,
    name: str | None = None,
) -> Handle:
    """Turn prompts and a column of written responses into tokens, EOS appended (for SFT).

    Uses the model's tokenizer, not its weights. Makes prompt_tokens and
    response_tokens (int64 [row, token]) and response_mask; of pictures what the model reads.
    """
    written = Input(name=response, dtype="text", levels=("row",))
    op = replace(TOKENIZE, inputs=(*TOKENIZE.inputs, written))
    params: dict[str, Any] = {"tokenizer": model.path, "response": response}
    params |= {"chat": chat} if chat else {}
    if images := pictures_of("a tokenization", (prompts,)):
        read = (*op.inputs, Input(name=images, dtype=IMAGE, levels=("row",)))
        op = replace(seeing(op, model), inputs=read)
        params |= {"images": images}
    return add_node(op, (prompts,), params=params, name=name)


def advantage(estimator: str, *handles: Handle, name: str | None = None, **options: Any) -> Handle:
    """Turn rewards into advantages: an estimator by name, with its options.

    gae reads a critic's values; grpo, dr_grpo, rloo, opo, gpg, pass@k and reinforce++-baseline
    compare the rows of a group; reinforce++ takes the reward-to-go; remax subtracts the field
    `baseline`, the reward of a greedy response; gdpo reads several rewards, named with their
    weights: `rewards={"correct": 1.0, "short": 0.5}`; otb reads `sum_pi_squared` and
    `old_log_probs`. The formulas and options are in docs/algorithms.md.

    `kl_coef` subtracts a KL term against the reference in the reward (Stiennon et al.
    2020, section 3.4). Makes `advantages` (and `returns`) at the level the estimator has.
    """
    where = declared_at()
    found = find_estimator(estimator, where)
    if isinstance(found, Finding):
        report_finding(found)
        return add_node(ADVANTAGE, (), name=name)
    given, findings = checked_options(found, options, where)
    for finding in findings:
        report_finding(finding)
    op = replace(
        ADVANTAGE,
        body=found.body,
        inputs=needed_inputs(found, given),
        outputs=found.outputs,
        per=granularity(found, given),
    )
    declined = {}
    if REFERENCE not in op.inputs and "kl_coef" in found.options:
        given_kl = bool(given.get("kl_coef"))
        why = "kl='given' is made already" if given_kl else "kl_coef is 0: no KL in the reward"
        declined["ref_log_probs"] = why
    op, handles, validity = on_valid_rows(op, handles)
    params = {"kind": estimator, **given, **validity}
    return add_node(op, handles, params=params, name=name, declined=declined)


def metrics(
    *handles: Handle, function: Callable[..., Any] | None = None, name: str | None = None
) -> Handle:
    """Log numbers of an iteration: a function's dict of floats, or mean, min and max of fields.

    With a function its parameters are the fields it reads, as lists of one entry a row.
    """
    if function is not None:
        inputs, _ = plain_inputs(function, skip=())
    else:
        offered = {
            o.name: o.field
            for h in handles
            for o in h.offers
            if o.field.dtype not in ("text", IMAGE) and o.name not in (PIXELS, PICTURES)
        }
        inputs = tuple(
            Input(name=key, dtype=field.dtype, levels=(field.level,))
            for key, field in offered.items()
        )
    op = replace(METRICS, inputs=inputs, function=function)
    params = {} if function is None else {"function": function}
    return add_node(op, handles, params=params, name=name)


def _no_function(given: object) -> Finding:
    written = repr(given)
    return Finding(
        code="E104",
        what=f"{written if len(written) < 60 else type(given).__name__} is no function of rows",
        where=declared_at(),
        got="callable, without a signature" if callable(given) else type(given).__name__,
        expected="a Python function, whose parameters are the fields that it reads",
        fix="def score(response: str, answer: str) -> float: ...",
    )


def plain_inputs(
    function: Callable[..., Any], skip: tuple[str, ...]
) -> tuple[tuple[Input, ...], bool]:
    """The fields a plain Python function reads, and whether it takes whole batches.

    Raises GraphError E104 for what is no function, or one that does not say what it takes.
    """
    try:
        parameters = parameters_of(function)
    except (TypeError, ValueError):
        raise GraphError(_no_function(function)) from None
    hints = hints_of(function)
    inputs = []
    batched = False
    for parameter in parameters:
        if parameter.name in skip:
            continue
        annotation = hints.get(parameter.name, str)
        wanted = PLAIN_TYPES.get(annotation)
        if wanted is None and typing.get_origin(annotation) is list:
            batched = True
            wanted = ROW_TYPES.get(typing.get_args(annotation)[0])
        if wanted is None:
            report_finding(
                Finding(
                    code="E104",
                    what=f"parameter {parameter.name!r} of {name_of(function)} is {annotation}",
                    where=declared_at(),
                    expected="str, int, float, bool or list[int] (per sample), list[...] of these "
                    "(per batch)",
                    fix=f"{parameter.name}: str",
                )
            )
            continue
        dtype, level = wanted
        required = parameter.default is inspect.Parameter.empty
        inputs.append(Input(name=parameter.name, dtype=dtype, levels=(level,), required=required))
    return tuple(inputs), batched
