"""Pass `stream`: chains of row ops are cut, so that other pools start on the first rows.

A chain begins with a rollout and goes on to the row and group ops that read nothing but its
rows. Chunks are equally many whole prompts, in their order. Batch ops, and whatever reads other
rows, wait for all chunks. Which count is best is asked of whoever can tell the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rlflow.errors import Finding, PlanError
from rlflow.graph.check import num_prompts
from rlflow.graph.graph import Graph, Node
from rlflow.scheduler.context import Context
from rlflow.scheduler.observed import parts_of
from rlflow.scheduler.plan import Action, Chunk, Cost, Dep, Plan, Reason
from rlflow.scheduler.rowchecks import nearest_divisors, uneven_chunks
from rlflow.scheduler.text import duration

AUTO = (1, 2, 4, 8)
MARGIN = 0.05
NO_CHAIN = "one piece: no rollout is followed by row ops of which other devices do one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A rollout and the nodes that may be cut with it, in the order of the graph.

    `prompts` is how many whole prompts an iteration has.
    """

    root: Node
    nodes: tuple[Node, ...]
    prompts: int


def stream(plan: Plan, context: Context) -> Plan:
    """Cut every chain that crosses pools into `context.chunks` chunks, a run each.

    Raises PlanError where prompts do not divide into so many chunks, or a chunk's prompts over
    the parts of an op that refuses uneven ones.
    """
    count = context.chunks
    if count == 1:
        return plan
    chains = crossing_chains(plan)
    if not chains:
        return plan.noting("stream", NO_CHAIN)
    findings = [finding for chain in chains for finding in _findings(plan, chain, count)]
    if findings:
        raise PlanError(*findings)
    prompts = {node.name: chain.prompts for chain in chains for node in chain.nodes}
    actions: list[Action] = []
    for action in plan.actions:
        if action.node in prompts:
            actions += _chunks(plan, action, prompts, context)
        else:
            actions.append(_after_all(action, prompts, count))
    return replace(plan, actions=tuple(actions))


def choose(bound: Plan, planned: Callable[[int], Plan]) -> tuple[int, str]:
    """The count of the shortest estimated iteration, and why: more only where worth `MARGIN`.

    `bound` is the plan before it is cut; `planned` compiles with a count. A count whose plan is
    refused is left out; if all are, the error of the first is raised.
    """
    chains = crossing_chains(bound)
    if not chains:
        return 1, NO_CHAIN
    counts = [n for n in AUTO if not any(_findings(bound, chain, n) for chain in chains)]
    if counts == [1]:
        prompts = " and ".join(str(chain.prompts) for chain in chains)
        return 1, f"one piece: {prompts} prompts divide into no even chunks"
    periods: dict[int, float | None] = {}
    refused: list[PlanError] = []
    for count in counts:
        try:
            timing = planned(count).timing
        except PlanError as error:
            refused.append(error)
        else:
            periods[count] = None if timing is None else timing.period
    if not periods:
        raise refused[0]
    best, *others = periods
    for count in others:
        period, shortest = periods[count], periods[best]
        if period is not None and shortest is not None and period < shortest * (1 - MARGIN):
            best = count
    return best, _why(best, periods)


def _why(best: int, periods: dict[int, float | None]) -> str:
    """The choice with its figures, against the best of the others."""
    shortest = periods[best]
    if shortest is None:
        return f"{_pieces(best)}: how long an iteration takes is not known"
    figures = {n: period for n, period in periods.items() if n != best and period is not None}
    said = f"{_pieces(best)}, {duration(shortest)} an iteration"
    if 1 in figures:
        return f"{said} against {duration(figures[1])} in one piece"
    if best > 1:
        return f"{said}: in one piece it does not fit"
    if not figures:
        return f"{said}: no plan with chunks fits"
    rival = min(figures, key=lambda n: (figures[n], n))
    return (
        f"{said}; {_pieces(rival)} would take {duration(figures[rival])}, and are taken where "
        f"they save {MARGIN:.0%}"
    )


def _pieces(count: int) -> str:
    return "one piece" if count == 1 else f"{count} chunks"


