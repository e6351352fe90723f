"""The operators that sample from a model and that train it: rollout, update, evaluate.

Contracts only; the bodies are in `rlflow.ops.bodies`. What an op needs of the graph
follows from its loss: a KL term reads a reference, several optimizer steps read the
old policy's log-probs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from rlflow.data import Chat, DataSource
from rlflow.errors import Finding, Source
from rlflow.graph.fields import row, token
from rlflow.graph.model import Model
from rlflow.graph.op import Input, Op, register
from rlflow.graph.roles import (
    Balanced,
    Calling,
    Drafted,
    Drawn,
    Learning,
    Oversampled,
    Paused,
    Portion,
    Resumed,
    Routed,
    SamplingOptions,
)
from rlflow.graph.rules.old_policy import moved_by
from rlflow.graph.source import declared_at
from rlflow.graph.trace import Handle, add_node, declared_updates, free_name, report_finding
from rlflow.graph.user.iterations import Iterations, schedule
from rlflow.ops.forwards import GROUPED, TOKENS, sampled_at
from rlflow.ops.losses.inputs import FIELD_INPUTS
from rlflow.ops.losses.losses import PolicyLoss, SFTLoss, ValueLoss
from rlflow.ops.losses.preference import DPOLoss, RewardModelLoss
from rlflow.ops.losses.user import FunctionLoss, no_loss
from rlflow.ops.missing_reward import on_valid_rows
from rlflow.ops.rows.choices import SPLIT
from rlflow.ops.rows.experts import EXPERTS, known_routing
from rlflow.ops.rows.pictures import with_pictures
from rlflow.ops.rows.portions import GATHER
from rlflow.ops.rows.rolled import rolled
from rlflow.ops.scoring import Functions, as_function

MASK = Input(name="response_mask", dtype="bool", levels=("token",))

RESUME = Op(
    name="resume",
    body="rlflow.ops.bodies.rollout:resume",
    roles=(SamplingOptions, Drafted, Resumed),
    inputs=(
        *TOKENS,
        Input(name="rollout_log_probs", dtype="float32", levels=("token",)),
        Input(name="version", dtype="int64", levels=("token",)),
        Input(name="finished", dtype="bool", levels=("row",)),
        Input(name="sample", dtype="int64", levels=("row",)),
    ),
    outputs=(
        token("response_tokens", "int64"),
        token("response_mask", "bool", mask=None),
        token("rollout_log_probs"),
        row("response", "text"),
        row("finished", "bool"),
        token("version", "int64"),
    ),
    per="row",
    use="rollout",
    dispatch="parts",
)
ROLLOUT = register(
    Op(
        name="rollout",
        body="rlflow.ops.bodies.rollout:rollout",
        roles=(SamplingOptions, Drafted, Oversampled, Balanced, Paused, Portion, Routed),
        inputs=(Input(name="prompt", dtype="text", levels=("row",)),),
        outputs=(
            token("prompt_tokens", "int64", mask=None),
            token("response_tokens", "int64"),
            token("response_mask", "bool", mask=None),
            token("rollout_log_probs"),
            row("response", "text"),
            row("finished", "bool"),
            row("group", "int64"),
            row("sample", "int64"),
            token("version", "int64"),
        ),
        per="row",
        use="rollout",
        rows="expand",
        resumed=RESUME,
        divided=(SPLIT, GATHER),
        continued="rlflow.ops.bodies.rows.continuous:go_on",
    )
)
UPDATE = register(
    Op(
        name="update",
        body="rlflow.ops.bodies.update:update",
        roles=(Learning, Routed),
        inputs=(*TOKENS, MASK, GROUPED),
        outputs=(),
        per="batch",
        use="train",
        rows="none",
        effect="effectful",
        collective=True,
    )
)
EVALUATE = register(
    Op(
        name="evaluate",
        body="rlflow.ops.bodies.rollout:evaluate",
        roles=(Drawn, SamplingOptions, Calling),
        inputs=(),
        outputs=(),
        per="batch",
        use="rollout",
        rows="none",
        effect="effectful",
        closing=True,
        collective=True,
    )
)

Loss = PolicyLoss | ValueLoss | SFTLoss | DPOLoss | RewardModelLoss | FunctionLoss


def rollout(
    model: Model,
    *prompts: Handle,
    n: int = 1,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    chat: bool | Chat = False,
    ignore_eos: bool = False,
    first_groups: int | None = None,
    balance: int | None = None,
    drafter: Model | None = None,
    draft_tokens: int = 4,
    draft_rows: int | Literal["auto"] | None = None,
    routing: Literal["record"] | None = None,
    name: str | None = None,
) -> Handle:
    """Sample `n` responses of at most `max_new_tokens` tokens to every prompt.

    Makes n rows of every prompt, prompt-major: the tokens (int64), the log-probs of the sampled
    tokens at `temperature` (float32), the `version` of the weights that sampled each token
    (int64), `group` (the number of the prompt), and every row field of the prompts, repeated.
    Several handles may bring fields of the same prompts. `temperature=0` is greedy. With `chat` a
    prompt goes through the tokenizer's chat template: text as one user message, or messages as
    JSON; `rf.Chat(...)` adds tools, or a template of its own. With `ignore_eos` a response has
    exactly `max_new_tokens` tokens.

    With `first_groups` fewer than the prompts the rest is dropped once so many groups are complete,
    which favours short responses: see `ops.rows.oversampling`. With `balance` replicas of the model
    move live rows to each other after every so many tokens of a row, so that all have as many.

    A `drafter`, a small model with the same tokenizer, proposes up to `draft_tokens` tokens at a
    time, which the policy reads in one pass. The tokens are those that would be sampled without it
    (speculative decoding, Leviathan et al. 2023, with random numbers in common). With `draft_rows`
    it does so once no more rows go on in a process.

    `routing="record"` adds which experts of a mixture each token chose, for log-probs and updates
    to replay (Ma et al., arXiv:2510.11370): `ops.rows.experts` has the fields.

    Pictures stand at a chat message's parts {"type": "image"}, or first: see `ops.rows.pictures`.
    """
    where = declared_at()
    checks = _sampling_checks(n, max_new_tokens, temperature, top_p, top_k, draft_tokens)
    drafted = drafter is not None
    _require("a rollout", (*checks, *_draft_checks(draft_rows, drafted=drafted)), where)
    op, beside = rolled(ROLLOUT, model, prompts, routing, (first_groups, balance), drafted=drafted)
    params: dict[str, Any] = {"n": n, "max_new_tokens": max_new_tokens, "temperature": temperature}
    if drafter is not None:
        params |= {"drafter": drafter.name, "draft_tokens": draft_tokens}
        params |= {} if draft_rows is None else {"draft_rows": draft_rows}
    unusual = (
        ("top_p", top_p, 1.0),
        ("top_k", top_k, 0),
        ("chat", chat, False),
        ("ignore_eos", ignore_eos, False),
    )
    params |= {key: value for key, value, off in unusual if value != off} | beside
    return add_node(op, prompts, model=model, params=params, name=name, beside=drafter)


def update(
    model: Model,
    *handles: Handle,
    loss: Loss,
    epochs: int = 1,
    mini_batches: int = 1,
    shuffle: bool = True,
    max_grad_norm: float | None = 1.0,
    background: bool = False,
    routing: Literal["replay"] | None = None,
    every: int = 1,
    when: Iterations | None = None,
    name: str | None = None,
) -> Handle:
    """Train a model: `epochs` passes over the batch, each in `mini_batches` optimizer steps.

    The samples of one prompt stay in one mini-batch. Gradients are those of the whole mini-batch
    however it is cut into micro-batches. In iteration i this writes version i + 1 of the weights;
    several updates of a model continue from each other, in the order of their lines.

    Without `shuffle` mini-batch k is the k-th part of the rows, so with one epoch a streamed
    rollout can bring its rows while it still samples the next ones. With `background` each step is
    an action of its own, put where its devices have nothing else to do. It runs in iterations 0,
    `every`, 2 `every`, ... of those of `when`; in the others it writes no version.

    With `routing="replay"` tokens choose the experts that the handles offer.
    """
    where = declared_at()
    every, within, findings = schedule("an update", every, when)
    for finding in findings:
        report_finding(finding)
    checks = (
        (epochs >= 1, f"epochs={epochs}", "epochs >= 1"),
        (mini_batches >= 1, f"mini_batches={mini_batches}", "mini_batches >= 1"),
        (
            shuffle or mini_batches > 1,
            "shuffle=False and one mini-batch",
            "mini_batches > 1: there is nothing to shuffle",
        ),
        (
            max_grad_norm is None or max_grad_norm > 0,
            f"max_grad_norm={max_grad_norm}",
            "max_grad_norm > 0, or None for no clipping",
        ),
    )
    _require("an update", checks, where)
    loss = _usable(loss, model)
    counts = {"epochs": epochs, "mini_batches": mini_batches}
    inputs, declined, extra = _loss_inputs(loss, handles, moved=_moved(model, counts))
    experts = EXPERTS if known_routing("an update", routing, ("replay",)) else ()
    read = {wanted.name: wanted for wanted in (*TOKENS, MASK, GROUPED, *inputs, *experts)}
    op = replace(UPDATE, inputs=with_pictures(tuple(read.values()), handles))
    params = {"loss": loss, **counts, "max_grad_norm": max_grad_norm, **extra}
    params |= {} if shuffle else {"shuffle": False}
    params |= {"background": True} if background else {}
    params |= {"routing": routing} if experts else {}
    op, handles, validity = on_valid_rows(op, handles)
    params |= validity
    due: dict[str, Any] = {"every": every, "within": within, "declined": declined}
    return add_node(op, handles, model=model, params=params, name=name, **due)


def _sampling_checks(
    n: int,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    draft_tokens: int,
) -> tuple[tuple[bool, str, str], ...]:
    """What has to hold of how tokens are drawn, for `_require`."""
    return (
        (n >= 1, f"n={n}", "n >= 1"),
        (max_new_tokens >= 1, f"max_new_tokens={max_new_tokens}", "max_new_tokens >= 1"),
        (temperature >= 0, f"temperature={temperature}", "temperature >= 0"),
        (0 < top_p <= 1, f"top_p={top_p}", "0 < top_p <= 1"),
        (top_k >= 0, f"top_k={top_k}", "top_k >= 0 (0: off)"),
        (draft_tokens >= 1, f"draft_tokens={draft_tokens}", "draft_tokens >= 1"),
    )


def _draft_checks(rows: Any, *, drafted: bool) -> tuple[tuple[bool, str, str], ...]:
    """What has to hold of the rows up to which a rollout drafts, for `_require`."""
    if rows is None:
        return ()
    return (
        (rows == "auto" or rows >= 1, f"draft_rows={rows}", 'draft_rows >= 1, "auto", or None'),
        (drafted, f"draft_rows={rows} and no drafter", "drafter=, the model that drafts"),
    )


def _moved(model: Model, counts: Mapping[str, int]) -> bool:
    """Whether an update makes a step with other weights than those that sampled."""
    return bool(moved_by(model.name, before=declared_updates(model.name), **counts))


def _usable(loss: Any, model: Model) -> Loss:
    """The loss as it is, with findings where it lacks something; a plain one where it is none."""
    if not isinstance(loss, Loss):
        report_finding(no_loss(loss))
        return SFTLoss()
    for finding in loss.missing() if isinstance(loss, FunctionLoss) else ():
        report_finding(finding)
    if "values" in loss.outputs() and model.head != "value":
        report_finding(
            Finding(
                code="E120",
                what=f"a value loss trains model {model.name!r}, which has no value head",
                where=declared_at(),
                fix=f'rf.Model("{model.name}", ..., head="value")',
            )
        )
    return loss


def _require(what: str, checks: Sequence[tuple[bool, str, str]], where: Source | None) -> None:
    """E118 for every option that does not hold: whether it does, what it is, what is expected."""
    for holds, got, expected in checks:
        if not holds:
            found = Finding(code="E118", what=f"{what} with {got}", where=where, expected=expected)
            report_finding(found)


def evaluate(
    model: Model,
    data: DataSource,
    function: Functions,
    *,
    every: int,
    max_new_tokens: int,
    limit: int | None = None,
    temperature: float = 0.0,
    chat: bool | Chat = False,
    name: str | None = None,
) -> Handle:
    """Score held-out data every `every` iterations, before the first and after the last.

    Decodes greedily by default, at most `limit` rows, and logs `eval/reward` (mean) and
    `eval/length` (mean tokens) of the weights at the start of that iteration. A mapping of
    functions is one for each value of the column `data_source`.
    """
    chosen, _, batched = as_function(function, (), by="data_source", options={})
    op = replace(EVALUATE, function=chosen)
    if every < 1:
        report_finding(
            Finding(
                code="E118",
                what=f"an evaluation every {every} iterations",
                where=declared_at(),
                expected="every >= 1",
            )
        )
    params = {
        "data": data,
        "function": chosen,
        "max_new_tokens": max_new_tokens,
        "limit": limit,
        "temperature": temperature,
        "batched": batched,
    }
    params |= {"chat": chat} if chat else {}
    own = name or free_name("eval")
    return add_node(op, (), model=model, params=params, name=own, every=max(every, 1))


def _loss_inputs(
    loss: Loss, handles: tuple[Handle, ...], *, moved: bool
) -> tuple[tuple[Input, ...], dict[str, str], dict[str, Any]]:
    """What a loss reads, what it leaves unread and why, and the options that follow.

    `moved` says whether a step is made with other weights than those that sampled.
    """
    if isinstance(loss, FunctionLoss):
        return loss.signature.inputs, {}, {"temperature": sampled_at(handles)}
    if not isinstance(loss, PolicyLoss):
        extra = {"temperature": sampled_at(handles)} if isinstance(loss, DPOLoss) else {}
        return tuple(FIELD_INPUTS[n] for n in loss.needs() if n in FIELD_INPUTS), {}, extra
    offered = {offer.name for handle in handles for offer in handle.offers}
    declined = {}
    inputs = [FIELD_INPUTS[name] for name in loss.needs() if name in FIELD_INPUTS]
    if loss.of_kind.advantages == "row":
        inputs = [replace(w, levels=("row",)) if w.name == "advantages" else w for w in inputs]
    if not any(wanted.name == "ref_log_probs" for wanted in inputs):
        full = "kl='full' reads whole distributions"
        declined["ref_log_probs"] = full if loss.full_kl else "kl_coef is 0: no KL in the loss"
    old = loss.old
    if old == "auto" and not loss.reads_old:
        old = "current"
        declined["old_log_probs"] = f"{loss.kind} takes no ratio to an old policy"
    if old == "auto":
        if "old_log_probs" in offered or (moved and loss.correction is not None):
            old = "recomputed"
        else:
            old = "rollout" if moved else "current"
    if old == "recomputed":
        inputs.append(FIELD_INPUTS["old_log_probs"])
    if old == "loglinear":
        declined.setdefault("old_log_probs", "the loss interpolates the old policy")
    if old == "rollout":
        inputs.append(FIELD_INPUTS["rollout_log_probs"])
        declined.setdefault("old_log_probs", "the loss compares with the rollout's own log-probs")
    elif "rollout_log_probs" in offered and "rollout_log_probs" not in loss.needs():
        inputs.append(replace(FIELD_INPUTS["rollout_log_probs"], required=False))
    unique = tuple({wanted.name: wanted for wanted in inputs}.values())
    return unique, declined, {"old": old, "temperature": sampled_at(handles)}
