"""Refuses rows that cannot lie as an op declares: the findings of passes `bind` and `stream`.

These are an unknown rule, parts on other devices, a rank left out of several that compute
together, and rows that do not divide. This file decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlflow.errors import Finding, known_names, near_names
from rlflow.graph.graph import Graph, Node
from rlflow.graph.op import DISPATCHES
from rlflow.graph.rules.check import num_prompts, row_counts
from rlflow.graph.rules.counts import Counts
from rlflow.graph.rules.steps import mini_batches
from rlflow.graph.user.dispatch import RULES, registered
from rlflow.scheduler.plan.plan import Spread
from rlflow.scheduler.plan.row_layout import Place, least_rows


def dispatch_findings(node: Node, place: Place, made: Mapping[str, Spread]) -> list[Finding]:
    """What keeps a node's rows from lying as its op says."""
    how = node.op.dispatched
    if how not in DISPATCHES and how not in registered():
        return [_unknown(node, how)]
    if node.op.dispatch == "first" and place.sharded:
        return [_left_out(node, place)]
    if how == "parts" and node.inputs and len(place.row_parts) > 1:
        return _parts_findings(node, place, made)
    return []


def state_findings(graph: Graph, places: Mapping[str, Place]) -> list[Finding]:
    """A finding for each node that shares a state with others and runs in another process."""
    found = []
    for node in graph.nodes:
        _, writers = graph.sharing(node.shares) if node.shares else ((), ())
        if not writers:
            continue
        writer, own = places[writers[0].name], places[node.name]
        if own.devices == writer.devices and len(own.devices) == 1:
            continue
        found.append(
            Finding(
                code="E646",
                what=f"{node.name!r} and {writers[0].name!r} share {node.shares!r} and do not run "
                "in one process",
                where=node.where,
                got=f"{own.pool} with {_counted(own)}, {writer.pool} with {_counted(writer)}",
                expected="both on the host, or both in one pool of one device",
                fix=f"leave {node.name!r} and {writers[0].name!r} out of the placement",
            )
        )
    return found


def _counted(place: Place) -> str:
    return f"{len(place.devices)} device{'' if len(place.devices) == 1 else 's'}"


def _unknown(node: Node, how: str) -> Finding:
    names = [*DISPATCHES, *registered()]
    return Finding(
        code="E219",
        what=f"{node.name}: no dispatch {how!r} is registered",
        where=node.where,
        expected=known_names(names),
        near=near_names(how, names),
        fix=f'rf.register_dispatch("{how}", ...) at the top of the pipeline file',
    )


def _left_out(node: Node, place: Place) -> Finding:
    count = len(place.devices)
    return Finding(
        code="E221",
        what=f'{node.name}: dispatch="first" leaves out {count - 1} of {count} ranks of '
        f"{place.instance.name if place.instance else place.pool}",
        where=node.where,
        got="its ranks compute together, so each of them has to take part",
        fix='dispatch="all"',
    )


def _parts_findings(node: Node, place: Place, made: Mapping[str, Spread]) -> list[Finding]:
    """Rows may stay as they lie where all sources left them alike, on the ranks that read them."""
    spreads = {source: made[source] for source in node.sources}
    one = next(iter(spreads.values()))
    alike = len(set(spreads.values())) == 1 and one.rule in RULES
    if alike and one.parts in (place.row_parts, (place.devices,)):
        return []
    rows = [
        f"{source}: {spread.describe()} on devices {list(spread.devices)}"
        for source, spread in spreads.items()
    ]
    return [
        Finding(
            code="E220",
            what=f'{node.name}: dispatch="parts" reads rows as they lie, and they do not lie so '
            f"on its devices {list(place.devices)}",
            where=node.where,
            got="\n".join(rows),
            expected=f"{len(place.row_parts)} parts on these devices, or all rows on each of "
            "them; rules of your own are asked anew by every op",
            fix='dispatch="split"',
        )
    ]


def division_findings(graph: Graph, node: Node, taken: Spread | None) -> list[Finding]:
    """E214 where parts would be empty, or differ though the op refuses that.

    Rows are shared out by prompt, the samples of one together, and mini-batch by mini-batch; by
    row or sample where `cut_groups` has said so.
    """
    groups = num_prompts(graph, node)
    if taken is None or groups is None or len(taken.parts) == 1:
        return []
    batches, parts = mini_batches(node), len(taken.parts)
    counts = row_counts(graph, node)
    groups = groups if counts is None else min(groups, counts.least)
    each = groups // batches
    too_few = each < parts and taken.rule == "balanced"
    even = node.op.uneven == "pad" or (each % parts == 0 and (counts is None or counts.fixed))
    if not too_few and even:
        return []
    within = "" if batches == 1 else f", {batches} mini-batches of them"
    _, rows = least_rows(graph, node)
    apart = too_few and node.op.uneven == "pad" and rows // batches < parts
    few = f"{rows // batches} rows" if apart else f"{each} prompts"
    return [
        Finding(
            code="E214",
            what=f"{node.name}: {few} do not split over {parts} ranks"
            + ("" if apart else ", groups kept whole"),
            where=node.where,
            got=f"{groups} prompts{within}" + ("" if even else _differing(counts)),
            expected=f"{parts} or more" if too_few else f"a multiple of {parts}",
            fix="a larger batch, or tp= so that ranks share the prompts"
            if node.model
            else f"leave {node.name!r} out of the placement: the host then has all rows",
        )
    ]


def _differing(counts: Counts | None) -> str:
    """How many there are, where that is not the same in every iteration."""
    return "" if counts is None or counts.fixed else f" at least, of {counts.describe()}"


def uneven_chunks(node: Node, taken: Spread | None, each: int, count: int) -> list[Finding]:
    """E225 where the `each` prompts of a chunk differ from part to part and the op refuses that."""
    if taken is None or node.op.uneven == "pad" or each % len(taken.parts) == 0:
        return []
    parts = len(taken.parts)
    return [
        Finding(
            code="E225",
            what=f"{node.name}: the {each} prompts of a chunk do not split over {parts} ranks",
            where=node.where,
            got=f'{each * count} prompts in {count} chunks, and uneven="refuse"',
            expected=f"chunks of a multiple of {parts} prompts",
            fix='fewer chunks, or uneven="pad"',
        )
    ]


def nearest_divisors(number: int, wanted: int) -> tuple[int, ...]:
    """The divisors of a number next below and above what was wanted, ascending."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < wanted]
    above = [d for d in divisors if d > wanted]
    return (*below[-1:], *above[:1])
