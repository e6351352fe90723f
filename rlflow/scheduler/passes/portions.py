"""Pass `portions`: rollouts that two pools share out, so that devices which train help to draw.

With `also=` a rollout becomes two, each of some of the prompts, and a node of the rollout's name
that puts their rows together. The part of the devices that help waits for the update that they
make, and draws with its weights: `staleness` - 1 updates behind instead of `staleness`. All are
ordinary nodes, so the passes that bring weights, order, let sleep and verify need no rule for them.
How many prompts help takes is said, or what `with_shares_found` finds. The pass knows what ops
declare, and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from rlflow.errors import Finding, PlanError
from rlflow.graph.fields import Binding, Field
from rlflow.graph.graph import Graph, Node
from rlflow.graph.op import Input, Op
from rlflow.graph.placement import On, Placement
from rlflow.graph.roles import Drafted, Portion, Routed, SamplingOptions
from rlflow.graph.rules.check import row_counts
from rlflow.graph.rules.counts import Counts
from rlflow.graph.user.shares import part_of
from rlflow.scheduler.context import Context
from rlflow.scheduler.passes.bind.bind import assignment
from rlflow.scheduler.passes.oversample import why_together
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.text import duration

RULE = "portions"
EIGHTHS, FINEST = 8, 32
# Shares that are refused before help as a whole is.
REFUSED = 2
# What puts parts together reads these to log what a rollout logs.
NEEDED = frozenset({"response_tokens", "rollout_log_probs", "finished"})


def portions(plan: Plan, context: Context) -> Plan:
    """Cut every rollout that a second pool helps with in two, by prompts.

    Raises PlanError where a rollout cannot be shared out so, or nothing is.
    """
    placement = context.placement
    found = dict(helped(plan.graph, placement))
    asked = [(key, where) for key, where in placement.assign.items() if where.also is not None]
    findings = [f for name, on in found.items() for f in _findings(plan, name, on, placement)]
    if asked and not found:
        findings = [_idle(plan.graph, placement, *asked[0])]
    if findings:
        raise PlanError(*findings)
    nodes: list[Node] = []
    for node in plan.graph.nodes:
        if node.name not in found:
            nodes.append(node)
            continue
        where = found[node.name]
        parts = _parts(plan.graph, node, where)
        nodes += [*(each for pair in parts for each in pair), _gathered(node, parts)]
        plan = plan.noting(RULE, _text(plan.graph, node, where, parts))
    return replace(plan, graph=replace(plan.graph, nodes=tuple(nodes)))


def helped(graph: Graph, placement: Placement) -> Iterator[tuple[str, On]]:
    """The rollouts that a second pool is to help with, and where both are said."""
    for node in graph.nodes:
        where = assignment(node, placement)
        if where is not None and where.also is not None and _draws(node):
            yield node.name, where


def _draws(node: Node) -> bool:
    return node.op.use == "rollout" and node.op.rows == "expand"


def with_shares_found(
    graph: Graph, placement: Placement, period: Callable[[Placement], float | None]
) -> tuple[Placement, list[str]]:
    """The placement with every share that it leaves out, and why each: the shortest `period`.

    `period` is that of a plan in seconds, None for one that is refused. Shares are looked for in
    eighths of the prompts, then around the best in halves of that. The first is left to a plan's
    own findings where none is accepted.
    """
    texts = []
    for name, where in helped(graph, placement):
        total = _prompts(graph, graph.node(name))
        if where.share is not None or total < 2:
            continue
        alone = period(_alone(placement, where))
        known = _compared(placement, where, total, period, fits_alone=alone is not None)
        share = _shortest(known) if known else max(1, total // EIGHTHS)
        placement = _with_share(placement, where, share)
        texts += [_why(name, where, share, total, known[share], alone)] if known else []
    return placement, texts


def with_shares(graph: Graph, placement: Placement, known: Mapping[str, int]) -> Placement:
    """The placement with the shares that are `known` of rollouts, where it leaves them out."""
    for name, where in helped(graph, placement):
        if where.share is None and name in known:
            placement = _with_share(placement, where, known[name])
    return placement


def with_shares_of(placement: Placement, plan: Plan) -> Placement:
    """A placement that says the shares which its plan has."""
    for part, role in plan.graph.having(Portion):
        node = plan.graph.node(role.rollout)
        pool, every = plan.action(part.name).pool, placement.assign.values()
        open_ones = (on for on in every if on.also and on.also.pool == pool and on.share is None)
        where = next(open_ones, None)
        if role.helps and where is not None and node.counts is not None:
            placement = _with_share(placement, where, role.of - role.first)
    return placement


def _compared(
    placement: Placement,
    where: On,
    total: int,
    period: Callable[[Placement], float | None],
    *,
    fits_alone: bool,
) -> dict[int, float]:
    """Seconds of an iteration by how many of `total` prompts help takes, of some that fit.

    Where a rollout that nobody helps fits, but not the two smallest shares, devices that train
    have no room for its weights, and for more rows even less.
    """
    known: dict[int, float] = {}

    def compare(share: int) -> None:
        seconds = None if share in known else period(_with_share(placement, where, share))
        known.update({} if seconds is None else {share: seconds})

    for eighths in range(1, EIGHTHS - 1):
        compare(min(max(1, total * eighths // EIGHTHS), total - 1))
        if fits_alone and not known and eighths == REFUSED:
            break
    parts = EIGHTHS
    while known and parts < FINEST and total > parts:
        parts, best = parts * 2, _shortest(known)
        for share in (best - total // parts, best + total // parts):
            if 0 < share < total:
                compare(share)
    return known


def _shortest(known: dict[int, float]) -> int:
    return min(known, key=lambda share: (known[share], share))


def _with_share(placement: Placement, where: On, share: int) -> Placement:
    return _instead(placement, where, where.model_copy(update={"share": share}))


def _alone(placement: Placement, where: On) -> Placement:
    return _instead(placement, where, where.model_copy(update={"also": None, "share": None}))


def _instead(placement: Placement, where: On, other: On) -> Placement:
    assign = {key: other if on == where else on for key, on in placement.assign.items()}
    return placement.model_copy(update={"assign": assign})


def _why(name: str, where: On, share: int, total: int, seconds: float, alone: float | None) -> str:
    assert where.also is not None
    text = f"{name}: {share} of {total} prompts on {where.also.pool} make an iteration of "
    text += duration(seconds)
    return text if alone is None else f"{text}, {where.pool} alone one of {duration(alone)}"


def _prompts(graph: Graph, node: Node) -> int:
    """How many prompts a rollout draws of, a row each; 0 where that differs or is not known."""
    counts = row_counts(graph, graph.node(node.sources[0])) if node.sources else None
    return 0 if counts is None or not counts.fixed else counts.rows


def _share(where: On, total: int) -> int | None:
    """How many prompts help takes; None where that is no whole number of them, or leaves none."""
    if not isinstance(where.share, str):
        share = max(1, total // EIGHTHS) if where.share is None else where.share
        return share if 0 < share < total else None
    part = part_of(where.share)
    exact = None if part is None else part * total
    return int(exact) if exact is not None and exact.denominator == 1 and exact < total else None


def _parts(graph: Graph, node: Node, where: On) -> tuple[tuple[Node, Node], ...]:
    """The two parts of a rollout, each with the node that takes its prompts."""
    total, share = _prompts(graph, node), _share(where, _prompts(graph, node))
    assert share is not None
    assert where.also is not None
    bounds = (0, total - share, total)
    return tuple(
        _part(node, pool, (bounds[at], bounds[at + 1]), total, helps=bool(at))
        for at, pool in enumerate((where.pool, where.also.pool))
    )


def _part(
    node: Node, pool: str, bounds: tuple[int, int], total: int, *, helps: bool
) -> tuple[Node, Node]:
    """A part of a rollout of the prompts between two numbers, and the node that takes those."""
    assert node.op.divided is not None
    name, count = f"{node.name}@{pool}", bounds[1] - bounds[0]
    fields = tuple(replace(bound.field, name=bound.name) for bound in node.inputs)
    reads = tuple(Input(name=f.name, dtype=f.dtype, levels=(f.level,)) for f in fields)
    taken = Node(
        name=f"{name}.prompts",
        op=replace(node.op.divided[0], inputs=reads, outputs=fields),
        inputs=node.inputs,
        params=(("groups", bounds),),
        every=node.every,
        within=node.within,
        rows_of=f"{name}.prompts",
        counts=Counts(groups=count, rows=count, least=count),
        where=node.where,
    )
    bound = tuple(Binding(name=f.name, source=taken.name, field=f) for f in fields)
    role = Portion(rollout=node.name, first=bounds[0], last=bounds[1], of=total, helps=helps)
    return taken, replace(node, name=name, inputs=bound, rows_of=name).being(role)


def _gathered(node: Node, parts: tuple[tuple[Node, Node], ...]) -> Node:
    """The node that puts the parts together, under the name of the rollout."""
    assert node.op.divided is not None
    made, total = node.op.outputs, sum(taken.counts.rows for taken, _ in parts if taken.counts)
    inputs = tuple(
        Binding(name=field.name, source=part.name, field=field, part=at)
        for at, (_, part) in enumerate(parts)
        for field in made
    )
    words = SamplingOptions.words()
    rows = total * int(node.as_a(SamplingOptions).n or 1)
    return Node(
        name=node.name,
        op=_of_fields(node.op.divided[1], made, len(parts)),
        inputs=inputs,
        params=(*(said for said in node.params if said[0] in words), ("parts", len(parts))),
        every=node.every,
        within=node.within,
        rows_of=node.name,
        counts=Counts(groups=total, rows=rows, least=total),
        where=node.where,
    )


def _of_fields(op: Op, fields: tuple[Field, ...], parts: int) -> Op:
    inputs = tuple(
        Input(name=f.name, dtype=f.dtype, levels=(f.level,), required=f.name in NEEDED, part=part)
        for part in range(parts)
        for f in fields
    )
    return replace(op, inputs=inputs, outputs=fields)


def _text(graph: Graph, node: Node, where: On, parts: tuple[tuple[Node, Node], ...]) -> str:
    """Who draws how many prompts, and of which weights."""
    assert where.also is not None
    counts = [taken.counts.rows for taken, _ in parts if taken.counts]
    text = f"{node.name} is shared out: {where.pool} draws {counts[0]} prompts, "
    text += f"{where.also.pool} {counts[1]} while nothing trains there"
    learns = node.model is not None and graph.updates(node.model)
    if not learns or not graph.staleness:
        return text
    behind = [
        f"{lag} update{'' if lag == 1 else 's'} behind on {pool}"
        for pool, lag in ((where.pool, graph.staleness), (where.also.pool, graph.staleness - 1))
    ]
    return f"{text}; weights are {behind[0]}, {behind[1]}"


def _findings(plan: Plan, name: str, where: On, placement: Placement) -> Iterator[Finding]:
    """Why a rollout cannot be shared out, or not so."""
    graph, node = plan.graph, plan.graph.node(name)
    total, also = _prompts(graph, node), where.also
    assert also is not None
    mine, theirs = (set(plan.pools[pool]) for pool in (where.pool, also.pool))
    homes = [assignment(n, placement) for n in graph.nodes if n.op.use == "train"]
    trained = {d for home in homes if home is not None for d in plan.pools[home.pool]}
    reasons = (
        (node.loop is not None, f"it is in a loop, {node.loop}"),
        (node.op.divided is None, f"op {node.op.name} is not to be divided"),
        (node.op.chooses, why_together(node)),
        (node.role(Drafted) is not None, "a drafter proposes its tokens"),
        (node.role(Routed) is not None, "it records routing"),
        (any(f.dtype == "image" for f in (b.field for b in node.inputs)), "it sees pictures"),
        (total < 2, f"it draws of {total or 'a number of prompts that differs'}"),
        (placement.pause_at is not None, "pause_at says where it takes newer weights"),
        (placement.continuous, "continuous has it never drain"),
        (bool(mine & theirs), f"pools {where.pool} and {also.pool} have devices in common"),
        (theirs.isdisjoint(trained), f"nothing trains on pool {also.pool}"),
    )
    wrong = [got for holds, got in reasons if holds]
    for got in wrong:
        near = [h.pool for h in homes if h is not None and mine.isdisjoint(plan.pools[h.pool])]
        yield Finding(
            code="E294",
            what=f"{name} on {where.pool} cannot be shared out with {also.pool}",
            where=node.where,
            got=got,
            expected="a rollout of two prompts or more that drains, and a pool that trains, apart "
            f"from {where.pool}",
            fix=f'rf.on("{where.pool}", also="{near[0]}")'
            if near and also.pool not in near
            else f'rf.on("{where.pool}")',
        )
    if not wrong and _share(where, total) is None:
        yield _uneven(node, where, total)


def _uneven(node: Node, where: On, total: int) -> Finding:
    part = part_of(where.share) if isinstance(where.share, str) else None
    wanted = (
        total / 2 if where.share is None else float(where.share if part is None else part * total)
    )
    nearest = min(max(round(wanted), 1), total - 1)
    assert where.also is not None
    return Finding(
        code="E295",
        what=f"share={where.share!r} of the {total} prompts of {node.name} is no number of them",
        where=node.where,
        got=f"{wanted:g} of {total} on {where.also.pool}",
        expected=f"1 to {total - 1} whole prompts",
        fix=f'rf.on("{where.pool}", also="{where.also.pool}", share={nearest})',
    )


def _idle(graph: Graph, placement: Placement, key: str, where: On) -> Finding:
    """What says that `also=` is not where a rollout is placed; the line is of one that there is."""
    assert where.also is not None
    fix = f'"{key}": rf.on("{where.pool}")'
    for node in graph.nodes:
        home = assignment(node, placement) if _draws(node) else None
        near = [p for p in (where.also.pool, where.pool) if home is not None and p != home.pool]
        if home is not None and near:
            fix = f'"{node.name}": rf.on("{home.pool}", also="{near[0]}")'
            break
    return Finding(
        code="E294",
        what=f"also={where.also.pool!r} of {key!r} would do nothing",
        where=graph.source,
        got=f"no rollout is placed by {key!r}",
        expected="the use of a model that draws the samples to learn from",
        fix=fix,
    )
