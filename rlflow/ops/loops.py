"""Loops: a part of the graph that runs again until enough is there, a bounded number of times.

`repeat` declares the ops of one trip; the compiler makes as many copies as there may be trips,
and the executor leaves out those that come after the goal is reached. Contracts only: the bodies
are in `rlflow.ops.bodies.loops`, and nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, get_args

from rlflow.errors import Finding, Source, known_names, near_names
from rlflow.graph.fields import Field, row
from rlflow.graph.op import Input, Op
from rlflow.graph.trace import (
    Handle,
    Offer,
    add_node,
    checked_name,
    declared_at,
    declared_names,
    declared_node,
    joined,
    put_in_loop,
    report,
)

GROUP = Input(name="group", dtype="int64", levels=("row",))
INFORMATIVE = Op(
    name="informative",
    body="rlflow.ops.bodies.loops:informative",
    inputs=(
        Input(name="reward", dtype="float32", levels=("row",)),
        GROUP,
        Input(name="valid", dtype="bool", levels=("row",), required=False),
    ),
    outputs=(row("informative", "bool"),),
    per="group",
)
Exhausted = Literal["error", "fill"]
Surplus = Literal["drop", "keep"]
CHOICES = {"exhausted": get_args(Exhausted), "surplus": get_args(Surplus)}

# Options of a rollout that say what its rows are like.
SAMPLED = ("n", "max_new_tokens", "max_tokens", "temperature")

ASSUMED_TRIPS = 1.5
# Ops with an effect that each trip may have for itself.
COUNTING = ("reward_failures", "track")


def informative(*handles: Handle, name: str | None = None) -> Handle:
    """Which groups have rewards that differ: bool `informative`, equal for all rows of a group.

    The others teach a group-relative estimator nothing (Yu et al. 2025, arXiv 2503.14476,
    section 3.2). Rewards are all equal where their largest is their smallest; rows that are not
    `valid` have none, and a group without valid rows is not informative.
    """
    return add_node(INFORMATIVE, handles, name=name)


def repeat(
    body: Callable[..., Handle | tuple[Handle, ...]],
    *state: Handle,
    until: str,
    at_most: int,
    groups: int | None = None,
    expected: float | None = None,
    exhausted: Exhausted = "error",
    surplus: Surplus = "drop",
    name: str | None = None,
) -> Handle:
    """Run the ops that `body` declares again and again, at most `at_most` times an iteration.

    With `groups`, each trip makes rows of its own, and the loop ends when that many groups
    have a true `until` (a bool row field): those are its rows, in the order of trips. Further
    ones are dropped, or with `surplus="keep"` they are the first of the next iteration, one
    update older than its own (a checkpoint drops them). Where `at_most` trips do not suffice
    the run stops with what was found, or with `exhausted="fill"` the first of the other groups
    fill up.

    With `state`, the body is called with a handle of its fields, and those that it makes anew are
    the state of the next trip; rows stay, and the loop ends when `until` is true for all of them.

    `expected` is how many trips the plan counts with: unless said those of earlier runs, or 1.5.
    """
    where = declared_at()
    wanted = checked_name(name or "repeat")
    said = {"exhausted": exhausted, "surplus": surplus}
    for finding in _wrong(at_most, groups, expected, state, said, wanted):
        report(finding)
    before = set(declared_names())
    handles = _returned(body(*state), state, wanted, where)
    offers = {offer.name: offer for handle in handles for offer in handle.offers}
    inside = [node for node in declared_names() if node not in before]
    found = [*_not_repeated(inside, wanted), *_from_outside(inside, wanted, offers, where)]
    found += _too_few(inside, wanted, groups, at_most, where)
    found += _of_other_rows(state, handles, wanted, where)
    if until not in offers:
        found.append(_ends_by_nothing(wanted, until, offers, where))
    carried = _carried(state, offers, wanted, where, found)
    for finding in found:
        report(finding)
    if until not in offers:
        rows = next((handle.rows for handle in handles), None)
        return Handle(node=wanted, rows=rows, offers=tuple(offers.values()))
    inside.append(_gate(wanted, until, groups, handles))
    params = {
        "when": until,
        "at_most": at_most,
        **_trips(expected, at_most),
        **({"batch": groups, "exhausted": exhausted} if groups else {}),
        **({"surplus": surplus} if surplus != "drop" else {}),
        **_sampled(inside),
    }
    if state:
        params["carried"] = carried
    handle = _end(wanted, tuple(offers.values()), handles, params, bool(groups))
    for node in inside:
        put_in_loop(node, handle.node)
    return joined(*state, handle)


def _trips(expected: float | None, at_most: int) -> dict[str, object]:
    """How many trips a plan counts with, and whether nobody said it."""
    if expected:
        return {"expected": expected}
    return {"expected": min(ASSUMED_TRIPS, float(at_most)), "assumed": True}


def _gate(name: str, until: str, groups: int | None, handles: tuple[Handle, ...]) -> str:
    """The node that ends a trip: it says how much of the goal that has reached."""
    op = Op(
        name="gate",
        body=f"rlflow.ops.bodies.loops:{'groups_reached' if groups else 'all_done'}",
        inputs=(Input(name=until, dtype="bool", levels=("row",)), *((GROUP,) if groups else ())),
        outputs=(),
        per="batch",
        rows="none",
        effect="effectful",
    )
    params = {"when": until, "goal": float(groups or 1)}
    return add_node(op, handles, params=params, name=f"{name}.gate").node


def _ends_by_nothing(
    name: str, until: str, offers: dict[str, Offer], where: Source | None
) -> Finding:
    return Finding(
        code="E124",
        what=f"loop {name!r} ends by {until!r}, which its body does not return",
        where=where,
        expected=f"a bool row field of {known_names(sorted(offers))}",
        near=near_names(until, offers),
    )


def _end(
    name: str,
    offers: tuple[Offer, ...],
    handles: tuple[Handle, ...],
    params: dict[str, object],
    gathers: bool,
) -> Handle:
    """The node that ends a loop: it has all fields that a trip returns."""
    fields: tuple[Field, ...] = tuple(_named(offer) for offer in offers)
    op = Op(
        name="repeat",
        body=f"rlflow.ops.bodies.loops:{'gather' if gathers else 'last'}",
        inputs=tuple(Input(name=f.name, dtype=f.dtype, levels=(f.level,)) for f in fields),
        outputs=fields,
        per="batch",
        rows="gather" if gathers else "same",
        dispatch="first",
    )
    return add_node(op, handles, params=params, name=name)


def _named(offer: Offer) -> Field:
    """A field under the name it is offered by."""
    return replace(offer.field, name=offer.name)


def _returned(
    made: object, state: tuple[Handle, ...], name: str, where: Source | None
) -> tuple[Handle, ...]:
    """The handles that a body has returned, with what it has made; what is none is a finding."""
    handles = made if isinstance(made, tuple) else (made,)
    for other in handles:
        if not isinstance(other, Handle):
            report(
                Finding(
                    code="E126",
                    what=f"the body of loop {name!r} returned something that is not a handle",
                    where=where,
                    got=f"{type(other).__name__}: {other!r:.80}",
                    expected="the handles of the rows that a trip makes",
                )
            )
    same = {offer for handle in state for offer in handle.offers}
    return tuple(
        replace(handle, offers=tuple(offer for offer in handle.offers if offer not in same))
        for handle in handles
        if isinstance(handle, Handle)
    )


def _carried(
    state: tuple[Handle, ...],
    offers: dict[str, Offer],
    name: str,
    where: Source | None,
    found: list[Finding],
) -> tuple[tuple[str, str, str, str], ...]:
    """Of each field of the state where it begins, and which node's field takes its place.

    Adds a finding for a field that comes back as another one, and for a state that does not
    come back at all.
    """
    if not state:
        return ()
    pairs = [(first, offers[first.name]) for first in state[0].offers if first.name in offers]
    for first, after in pairs:
        if (first.field.dtype, first.field.level) != (after.field.dtype, after.field.level):
            found.append(
                Finding(
                    code="E104",
                    what=f"loop {name!r} cannot go on with {first.name!r} of {after.source!r}",
                    where=where,
                    got=str(_named(after)),
                    expected=str(_named(first)),
                )
            )
    if not pairs:
        found.append(
            Finding(
                code="E118",
                what=f"a loop {name!r} whose trips all do the same",
                where=where,
                got=f"its body returns {known_names(sorted(offers))}",
                expected="a field of the state: "
                + known_names(sorted(offer.name for offer in state[0].offers)),
            )
        )
    return tuple((a.source, a.field.name, b.source, b.field.name) for a, b in pairs)


def _sampled(inside: list[str]) -> dict[str, object]:
    """What the rows that a loop gathers are like: samples of a prompt, tokens of a response."""
    found: dict[str, object] = {}
    for node in map(declared_node, inside):
        if node.op.use == "rollout":
            found = {key: value for key, value in node.params if key in SAMPLED} | found
    return {key: found[key] for key in SAMPLED if key in found}


def _wrong(
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


def _not_repeated(inside: list[str], name: str) -> list[Finding]:
    """Findings about ops that a loop may not have in it."""
    found = []
    for node in map(declared_node, inside):
        why = ""
        if node.ends_loop:
            why = "it is a loop itself"
        elif node.loop is not None:
            continue
        elif node.op.name not in COUNTING and (
            node.op.effect == "effectful" or node.op.use == "train"
        ):
            why = "it has an effect beyond its rows"
        elif node.every > 1:
            why = f"it runs every {node.every} iterations"
        if why:
            found.append(
                Finding(
                    code="E125",
                    what=f"loop {name!r} cannot repeat {node.name!r}",
                    where=node.where,
                    got=why,
                    expected="ops that make rows: prompts, rollouts, rewards, forwards",
                )
            )
    return found


def _from_outside(
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


def _of_other_rows(
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


def _too_few(
    inside: list[str], name: str, groups: int | None, at_most: int, where: Source | None
) -> list[Finding]:
    """A finding where all trips together draw fewer prompts than groups are wanted."""
    drawn = [node for node in map(declared_node, inside) if node.op.rows == "new"]
    batches = [dict(node.params).get("batch") for node in drawn]
    if groups is None or len(batches) != 1 or not isinstance(batches[0], int):
        return []
    most = batches[0] * at_most
    if at_most < 1 or most >= groups:
        return []
    return [
        Finding(
            code="E118",
            what=f"a loop {name!r} with groups={groups}",
            where=where,
            got=f"{at_most} trips of {batches[0]} prompts: at most {most} groups",
            expected=f"at_most >= {-(-groups // batches[0])}, or more prompts a trip",
        )
    ]
