"""What is said of a field that an op reads and no handle offers, or that a handle has not."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.errors import Finding, Source, known_names, near_names
from rlflow.graph.fields import LEVEL_NAMES, Field
from rlflow.graph.op import Input, Op, providers


def missing_input(
    op: Op, node: str, wants: Input, offers: Sequence[str], where: Source | None
) -> Finding:
    """The finding for a field that no handle offers; `offers` are the names of those they do."""
    if wants.name == "group":
        return Finding(
            code="E109",
            what=f"group op {op.name!r} ({node}) was given rows that are not grouped",
            where=where,
            expected="the samples of a rollout: their field 'group' says which belong together",
            fix="pass the handle that ops.rollout(...) returned",
        )
    made_by = providers(wants.name)
    expected = str(wants)
    if made_by:
        expected += f", made by {' or '.join('ops.' + name for name in made_by)}"
    return Finding(
        code="E103",
        what=f"node {node!r} has no input {wants.name!r}",
        where=where,
        got=f"offered: {known_names(offers)}",
        expected=expected,
        near=near_names(wants.name, offers),
        fix=wants.hint,
    )


def no_such_field(node: str, offered: Sequence[str], name: str, where: Source | None) -> Finding:
    """A field is asked of a handle that has none of that name."""
    names = sorted(offered)
    return Finding(
        code="E103",
        what=f"node {node!r} makes no field {name!r}",
        where=where,
        expected=known_names(names),
        near=near_names(name, names),
    )


def offered_twice(node: str, name: str, sources: Sequence[str], where: Source | None) -> Finding:
    """The finding for a field that several handles offer."""
    return Finding(
        code="E106",
        what=f"node {node!r} is offered {name!r} more than once",
        where=where,
        got=f"by {' and '.join(sources)}",
        fix=f"pass one of them only, or rename: handle.rename(other={name!r})",
    )


def other_field(
    node: str, wants: Input, offered: Field, source: str, where: Source | None
) -> Finding:
    """The finding for a field of another dtype or level."""
    levels = " or ".join(LEVEL_NAMES[level] for level in wants.levels)
    return Finding(
        code="E104",
        what=f"node {node!r} cannot read {wants.name!r} of {source!r}",
        where=where,
        got=str(offered),
        expected=f"dtype {wants.dtype}, level {levels}",
        fix=wants.hint,
    )
