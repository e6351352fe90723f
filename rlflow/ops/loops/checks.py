"""What a loop may not be: findings about its options, its body, and what that returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from rlflow.errors import Finding, Source
from rlflow.graph.graph import Node
from rlflow.graph.roles import Balanced, LoopEnd
from rlflow.graph.rules.check import batch_of
from rlflow.graph.schedule import due_text
from rlflow.graph.source import declared_at
from rlflow.graph.trace import Handle, Offer, declared_node

Exhausted = Literal["error", "fill"]
Surplus = Literal["drop", "keep"]
CHOICES = {"exhausted": get_args(Exhausted), "surplus": get_args(Surplus)}
# Ops with an effect that each trip may have for itself.
COUNTING = ("reward_failures", "track", "ended")


def wrong(
    at_most: int,
    groups: int | None,
    expected: float | None,
    state: tuple[Handle, ...],
    said: Mapping[str, str],
    name: str,
) -> list[Finding]:
    """Findings about the options of a loop."""
    checks = (
        *(
            (said[option] in values, f"{option}={said[option]!r}", " or ".join(map(repr, values)))
            for option, values in CHOICES.items()
        ),
        *(
            (
                said[option] == values[0] or not state,
                f"{option}={said[option]!r} and a state",
                f"groups=K for {option}: rows of a state stay, none are too few or too many",
            )
            for option, values in CHOICES.items()
        ),
        (at_most >= 1, f"at_most={at_most}", "at_most >= 1"),
        (groups is None or groups >= 1, f"groups={groups}", "groups >= 1"),
        (
            expected is None or 1 <= expected <= at_most,
            f"expected={expected}",
            f"1 <= expected <= at_most={at_most}",
        ),
        (
            (groups is None) == bool(state),
            f"groups={groups} and {len(state)} handles of state",
            "groups=K, for rows of each trip; or one handle of state, whose rows stay",
        ),
        (len(state) <= 1, f"{len(state)} handles of state", "one: join fields in the body"),
    )
    return [
        Finding(
            code="E118", what=f"a loop {name!r} with {got}", where=declared_at(), expected=expected_
        )
        for holds, got, expected_ in checks
        if not holds
    ]


def not_repeated(inside: list[str], name: str) -> list[Finding]:
    """Findings about ops that a loop may not have in it; those of loops within it are found."""
    found = []
    for node in map(declared_node, inside):
        wanted = "ops that make rows: prompts, rollouts, rewards, forwards, loops of such"
        why = _why_once(node)
        if node.loop is None and why:
            found.append(
                Finding(
                    code="E125",
                    what=f"loop {name!r} cannot repeat {node.name!r}",
                    where=node.where,
                    got=why,
                    expected=wanted,
                )
            )
    return found


def _why_once(node: Node) -> str:
    """Why a node is not for every trip of a loop; empty where it is."""
    counts = node.op.name in COUNTING
    end = node.role(LoopEnd)
    if end is not None and end.keeps_surplus:
        return 'a loop with surplus="keep": its rows would be of the next trip'
    if node.op.recalls:
        return "it keeps rows from iteration to iteration"
    if node.op.chooses:
        moves = node.role(Balanced) is not None
        late = "it drops groups that are complete late: a loop draws as many as it needs"
        return "its replicas move rows to each other until all have ended" if moves else late
    if not counts and (node.op.effect == "effectful" or node.op.use == "train"):
        return "it has an effect beyond its rows"
    if not node.always:
        return f"it does not run in every iteration{due_text(node.every, node.within)}"
    return ""


def from_outside(
    inside: list[str], name: str, offers: dict[str, Offer], where: Source | None
) -> list[Finding]:
    """A finding for what a body returns that no op in it has made."""
    outer = [offer.name for offer in offers.values() if offer.source not in inside]
    if not outer:
        return []
    return [
        Finding(
            code="E126",
            what=f"the body of loop {name!r} returns what was made before it",
            where=where,
            got=f"{', '.join(sorted(outer))} of {offers[outer[0]].source}",
            expected="fields that its own ops make; others can be read where they were made",
        )
    ]


def of_other_rows(
    state: tuple[Handle, ...], handles: tuple[Handle, ...], name: str, where: Source | None
) -> list[Finding]:
    """A finding where what comes back is not of the rows that the state is of."""
    others = [handle for handle in handles for first in state[:1] if handle.rows != first.rows]
    return [
        Finding(
            code="E126",
            what=f"the body of loop {name!r} returns rows other than those of its state",
            where=where,
            got=f"{other.node} of the rows of {other.rows}",
            expected=f"fields of the rows of {state[0].rows}, which stay from trip to trip",
        )
        for other in others[:1]
    ]


def too_few(
    inside: list[str], name: str, groups: int | None, at_most: int, where: Source | None
) -> list[Finding]:
    """A finding where all trips together draw fewer prompts than groups are wanted."""
    own = [node for node in map(declared_node, inside) if node.loop is None]
    drawn = [node for node in own if node.op.rows in ("new", "gather")]
    batches = [batch_of(node) for node in drawn]
    if groups is None or len(batches) != 1 or batches[0] is None:
        return []
    most = batches[0] * at_most
    if at_most < 1 or most >= groups:
        return []
    return [
        Finding(
            code="E118",
            what=f"a loop {name!r} with groups={groups}",
            where=where,
            got=f"{at_most} trips of {_what_is_drawn(drawn[0])}: at most {most} groups",
            expected=f"at_most >= {-(-groups // batches[0])}, or more of them a trip",
        )
    ]


def _what_is_drawn(node: Node) -> str:
    return f"{batch_of(node)} {'groups' if node.ends_loop else 'prompts'}"
