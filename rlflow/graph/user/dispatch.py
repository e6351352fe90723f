"""Rules of a user's own for which rows go to which rank, and whose results are kept.

A registered pair is named by an op, `@rf.op(per="row", dispatch="by_length")`, and called by
the controller with numbers only. This file knows no row, no rank and no array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlflow.errors import Finding, GraphError
from rlflow.graph.op import DISPATCHES
from rlflow.graph.source import declared_at

Parts = Sequence[Sequence[int]]
Dispatch = Callable[[Sequence[int], Sequence[int] | None, int], Parts]
Collect = Callable[[Parts], Parts]

# The rules that rlflow itself spreads rows by.
RULES = ("whole", "balanced", "balanced rows", "balanced samples", "generated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A registered pair of functions; without `collect` the first result of a row is kept."""

    name: str
    dispatch: Dispatch
    collect: Collect | None = None


_PAIRS: dict[str, Pair] = {}


def register_dispatch(name: str, dispatch: Dispatch, collect: Collect | None = None) -> str:
    """Register a rule for distributing rows over devices, for `@rf.op(..., dispatch=name)`.

    `dispatch(tokens, groups, parts)` gets the number of tokens of every row, the group of every
    row (None where rows have none) and the number of parts. It returns the row numbers of each
    part; a row may be in several. `collect(parts)` gets these, and returns for each part the row
    numbers whose results are kept: every row once over all parts. Without it the first result of a
    row is kept. Both must return the same for the same arguments. A name registered again is
    replaced.

    Returns the name. Raises GraphError for an empty name or one that rlflow uses itself, and
    where `dispatch` or `collect` is not a function.
    """
    taken = (*DISPATCHES, *RULES)
    if not isinstance(name, str) or not name.strip() or name in taken:
        raise GraphError(
            Finding(
                code="E122",
                what=f"a dispatch rule cannot be named {name!r}",
                where=declared_at(),
                expected=f"a name of its own; rlflow uses {', '.join(taken)}",
                fix='rf.register_dispatch("by_length", dispatch)',
            )
        )
    for role, function in (("dispatch", dispatch), ("collect", collect)):
        if not callable(function) and not (role == "collect" and function is None):
            raise GraphError(
                Finding(
                    code="E122",
                    what=f"{role} of dispatch rule {name!r} is not a function",
                    where=declared_at(),
                    got=f"{function!r:.80}",
                )
            )
    _PAIRS[name] = Pair(name=name, dispatch=dispatch, collect=collect)
    return name


def dispatch_pair(name: str) -> Pair | None:
    """The pair registered by that name, or None."""
    return _PAIRS.get(name)


def registered() -> list[str]:
    """The names of all registered pairs, sorted."""
    return sorted(_PAIRS)
