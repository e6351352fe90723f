"""Over-sampling: a rollout that begins more groups than its batch has, and drops who is late.

Of the prompts that it reads the `first_groups` groups that are complete first are its rows, in the
order of their prompts. A group is complete with the last of its responses; in the embedded engine
every live row gets a token a turn, so those are the groups whose longest response is shortest, of
equal ones the first, in whichever layout. Prompts of groups that are dropped count as drawn: they
come again in the next epoch. As long responses are late, what is learned from is shorter than
what the policy samples; nothing corrects for that.

Contracts only; the body is in `rlflow.ops.bodies.rows.oversampled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlflow.errors import Finding
from rlflow.graph.op import Op
from rlflow.graph.roles import Oversampled
from rlflow.graph.source import declared_at
from rlflow.graph.trace import Handle, report_finding
from rlflow.ops.rows.sets import declared_counts

BODY = "rlflow.ops.bodies.rows.oversampled:first_complete"


def oversampling(
    op: Op, prompts: Sequence[Handle], groups: int, *, drafted: bool
) -> tuple[Op, dict[str, Any]]:
    """A rollout that makes the first `groups` groups alone, and the options that say so.

    E118 where there are not so many prompts in every iteration, and beside what an engine makes of
    all rows in one go. Where all groups are wanted it is the rollout as it was.
    """
    given = [handle for handle in prompts if isinstance(handle, Handle) and handle.rows is not None]
    if not given:
        return op, {}
    known = declared_counts(given[0])
    said, plain = f"first_groups={groups}", op.resumed is not None and not drafted
    checks = (
        (1 <= groups <= known.groups, said, f"1 to {known.groups}, the prompts that it reads"),
        (known.fixed, f"{said} of {known.describe()}", "as many prompts in every iteration"),
        (known.rows == known.groups, f"{said} of {known.describe()}", "prompts, a group each"),
        (plain, f"{said} and a drafter, routing= or pictures", "one of them"),
    )
    wrong = [(got, expected) for holds, got, expected in checks if not holds]
    for got, expected in wrong:
        what = f"a rollout with {got}"
        report_finding(Finding(code="E118", what=what, where=declared_at(), expected=expected))
    if wrong or groups == known.groups:
        return op, {}
    chosen = replace(op, body=BODY, resumed=None, continued="", chooses=True)
    return chosen, Oversampled(first_groups=groups).options()
