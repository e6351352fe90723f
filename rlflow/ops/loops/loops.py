"""Loops: a part of the graph that runs again until enough is there, a bounded number of times.

`repeat` declares the ops of one trip; the compiler makes as many copies as there may be trips,
and the executor leaves out those that come after the goal is reached. A loop in a body begins anew
in each trip. Contracts only: the bodies are in `rlflow.ops.bodies.loops.loops`, and nothing here
imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlflow.errors import Finding, Source, known_names, near_names
from rlflow.graph.fields import Field, row
from rlflow.graph.op import Input, Op
from rlflow.graph.roles import LoopEnd, LoopGate, SamplingOptions
from rlflow.graph.source import declared_at
from rlflow.graph.trace import (
    Handle,
    Offer,
    add_node,
    checked_name,
    declared_names,
    declared_node,
    free_name,
    merged_handles,
    put_in_loop,
    report_finding,
)
from rlflow.ops.loops.checks import (
    Exhausted,
    Surplus,
    from_outside,
    not_repeated,
    of_other_rows,
    too_few,
    wrong,
)

GROUP = Input(name="group", dtype="int64", levels=("row",))
INFORMATIVE = Op(
    name="informative",
    body="rlflow.ops.bodies.loops.loops:informative",
    inputs=(
        Input(name="reward", dtype="float32", levels=("row",)),
        GROUP,
        Input(name="valid", dtype="bool", levels=("row",), required=False),
    ),
    outputs=(row("informative", "bool"),),
    per="group",
)

# Options of a rollout that say what its rows are like.
SAMPLED = ("n", "max_new_tokens", "max_tokens", "temperature")

ASSUMED_TRIPS = 1.5


def informative(*handles: Handle, name: str | None = None) -> Handle:
    """Mark the groups whose rewards differ: bool `informative`, equal for all rows of a group.

    A group of equal rewards teaches a group-relative estimator nothing (Yu et al. 2025, arXiv
    2503.14476, section 3.2). Rewards are equal where the largest is the smallest. Rows that are
    not `valid` do not count, and a group without valid rows is not informative.
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
    """Repeat the ops that `body` declares, at most `at_most` times (trips) within an iteration.

    With `groups`, each trip makes rows of its own. The loop ends once that many groups have a true
    `until` (a bool row field); these are its rows, in the order of trips. Groups beyond that are
    dropped, or with `surplus="keep"` come first in the next iteration, one update older than its
    own (a checkpoint drops them). Where `at_most` trips do not suffice the run stops with what was
    found, or with `exhausted="fill"` is filled up with the first of the other groups.

    With `state`, the body is called with a handle of its fields. The fields that it makes anew are
    the state of the next trip. Rows stay, and the loop ends when `until` is true for all of them.

    `expected` is the number of trips that estimates count with: by default the mean of earlier
    runs, or 1.5.
    """
    where = declared_at()
    wanted = checked_name(name or free_name("repeat"))
    said = {"exhausted": exhausted, "surplus": surplus}
    for finding in wrong(at_most, groups, expected, state, said, wanted):
        report_finding(finding)
    before = set(declared_names())
    handles = _returned(body(*state), state, wanted, where)
    offers = {offer.name: offer for handle in handles for offer in handle.offers}
    inside = [node for node in declared_names() if node not in before]
    found = [*not_repeated(inside, wanted), *from_outside(inside, wanted, offers, where)]
    found += too_few(inside, wanted, groups, at_most, where)
    found += of_other_rows(state, handles, wanted, where)
    if until not in offers:
        found.append(_ends_by_nothing(wanted, until, offers, where))
    carried = _carried(state, offers, wanted, where, found)
    for finding in found:
        report_finding(finding)
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
    for node in (name for name in inside if declared_node(name).loop is None):
        put_in_loop(node, handle.node)
    return merged_handles(*state, handle)


def _trips(expected: float | None, at_most: int) -> dict[str, object]:
    """How many trips a plan counts with, and whether nobody said it."""
    if expected:
        return {"expected": expected}
    return {"expected": min(ASSUMED_TRIPS, float(at_most)), "assumed": True}


def _gate(name: str, until: str, groups: int | None, handles: tuple[Handle, ...]) -> str:
    """The node that ends a trip: it says how much of the goal that has reached."""
    op = Op(
        name="gate",
        roles=(LoopGate,),
        body=f"rlflow.ops.bodies.loops.loops:{'groups_reached' if groups else 'all_done'}",
        inputs=(Input(name=until, dtype="bool", levels=("row",)), *((GROUP,) if groups else ())),
        outputs=(),
        per="batch",
        rows="none",
        effect="effectful",
    )
    params = LoopGate(when=until, goal=float(groups or 1)).options()
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
        roles=(LoopEnd, SamplingOptions),
        body=f"rlflow.ops.bodies.loops.loops:{'gather' if gathers else 'last'}",
        inputs=tuple(Input(name=f.name, dtype=f.dtype, levels=(f.level,)) for f in fields),
        outputs=fields,
        per="batch",
        rows="gather" if gathers else "same",
        dispatch="first",
        hands_on=True,
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
            report_finding(
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