def crossing_chains(plan: Plan) -> tuple[Chain, ...]:
    """The chains of which some op works on rows that no device of its own has made.

    Where the devices of every op are among those that its rows come from, nothing could run
    beside anything; the host is a device like others.
    """
    roots = _roots(plan.graph)
    devices = {str(action.node): frozenset(action.devices) for action in plan.actions}
    above: dict[str, frozenset[frozenset[int]]] = {}
    crossed = set()
    for name in plan.graph.order():
        if name not in roots:
            continue
        sources = [source for source in plan.graph.node(name).sources if source in roots]
        above[name] = frozenset().union(*(above[source] for source in sources), [devices[name]])
        if any(devices[name].isdisjoint(others) for others in above[name]):
            crossed.add(roots[name])
    chains = []
    for root in (node for node in plan.graph.nodes if node.name in crossed):
        nodes = tuple(n for n in plan.graph.nodes if roots.get(n.name) == root.name)
        prompts = num_prompts(plan.graph, root)
        if prompts is not None:
            chains.append(Chain(root=root, nodes=nodes, prompts=prompts))
    return tuple(chains)


def _roots(graph: Graph) -> dict[str, str]:
    """The rollout that begins the chain of each node that may be cut, by the node's name."""
    found: dict[str, str] = {}
    for name in graph.order():
        node = graph.node(name)
        if not node.sources or not _cuttable(node):
            continue
        begun = {found.get(source) for source in node.sources}
        if begun == {None}:
            if node.op.rows == "expand":
                found[name] = name
        elif len(begun) == 1:
            (found[name],) = (root for root in begun if root is not None)
    return found


def _cuttable(node: Node) -> bool:
    """Whether an op's granularity allows working on some of the groups at a time."""
    op = node.op
    along = op.per in ("row", "group") and op.rows in ("expand", "same")
    return along and op.effect == "pure" and not (op.closing or op.collective or node.every > 1)


def _findings(plan: Plan, chain: Chain, count: int) -> list[Finding]:
    """What keeps a chain from being cut into so many chunks."""
    if chain.prompts % count:
        nearest = nearest_divisors(chain.prompts, count)
        return [
            Finding(
                code="E224",
                what=f"{chain.root.name}: {chain.prompts} prompts do not divide into "
                f"{count} chunks",
                where=chain.root.where,
                got=f"{chain.prompts} % {count} = {chain.prompts % count}",
                expected="chunks of equally many whole prompts",
                fix=" or ".join(f"stream={number}" for number in nearest),
            )
        ]
    runs = {action.node: action for action in plan.actions}
    each = chain.prompts // count
    return [
        finding
        for node in chain.nodes
        for finding in uneven_chunks(node, runs[node.name].takes, each, count)
    ]


def _chunks(plan: Plan, action: Action, prompts: dict[str, int], context: Context) -> list[Action]:
    """The runs of a node that is cut, each after its own chunk of what it reads.

    And after the chunk before: they are alike, so no other order is better.
    """
    count = context.chunks
    cost = _cost(plan, action, context)
    text = f"{action.reason.text}; {_purpose(plan, action, prompts, count)}"
    made: list[Action] = []
    for index in range(count):
        chunk = Chunk(index=index, count=count)
        after = tuple(
            replace(dep, action=f"{dep.action}{chunk}") if dep.action in prompts else dep
            for dep in action.after
        )
        if made:
            after = (*after, Dep(action=made[-1].id, distance=0, kind="order"))
        made.append(
            replace(
                action,
                id=f"{action.id}{chunk}",
                chunk=chunk,
                after=after,
                cost=cost,
                reason=Reason(rule="streamed", text=text),
            )
        )
    return made


def _after_all(action: Action, prompts: dict[str, int], count: int) -> Action:
    """An action in one piece, after all chunks of what it reads."""
    after: list[Dep] = []
    for dep in action.after:
        if dep.action in prompts:
            chunks = (Chunk(index=index, count=count) for index in range(count))
            after += (replace(dep, action=f"{dep.action}{chunk}") for chunk in chunks)
        else:
            after.append(dep)
    return replace(action, after=tuple(after))


def _purpose(plan: Plan, action: Action, prompts: dict[str, int], count: int) -> str:
    """What cutting a node is good for: those that start early, or what it goes along with."""
    name = str(action.node)
    readers = [n.name for n in plan.graph.nodes if n.name in prompts and name in n.sources]
    if not readers:
        return f"cut like {plan.graph.node(name).rows_of}, whose rows it reads"
    each = prompts[name] // count
    *more, last = readers
    who = f"{', '.join(more)} and {last}" if more else last
    groups = "group" if each == 1 else f"{each} groups"
    return f"cut so that {who} can start on the first {groups}"


def _cost(plan: Plan, action: Action, context: Context) -> Cost:
    """The cost of one chunk of a node's run."""
    node = plan.graph.node(str(action.node))
    instance = plan.instance(action.instance) if action.instance else None
    return context.costs.run(node, instance, parts_of(plan, action), context.chunks)
