"""The fields of routing replay: which experts of a mixture each token chose, by layer.

`prompt_experts` are of the tokens of a prompt, `routed_experts` of those of its response: int16
`[token, layers * k]`, the k experts of the first layer with experts, then those of the next, and -1
where no model has read the token: the last one of a response. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from rlflow.errors import Finding
from rlflow.graph.fields import Field, token
from rlflow.graph.model import Model
from rlflow.graph.op import Input, Op
from rlflow.graph.source import declared_at
from rlflow.graph.trace import report_finding

Routing = Literal["record", "replay"]
PROMPTS, RESPONSES = "prompt_experts", "routed_experts"
EXPERTS = tuple(
    Input(
        name=name,
        dtype="int16",
        levels=("token",),
        hint='samples = ops.rollout(actor, prompts, ..., routing="record")',
    )
    for name in (PROMPTS, RESPONSES)
)


def experts_made(model: Model) -> tuple[Field, ...]:
    """The fields that a node of a model makes which records."""
    return (
        token(PROMPTS, "int16", mask=None, routed=model.name),
        token(RESPONSES, "int16", routed=model.name),
    )


def recording(op: Op, model: Model) -> Op:
    """A rollout that makes them too, in one go: no row is paused."""
    return replace(op, outputs=(*op.outputs, *experts_made(model)), resumed=None)


def known_routing(
    what: str, given: object, allowed: tuple[str, ...], *, drafted: bool = False
) -> bool:
    """Whether an option says something; E118 for what it may not say, nor where it is `drafted`."""
    where = declared_at()
    if given is not None and drafted:
        both = f"{what} with routing= and a drafter, whose tokens are read several at a time"
        report_finding(Finding(code="E118", what=both, where=where, expected="one of them"))
    if given is None or given in allowed:
        return given is not None
    expected = " or ".join(f'routing="{word}"' for word in allowed) + ", or leave it out"
    found = f"{what} with routing={given!r}"
    report_finding(Finding(code="E118", what=found, where=where, expected=expected))
    return False
