"""Pass `transfer`: carries rows to where they are read, once for all nodes that read them alike.

An edge whose two ends agree on how the rows lie needs no transfer. The pass compares spreads;
the rows of each part are computed where the plan runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from rlflow.scheduler.context import Context
from rlflow.scheduler.costs.distributions import carried
from rlflow.scheduler.costs.pieces import chunk_piece
from rlflow.scheduler.plan.plan import Action, Chunk, Dep, Plan, Reason, Spread
from rlflow.scheduler.plan.row_layout import in_place, sources_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unlike:
    """Rows of a node that lie otherwise than some actions read them: which, and fields.

    `sources` are the runs that make them: of all readers' chunk, or all where they have none.
    """

    sources: tuple[Action, ...]
    takes: Spread
    readers: tuple[Action, ...]
    fields: tuple[str, ...]


def transfer(plan: Plan, context: Context) -> Plan:
    """Insert a transfer for each node and each way in which its rows are read elsewhere.

    A reader's chunk is carried by itself; who reads all chunks gets them together, as what part
    a row belongs to depends on all rows. In one process rows stay where they are; a note says
    how many edges cross pools.
    """
    demands = list(_demands(plan))
    if plan.backend == "local":
        crossing = {(d.sources[0].node, reader.node) for d in demands for reader in d.readers}
        if not crossing:
            return plan
        return plan.noting(
            "no transfer",
            f"{len(crossing)} edges cross pools within one process: rows stay where they are",
        )
    actions = {action.id: action for action in plan.actions}
    for demand in demands:
        made = _transfer(plan, demand, set(actions), context)
        actions[made.id] = made
        sources = {source.id for source in demand.sources}
        for reader in demand.readers:
            actions[reader.id] = _after(actions[reader.id], sources, made.id)
    return replace(plan, actions=tuple(actions.values()))


def _demands(plan: Plan) -> Iterator[_Unlike]:
    """Edges whose ends differ, those of one node, one chunk and one spread together."""
    runs: dict[str, list[Action]] = {}
    for action in plan.actions:
        if action.kind == "run":
            runs.setdefault(str(action.node), []).append(action)
    found: dict[tuple[str, Spread, Chunk | None], tuple[list[Action], set[str]]] = {}
    for edge in plan.graph.edges:
        if edge.kind != "data":
            continue
        for target in runs[edge.target]:
            source = sources_of(runs[edge.source], target.piece_read)[0]
            if target.takes is not None and not in_place(source, target, target.takes):
                key = (edge.source, target.takes, target.piece_read)
                readers, fields = found.setdefault(key, ([], set()))
                readers.append(target)
                fields.update(edge.fields)
    for (name, spread, chunk), (readers, fields) in found.items():
        yield _Unlike(
            sources=sources_of(runs[name], chunk),
            takes=spread,
            readers=tuple(readers),
            fields=tuple(sorted(fields)),
        )


def _transfer(plan: Plan, demand: _Unlike, taken: set[str], context: Context) -> Action:
    first = demand.readers[0]
    source, pool, chunk = demand.sources[0], first.pool, first.piece_read
    assert source.makes is not None
    names = ", ".join(demand.fields)
    readers = " and ".join(reader.id for reader in demand.readers)
    elsewhere = set(source.makes.devices) != set(demand.takes.devices)
    maker = source.id if len(demand.sources) == 1 else f"{source.node}"
    where = f"{maker} makes {names} on {source.pool}" + _shared_out(source.makes)
    where += f", in {len(demand.sources)} chunks" if len(demand.sources) > 1 else ""
    verb = "read" if len(demand.readers) > 1 else "reads"
    text = f"{where}; {readers} {verb} on {pool}{_shared_out(demand.takes)}"
    node = plan.graph.node(str(source.node))
    made = [field for field in node.op.outputs if field.name in demand.fields]
    whole = context.costs.fields(node, demand.fields)
    moved = int(whole * moved_share(source.makes, demand.takes))
    share = chunk_piece(chunk, begins=False).share
    cost = context.costs.copy(int(moved * share), kind="transfer")
    wide = context.costs.fields(node, tuple(f.name for f in made if f.width))
    return Action(
        id=_unused(f"transfer:{source.node}->{pool}{chunk or ''}", taken),
        kind="transfer",
        reason=Reason(rule="rows elsewhere" if elsewhere else "other parts", text=text),
        devices=demand.takes.devices,
        pool=pool,
        node=source.node,
        fields=demand.fields,
        after=tuple(Dep(action=s.id, distance=0, kind="data") for s in demand.sources),
        takes=source.makes,
        makes=demand.takes,
        transport="object store",
        cost=carried(cost, wide * share, demand.takes, on_host=context.cluster.is_cpu),
        every=source.every,
        within=source.within,
        chunk=chunk,
        trip=None if source.trip is None else replace(source.trip, gate=False),
        chance=source.chance,
    )


def _shared_out(spread: Spread) -> str:
    """How rows lie over several parts, in words."""
    if len(spread.parts) == 1:
        return ", all on each rank" if len(spread.devices) > 1 else ""
    rules = {
        "balanced": "balanced by tokens",
        "balanced rows": "balanced by tokens, the samples of a prompt apart,",
        "balanced samples": f"each prompt for {spread.pieces} equal shares of its samples,",
        "generated": "as generated",
    }
    each = "parts" if len(spread.devices) > len(spread.parts) else "ranks"
    return f", {rules.get(spread.rule, f'by {spread.rule}')} over {len(spread.parts)} {each}"


def _unused(wanted: str, taken: set[str]) -> str:
    """The name, or a numbered one where an action has it."""
    number, name = 1, wanted
    while name in taken:
        number += 1
        name = f"{wanted}#{number}"
    return name


def moved_share(source: Spread, target: Spread) -> float:
    """The rows that have to move, as a part of all rows, where parts are equally large.

    A row is put once for all ranks of a part that lack it. Rows of a part that is cut by
    another rule are taken to lie anywhere: of a part of 1 / p of the rows, a process that holds
    1 / q of them in the source has 1 / q. All rows in one process, none move. Rows
    that are laid out several times move as often.
    """
    if source == target:
        return 0.0
    held = {device: 1 / len(source.parts) for device in source.devices}
    lacking = sum(max(1 - held.get(device, 0.0) for device in part) for part in target.parts)
    return lacking / len(target.parts) * target.pieces


def _after(reader: Action, sources: Collection[str], moved: str) -> Action:
    """A reader that waits for the transfer in place of the runs that made the rows."""
    after = dict.fromkeys(
        replace(dep, action=moved) if dep.kind == "data" and dep.action in sources else dep
        for dep in reader.after
    )
    return replace(reader, after=tuple(after))
