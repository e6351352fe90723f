"""Rollouts whose replicas make their turns together: over-sampling, and rows that move.

Over-sampling begins more groups than the batch has. Of the prompts that it reads the `first_groups`
groups that are complete first are its rows, in the order of their prompts. A group is complete with
the last of its responses; in the embedded engine every live row gets a token a turn, so those are
the groups whose longest response is shortest, of equal ones the first, in whichever layout. Prompts
of groups that are dropped count as drawn: they come again in the next epoch. As long responses are
late, what is learned from is shorter than what the policy samples; nothing corrects for that.

A rollout whose replicas move rows to each other (`balance`) is decoded in the same way, of all its
groups or of the first ones. A row has its own random numbers, so what it draws does not depend on
where it is, and when rows move follows from who has ended in which turn.

Contracts only; the body is in `rlflow.ops.bodies.rows.oversampled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlflow.errors import Finding
from rlflow.graph.op import Op
from rlflow.graph.roles import Balanced, Oversampled
from rlflow.graph.source import declared_at
from rlflow.graph.trace import Handle, report_finding
from rlflow.ops.rows.sets import declared_counts

BODY = "rlflow.ops.bodies.rows.oversampled:first_complete"


def together(
    op: Op,
    prompts: Sequence[Handle],
    groups: int | None,
    balance: int | None,
    *,
    drafted: bool,
) -> tuple[Op, dict[str, Any]]:
    """A rollout whose replicas make their turns together, and the options that say so.

    It makes the first `groups` groups alone, or all, and its replicas move rows after every
    `balance` turns, or never. E118 where there are not so many prompts in every iteration, and
    beside what an engine makes of all rows in one go. Where all groups are wanted, and no row is to
    move, it is the rollout as it was.
    """
    given = [handle for handle in prompts if isinstance(handle, Handle) and handle.rows is not None]
    if not given:
        return op, {}
    known = declared_counts(given[0])
    first = known.groups if groups is None else groups
    words = (("first_groups", groups), ("balance", balance))
    said = " and ".join(f"{word}={number}" for word, number in words if number is not None)
    plain = op.resumed is not None and not drafted
    checks = (
        (1 <= first <= known.groups, said, f"1 to {known.groups}, the prompts that it reads"),
        (balance is None or balance >= 1, said, "balance >= 1, or None: no row moves"),
        (known.fixed, f"{said} of {known.describe()}", "as many prompts in every iteration"),
        (known.rows == known.groups, f"{said} of {known.describe()}", "prompts, a group each"),
        (plain, f"{said} and a drafter, routing= or pictures", "one of them"),
    )
    wrong = [(got, expected) for holds, got, expected in checks if not holds]
    for got, expected in wrong:
        what = f"a rollout with {got}"
        report_finding(Finding(code="E118", what=what, where=declared_at(), expected=expected))
    options: dict[str, Any] = {}
    if first < known.groups:
        options |= Oversampled(first_groups=first).options()
    if balance is not None:
        options |= Balanced(every=balance).options()
    if wrong or not options:
        return op, {}
    return replace(op, body=BODY, resumed=None, continued="", chooses=True), options
