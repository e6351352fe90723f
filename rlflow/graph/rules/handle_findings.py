"""What is said of handles that are used as what they are not."""

from __future__ import annotations

from rlflow.errors import Finding, Source


def truth(node: str, where: Source | None) -> Finding:
    """The finding for `if handle:`."""
    return Finding(
        code="E658",
        what=f"whether {node!r} is true is not known where a pipeline is declared",
        where=where,
        expected="ops alone: a handle has no value until the plan runs",
        fix='@rf.op(per="row") to choose by row, ops.repeat(..., until=...) to go on',
    )


def foreign(op: str, node: str, where: Source | None) -> Finding:
    """The finding for a handle that another call of a pipeline's function has made."""
    return Finding(
        code="E102",
        what=f"op {op!r} was given a handle of another pipeline",
        where=where,
        got=f"the handle of {node!r} there",
        expected="what an op returned in this call of the pipeline's function",
    )


def listed(op: str, kind: str, where: Source | None) -> Finding:
    """The finding for a list in the place of handles."""
    return Finding(
        code="E102",
        what=f"op {op!r} was given a {kind} in the place of handles",
        where=where,
        expected="each handle by itself",
        fix=f"ops.{op}(..., *handles)",
    )
