"""Fields of other rows, matched by a key: the operator that joins two row sets side by side.

The contract only; the body is in `rlflow.ops.bodies.rows.joins`. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

from rlflow.errors import Finding, known_names, near_names
from rlflow.graph.op import Input, Op, register
from rlflow.graph.source import declared_at
from rlflow.graph.trace import Handle, Offer, add_node, report_finding
from rlflow.ops.rows.sets import Fill, Rows, Value

Several = Literal["error", "first"]

JOIN = register(
    Op(
        name="join",
        body="rlflow.ops.bodies.rows.joins:join",
        inputs=(),
        outputs=(),
        per="batch",
        dispatch="first",
    )
)
KEYS = ("int64", "text", "bool")


def join(
    rows: Rows,
    other: Rows,
    *,
    by: str,
    several: Several = "error",
    fill: Mapping[str, Value] | None = None,
    name: str | None = None,
) -> Handle:
    """Add to `rows` the fields of `other` that they lack, matched by the key `by`.

    `rows` and `other` are each a handle or several of the same rows. `by` is a row field of both,
    of whole numbers, text or bools, such as `row_id` or `prompt`. Order and groups of `rows` stay
    as they are, whatever rows `other` has. A key that `other` has several times ends the run
    (E791); with `several="first"` its first row counts. So does a key that `other` lacks, unless
    `fill` has a number for every field that is read; such fields are row fields.
    """
    given = [tuple(h for h in _as_tuple(part) if isinstance(h, Handle)) for part in (rows, other)]
    left, right = ({o.name: o for handle in part for o in handle.offers} for part in given)
    added = {key: offer for key, offer in right.items() if key not in left}
    found = _wrong(by, several, left, right, added, fill or {})
    for finding in found:
        report_finding(finding)
    if found:
        return given[0][0] if given[0] else Handle(node="join", rows=None, offers=())
    keys = tuple(
        Input(name=by, dtype=side[by].field.dtype, levels=("row",), part=part)
        for part, side in enumerate((left, right))
    )
    inputs = tuple(
        Input(name=key, dtype=o.field.dtype, levels=(o.field.level,), part=1)
        for key, o in added.items()
    )
    outputs = tuple(replace(offer.field, name=key) for key, offer in added.items())
    params: dict[str, Any] = {"by": by} | ({"several": several} if several != "error" else {})
    params |= {"fill": Fill(values=tuple(sorted(fill.items())))} if fill else {}
    op = replace(JOIN, inputs=(*keys, *inputs), outputs=outputs)
    return add_node(op, given[0], others=given[1:], params=params, name=name)


def _as_tuple(part: object) -> tuple[object, ...]:
    return tuple(part) if isinstance(part, list | tuple) else (part,)


def _wrong(
    by: str,
    several: str,
    left: Mapping[str, Offer],
    right: Mapping[str, Offer],
    added: Mapping[str, Offer],
    fill: Mapping[str, Value],
) -> list[Finding]:
    """E157 for a key that is none of both, nothing to add, or a fill of what is not added."""
    what, shared = f"op 'join' by {by!r}", [key for key in left if key in right]
    near = near_names(by, shared)
    if by not in left or by not in right:
        side = "rows" if by not in left else "other"
        expected = f"a row field of both: {known_names(shared)}"
        return [_found(f"{what}: {side!r} has no such field", expected, near=near)]
    kinds = {(o.field.dtype, o.field.level) for o in (left[by], right[by])}
    if len(kinds) > 1 or not kinds <= {(dtype, "row") for dtype in KEYS}:
        got = f"{left[by].field} and {right[by].field}"
        return [
            _found(f"{what} of two kinds, or of one that is no key", "int64, text or bool", got)
        ]
    if not added:
        got = f"other has {known_names(sorted(right))}"
        return [_found(f"{what} adds nothing", "a field that 'rows' lack: rename it", got)]
    if several not in get_args(Several):
        return [_found(f"{what} with several={several!r}", "'error' or 'first'")]
    numbers = {
        key for key, o in added.items() if o.field.level == "row" and o.field.dtype != "text"
    }
    unknown = sorted(set(fill) - numbers)
    if unknown:
        expected = f"numbers of added row fields: {known_names(sorted(numbers))}"
        return [_found(f"{what} cannot fill {unknown[0]!r}", expected)]
    return []


def _found(what: str, expected: str, got: str = "", near: tuple[str, ...] = ()) -> Finding:
    return Finding(
        code="E157", what=what, where=declared_at(), got=got, expected=expected, near=near
    )
