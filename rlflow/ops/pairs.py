"""The operators of preferences: pairs of samples, and the scores of a reward model.

Contracts only; the bodies are in `rlflow.ops.bodies.pair`. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from rlflow.errors import Finding
from rlflow.graph.fields import row
from rlflow.graph.model import Model
from rlflow.graph.op import Input, Op, register
from rlflow.graph.roles import AdaptersOff
from rlflow.graph.source import declared_at
from rlflow.graph.trace import Handle, add_node, report_finding
from rlflow.ops.missing_reward import on_valid_rows

FINISHED = Input(name="finished", dtype="bool", levels=("row",))
MADE_BY_PAIR = "pairs = ops.pair(samples, reward)"
MADE_BY_TOP_K = "scored = ops.log_probs(teacher, samples, top_k=64)"

READ_BY_LOSSES = {
    "group": Input(name="group", dtype="int64", levels=("row",)),
    "pair": Input(name="pair", dtype="int64", levels=("row",), hint=MADE_BY_PAIR),
    "chosen": Input(name="chosen", dtype="bool", levels=("row",), hint=MADE_BY_PAIR),
    "pair_margin": Input(name="pair_margin", dtype="float32", levels=("row",), hint=MADE_BY_PAIR),
    "reward": Input(
        name="reward",
        dtype="float32",
        levels=("row",),
        hint="reward = ops.reward(exact_match, samples)",
    ),
    "teacher_log_probs": Input(
        name="teacher_log_probs",
        dtype="float32",
        levels=("token",),
        hint='teacher_lp = ops.log_probs(teacher, samples, field="teacher_log_probs")',
    ),
    "top_log_probs": Input(
        name="top_log_probs", dtype="float32", levels=("token",), hint=MADE_BY_TOP_K
    ),
    "top_ids": Input(name="top_ids", dtype="int64", levels=("token",), hint=MADE_BY_TOP_K),
    "top_rest": Input(name="top_rest", dtype="float32", levels=("token",), hint=MADE_BY_TOP_K),
}
"""What losses of pairs, of reward models and of teachers read, by name."""

PAIR = register(
    Op(
        name="pair",
        body="rlflow.ops.bodies.pair:pair",
        inputs=(
            Input(name="reward", dtype="float32", levels=("row",)),
            Input(name="group", dtype="int64", levels=("row",)),
            Input(name="response_mask", dtype="bool", levels=("token",)),
            Input(name="sample", dtype="int64", levels=("row",), required=False),
        ),
        outputs=(row("pair", "int64"), row("chosen", "bool"), row("pair_margin")),
        per="group",
    )
)
SCORES = register(
    Op(
        name="scores",
        body="rlflow.ops.bodies.pair:scores",
        roles=(AdaptersOff,),
        inputs=(
            Input(name="prompt_tokens", dtype="int64", levels=("token",)),
            Input(name="response_tokens", dtype="int64", levels=("token",)),
            Input(name="group", dtype="int64", levels=("row",), required=False),
        ),
        outputs=(row("score"),),
        per="row",
        use="forward",
    )
)


def pair(
    *handles: Handle,
    missing_eos_penalty: float | None = None,
    require_eos: bool = False,
    name: str | None = None,
) -> Handle:
    """Pair the best and the worst sample of every group, by their rewards.

    Rows stay as they are. `pair` is the group's id on the two rows of a pair and -1 elsewhere,
    `chosen` is true on the better one, `pair_margin` is their difference in reward. A group whose
    best and worst rewards are equal makes no pair. `missing_eos_penalty` is subtracted from the
    reward of a response that did not end by itself. With `require_eos` such a response loses
    against every other, and a group that has no other makes no pair. Logs the shares of groups
    with a pair, of ties, and of groups without two valid samples.
    """
    if missing_eos_penalty is not None and not 0 < missing_eos_penalty < math.inf:
        report_finding(
            Finding(
                code="E118",
                what=f"pairs with missing_eos_penalty={missing_eos_penalty}",
                where=declared_at(),
                expected="missing_eos_penalty > 0, or leave it out",
            )
        )
    params: dict[str, Any] = {}
    if missing_eos_penalty is not None:
        params["missing_eos_penalty"] = missing_eos_penalty
    if require_eos:
        params["require_eos"] = True
    op = replace(PAIR, inputs=(*PAIR.inputs, FINISHED)) if params else PAIR
    op, handles, validity = on_valid_rows(op, handles)
    return add_node(op, handles, params=params | validity, name=name)


def scores(model: Model, *handles: Handle, field: str = "score", name: str | None = None) -> Handle:
    """Score each response by a reward model: float32 a row, the value after its last token.

    The field is `score` unless `field` names it, as `field="reward"` does for `ops.advantage`.
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
    op = replace(SCORES, outputs=(row(field),))
    return add_node(op, handles, model=model, name=name)
