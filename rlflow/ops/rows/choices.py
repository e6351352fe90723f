"""The operators that change how many rows there are: keep, duplicate, split.

Contracts only, with how many rows each makes; the bodies are in `rlflow.ops.bodies.rows.choices`.
Groups stay whole where they are kept whole, and are never mixed. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal, get_args

from rlflow.errors import Finding, known_names, near_names
from rlflow.graph.op import Input, Op, register
from rlflow.graph.roles import SamplingOptions
from rlflow.graph.rules.counts import Counts
from rlflow.graph.source import declared_at
from rlflow.graph.trace import Handle, Offer, add_node, report_finding
from rlflow.ops.rows.sets import GROUP, Groups, declared_counts, sampled

Per = Literal["row", "group"]
Short = Literal["error", "fill"]


def _op(name: str, body: str) -> Op:
    return register(
        Op(
            name=name,
            body=f"rlflow.ops.bodies.rows.choices:{body}",
            roles=(SamplingOptions,),
            inputs=(),
            outputs=(),
            per="batch",
            rows="gather",
            dispatch="first",
            hands_on=True,
        )
    )


KEEP, DUPLICATE, SPLIT = _op("keep", "keep"), _op("duplicate", "duplicate"), _op("split", "split")


def keep(
    *handles: Handle,
    by: str,
    per: Per = "group",
    groups: int | None = None,
    at_least: int = 1,
    short: Short = "error",
    expected: float | None = None,
    name: str | None = None,
) -> Handle:
    """Keep the rows whose `by`, a bool row field, is true; fields stay as they are.

    With `per="group"` a group stays as a whole, where `by` is true for all its rows, or goes. With
    "row" rows stay or go one by one, and a group may become smaller. Rows in no group take "row".

    `groups=K` keeps just K groups: the first K that pass. Otherwise the number differs from
    iteration to iteration, from `at_least` groups (or rows, where there are no groups) to all of
    them, so an update on them makes one optimizer step an epoch. Where fewer pass the run stops
    (E790), or with `short="fill"` the first of the others fill up. `expected` is the mean share of
    rows that stay, for the estimates of a plan: 1 unless given. Logs `<name>/kept`, that share,
    and `<name>/filled`, in groups.
    """
    offered = _offered(handles)
    grouped = "group" in offered
    known = declared_counts(handles[0]) if offered else Counts(groups=1, rows=1, least=1)
    least = at_least if groups is None else groups
    checks = (
        (per in get_args(Per), f"per={per!r}", "'row' or 'group'"),
        (short in get_args(Short), f"short={short!r}", "'error' or 'fill'"),
        (1 <= least <= known.groups, f"{_least(groups)}={least}", f"1 to {known.groups}"),
        (expected is None or 0 < expected <= 1, f"expected={expected}", "0 < expected <= 1"),
        (grouped or per == "row", "per='group' of rows without a group", "per='row'"),
        (groups is None or per == "group", f"groups={groups} and per='row'", "per='group'"),
    )
    found = _not_chosen_by(by, offered)
    if _refused("keep", checks, found):
        return _as_given("keep", handles)
    most = known.groups if groups is None else groups
    counts = Counts(
        groups=most,
        rows=min(most * known.largest, known.rows),
        least=least,
        expected=_share(expected, known, groups),
    )
    params: dict[str, Any] = {"by": by, "per": per}
    params |= {"groups": groups} if groups is not None else {"at_least": at_least}
    params |= {"short": short} if short != "error" else {}
    return _declare(KEEP, handles, offered, {by, "group"}, params, counts, name)


def duplicate(
    *handles: Handle, times: int, groups: Groups = "shared", name: str | None = None
) -> Handle:
    """Copies of every row: each row `times` times, with all fields of the handles as they are.

    With `groups="shared"` the copies of a row follow it and are in its group. With "apart" the
    copies of all rows follow each other, each with groups of its own. `sample` is made anew.
    """
    offered = _offered(handles)
    checks = (
        (times >= 2, f"times={times}", "times >= 2"),
        (
            groups in get_args(Groups),
            f"groups={groups!r}",
            " or ".join(map(repr, get_args(Groups))),
        ),
    )
    if _refused("duplicate", checks, _nothing(offered)):
        return _as_given("duplicate", handles)
    known = declared_counts(handles[0])
    alone = groups == "apart" or "group" not in offered
    counts = replace(
        known,
        groups=known.groups * times if alone else known.groups,
        least=known.least * times if alone else known.least,
        rows=known.rows * times,
    )
    params = {"times": times, "groups": groups}
    return _declare(DUPLICATE, handles, offered, {"group"}, params, counts, name)


def split(*handles: Handle, sizes: Sequence[int], name: str | None = None) -> tuple[Handle, ...]:
    """Divide the rows, in their order, into parts of so many groups; returns a handle for each.

    A row in no group counts as a group. The sizes add up to all groups, whose number is the same
    in every iteration. To divide by a field, see `ops.keep`.
    """
    offered = _offered(handles)
    known = declared_counts(handles[0]) if offered else Counts(groups=1, rows=1, least=1)
    checks = (
        (known.fixed, f"rows of {known.describe()}", "as many groups in every iteration"),
        (
            len(sizes) > 1 and min(sizes) >= 1,
            f"sizes={tuple(sizes)}",
            "two sizes or more, each >= 1",
        ),
        (sum(sizes) == known.groups, f"sizes={tuple(sizes)}", f"{known.groups} groups in all"),
    )
    if _refused("split", checks, _nothing(offered)):
        return tuple(_as_given("split", handles) for _ in sizes)
    made, first = [], 0
    for number, size in enumerate(sizes, start=1):
        counts = Counts(groups=size, rows=size * known.largest, least=size, expected=known.expected)
        params = {"groups": (first, first + size)}
        own = None if name is None else f"{name}_{number}"
        made.append(_declare(SPLIT, handles, offered, {"group"}, params, counts, own))
        first += size
    return tuple(made)


def _declare(
    op: Op,
    handles: Sequence[Handle],
    offered: dict[str, Offer],
    needed: set[str],
    params: dict[str, Any],
    counts: Counts,
    name: str | None,
) -> Handle:
    """The node of an op that hands on all fields it is offered."""
    fields = tuple(replace(offer.field, name=key) for key, offer in offered.items())
    inputs = tuple(
        Input(name=f.name, dtype=f.dtype, levels=(f.level,), required=f.name in needed)
        for f in fields
    )
    outputs = tuple(GROUP if f.name == "group" else f for f in fields)
    made = replace(op, inputs=inputs, outputs=outputs)
    return add_node(made, handles, params=params | sampled([offered]), counts=counts, name=name)


def _offered(handles: Sequence[Any]) -> dict[str, Offer]:
    return {o.name: o for handle in handles if isinstance(handle, Handle) for o in handle.offers}


def _least(groups: int | None) -> str:
    return "at_least" if groups is None else "groups"


def _share(expected: float | None, known: Counts, groups: int | None) -> Fraction:
    if groups is not None or expected is None:
        return known.expected
    return known.expected * Fraction(expected).limit_denominator(1000)


def _nothing(offered: dict[str, Offer]) -> list[Finding]:
    """E154 where no rows are given."""
    if offered:
        return []
    return [Finding(code="E154", what="there are no rows to choose from", where=declared_at())]


def _not_chosen_by(by: str, offered: dict[str, Offer]) -> list[Finding]:
    """E154 where the field by which rows stay is none, or is not one bool a row."""
    if by in offered and (offered[by].field.dtype, offered[by].field.level) == ("bool", "row"):
        return []
    flags = [n for n, o in offered.items() if (o.field.dtype, o.field.level) == ("bool", "row")]
    return [
        Finding(
            code="E154",
            what=f"op 'keep' goes by {by!r}, which is no bool row field of its handles",
            where=declared_at(),
            got=str(offered[by].field)
            if by in offered
            else f"offered: {known_names(list(offered))}",
            expected=f"one bool a row: {known_names(flags)}" if flags else "one bool a row",
            near=near_names(by, flags),
            fix="@rf.op(per='row')\ndef good(reward: rf.Row[float]) -> rf.Row[bool]: ...",
        )
    ]


def _refused(name: str, checks: Sequence[tuple[bool, str, str]], found: Sequence[Finding]) -> bool:
    """Report E118 for every option that does not hold, and what else was found."""
    wrong = [
        Finding(code="E118", what=f"op {name!r} with {got}", where=declared_at(), expected=expected)
        for holds, got, expected in checks
        if not holds
    ]
    for finding in (*found, *wrong):
        report_finding(finding)
    return bool(found or wrong)


def _as_given(name: str, handles: Sequence[Handle]) -> Handle:
    """The rows as they were, so that what follows is checked too."""
    given = [handle for handle in handles if isinstance(handle, Handle)]
    return given[0] if given else Handle(node=name, rows=None, offers=())
