"""The operators that score tokens with a model, without gradient: log-probs and values.

Contracts only; the bodies are in `rlflow.ops.bodies.forward`. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlflow.errors import Finding
from rlflow.graph.fields import Field, token
from rlflow.graph.model import Model
from rlflow.graph.op import Input, Op, register
from rlflow.graph.roles import AdaptersOff, Routed, SamplingOptions, Scoring
from rlflow.graph.source import declared_at
from rlflow.graph.trace import Handle, add_node, declared_node, report_finding
from rlflow.graph.user.iterations import Iterations, schedule
from rlflow.ops.rows.experts import EXPERTS, Routing, experts_made, known_routing
from rlflow.ops.rows.pictures import with_pictures

TOKENS = (
    Input(name="prompt_tokens", dtype="int64", levels=("token",)),
    Input(name="response_tokens", dtype="int64", levels=("token",)),
)
GROUPED = Input(name="group", dtype="int64", levels=("row",), required=False)

LOG_PROBS = register(
    Op(
        name="log_probs",
        body="rlflow.ops.bodies.forward:log_probs",
        roles=(Scoring, AdaptersOff, Routed),
        inputs=(*TOKENS, GROUPED),
        outputs=(token("ref_log_probs"), token("old_log_probs")),
        per="row",
        use="forward",
    )
)
VALUES = register(
    Op(
        name="values",
        body="rlflow.ops.bodies.forward:values",
        roles=(AdaptersOff,),
        inputs=(*TOKENS, GROUPED),
        outputs=(token("values"),),
        per="row",
        use="forward",
    )
)


def log_probs(
    model: Model,
    *handles: Handle,
    temperature: float | None = None,
    field: str | None = None,
    sum_pi_squared: bool = False,
    top_k: int | None = None,
    routing: Routing | None = None,
    every: int = 1,
    when: Iterations | None = None,
    name: str | None = None,
) -> Handle:
    """Log-probabilities of the sampled tokens under a model, float32 [row, token].

    The field is `old_log_probs` for a model that is trained and `ref_log_probs` otherwise, unless
    `field` names it. The temperature is the rollout's unless given. `sum_pi_squared` adds a field
    of that name: the sum of the squares of all tokens' probabilities, float32 [row, token].
    `top_k` adds the k tokens that the model finds likeliest in each place, the likeliest first:
    `top_log_probs` float32 and `top_ids` int64 [row, token, k], and `top_rest` float32 [row,
    token], the log of the probability of all other tokens together.

    Of a mixture of experts `routing="record"` adds which experts each token chose, for an update to
    replay (R2 of Zheng et al., arXiv:2507.18071), and `"replay"` has every token choose those that
    the handles offer, such as a rollout's (R3, Ma et al., arXiv:2510.11370).

    It runs in iterations 0, `every`, 2 `every`, ... of those of `when`. Nodes that read it must
    run in no other iterations.
    """
    trained = model.optimizer is not None and not model.averaged
    made = [token(field or ("old_log_probs" if trained else "ref_log_probs"))]
    params: dict[str, Any] = {
        "temperature": sampled_at(handles) if temperature is None else temperature
    }
    if sum_pi_squared:
        made.append(token("sum_pi_squared"))
    if top_k is not None:
        made += _likeliest(top_k)
        params["top_k"] = top_k
    read = LOG_PROBS.inputs
    if known_routing("a forward", routing, ("record", "replay")):
        params["routing"] = routing
        made += experts_made(model) if routing == "record" else ()
        read = (*read, *(EXPERTS if routing == "replay" else ()))
    op = replace(LOG_PROBS, inputs=with_pictures(read, handles), outputs=tuple(made))
    due = _due(every, when)
    return add_node(op, handles, model=model, params=params, name=name, **due)


def _due(every: int, when: Iterations | None) -> dict[str, Any]:
    """When a forward runs, as `add_node` takes it."""
    every, within, findings = schedule("a forward", every, when)
    for finding in findings:
        report_finding(finding)
    return {"every": every, "within": within}


def _likeliest(top_k: int) -> list[Field]:
    """The fields of a model's likeliest tokens."""
    if top_k < 1:
        report_finding(
            Finding(
                code="E118",
                what=f"log-probs with top_k={top_k}",
                where=declared_at(),
                expected="top_k >= 1, or leave it out",
            )
        )
    return [
        token("top_log_probs", width=top_k),
        token("top_ids", "int64", width=top_k),
        token("top_rest"),
    ]


def values(
    model: Model,
    *handles: Handle,
    every: int = 1,
    when: Iterations | None = None,
    name: str | None = None,
) -> Handle:
    """A critic's value of the state before every response token, float32 [row, token].

    `every` and `when` are those of `ops.log_probs`.
    """
    if model.head != "value":
        report_finding(
            Finding(
                code="E120",
                what=f"model {model.name!r} has no value head",
                where=declared_at(),
                got=f"head={model.head!r}",
                fix=f'rf.Model("{model.name}", ..., head="value")',
            )
        )
    op = replace(VALUES, inputs=with_pictures(VALUES.inputs, handles))
    return add_node(op, handles, model=model, name=name, **_due(every, when))


def sampled_at(handles: tuple[Handle, ...]) -> float:
    """The temperature the tokens were sampled at; greedy samples are scored at 1."""
    for handle in handles:
        for offer in handle.offers:
            sampling = declared_node(offer.source).role(SamplingOptions)
            if offer.name == "response_tokens" and sampling and sampling.temperature:
                return float(sampling.temperature)
    return 1.0
