"""Samples without a reward: the field `valid`, and ops that work as if the others were all.

`ops.reward` with a policy makes `valid`; every op here named passes it on. The body is
`rlflow.ops.bodies.missing_reward`; this file holds no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlflow.graph.fields import row
from rlflow.graph.op import Input, Op
from rlflow.graph.trace import Handle

VALID = "valid"
BODY = "rlflow.ops.bodies.missing_reward:of_valid_rows"


def on_valid_rows(op: Op, handles: Sequence[Any]) -> tuple[Op, tuple[Any, ...], dict[str, Any]]:
    """The op as it is, or one whose body sees valid rows only; its handles and more options.

    Of several handles that offer `valid` a row must be valid in all.
    """
    given: list[Any] = []
    names: dict[str, str] = {}
    for handle in handles:
        offers = handle.offers if isinstance(handle, Handle) else ()
        source = next((offer.source for offer in offers if offer.name == VALID), None)
        if source is None:
            given.append(handle)
            continue
        name = names.setdefault(source, f"{VALID}_{len(names) + 1}" if names else VALID)
        given.append(handle if name == VALID else handle.rename(**{name: VALID}))
    if not names:
        return op, tuple(handles), {}
    read = tuple(Input(name=name, dtype="bool", levels=("row",)) for name in names.values())
    made = (*op.outputs, row(VALID, "bool")) if op.outputs else ()
    changed = replace(op, body=BODY, inputs=(*op.inputs, *read), outputs=made)
    return changed, tuple(given), {"body": op.body}


def is_valid(name: str) -> bool:
    """Whether a field says which rows have a reward: `valid`, or one of several of them."""
    return name == VALID or name.removeprefix(f"{VALID}_").isdigit()
