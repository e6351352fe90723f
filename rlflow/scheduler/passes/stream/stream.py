"""Pass `stream`: cuts chains of row ops into chunks, so that other pools start on the first rows.

A chain begins with a rollout and goes on to the ops that read nothing but its rows. It is cut
in one of three ways:

- In order of completion, where responses end by themselves. The rollout decodes all rows together
  and hands each chunk on when its last row has ended. Row ops follow in chunks, group ops wait.
- By complete groups, in the order in which they are, where an update of one optimizer step has
  devices of its own: it adds up gradients chunk by chunk, and the last chunk makes the step. Row
  and group ops follow in chunks.
- By prompts, where all responses have one length, so that all rows would end together. A chunk
  is equally many whole prompts, and chunks are decoded one after the other. Group ops follow in
  chunks too, and updates whose optimizer steps take the rows in their order.

Other batch ops, and nodes that read other rows as well, wait for all chunks. `choose` takes the
number of chunks with the shortest estimated iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from rlflow.errors import Finding, PlanError
from rlflow.graph.graph import Node
from rlflow.graph.rules.check import num_prompts
from rlflow.graph.rules.completion_order import ended_rows
from rlflow.graph.rules.steps import in_background, steps_in_order
from rlflow.scheduler.context import Context
from rlflow.scheduler.costs.pieces import COUNTS, chunk_piece
from rlflow.scheduler.engines.engines import own_pools
from rlflow.scheduler.observed import work_parts
from rlflow.scheduler.passes.bind.row_checks import nearest_divisors, uneven_chunks
from rlflow.scheduler.passes.stream.chains import Chain, crossing_chains
from rlflow.scheduler.passes.stream.reasons import chunks_of_rows
from rlflow.scheduler.plan.plan import Action, Chunk, Cost, Dep, Part, Plan, Reason
from rlflow.scheduler.plan.text import duration

MARGIN = 0.05
NO_CHAIN = "one piece: no rollout that can be cut is followed by row ops of other devices"


def stream(plan: Plan, context: Context) -> Plan:
    """Cut every chain that crosses pools into `context.chunks` chunks, a run each.

    Raises PlanError where prompts do not divide into so many chunks, or a chunk's prompts over
    the parts of an op that refuses uneven ones.
    """
    plan = step_by_step(plan, context)
    count = context.chunks
    if count == 1:
        return plan
    chains = crossing_chains(plan, count, groups=context.groups is not False)
    if not chains:
        return plan.noting("stream", NO_CHAIN)
    findings = [finding for chain in chains for finding in _findings(plan, chain, count)]
    if findings:
        raise PlanError(*findings)
    cut = {node.name: chain for chain in chains for node in chain.nodes}
    actions: list[Action] = []
    for action in plan.actions:
        chain = cut.get(str(action.node))
        if chain is not None:
            actions += _chunks(plan, action, chain, cut, context)
        else:
            actions.append(_after_all(action, cut, count))
    caches = tuple(_cache(plan, chain, context) for chain in chains if chain.by != "prompts")
    told = chains if context.groups is not False else ()
    reasons = [chunks_of_rows(plan, chain, count) for chain in told]
    plan = replace(plan, actions=tuple(actions), parts=(*plan.parts, *caches))
    for text in filter(None, reasons):
        plan = plan.noting("stream", text)
    return own_pools(_keeping_gradients(plan, cut))


def _keeping_gradients(plan: Plan, cut: Mapping[str, Chain]) -> Plan:
    """The plan in which gradients that chunks add to never leave their devices."""
    adding = [plan.graph.node(name) for name, chain in cut.items() if chain.by == "groups"]
    runs = {str(action.node): action for action in plan.actions if action.kind == "run"}
    for node in adding:
        if node.op.use != "train":
            continue
        instance = plan.instance(str(runs[node.name].instance))
        parts = tuple(
            replace(part, residual=part.size or 0) if part.name == instance.gradients else part
            for part in plan.parts
        )
        text = (
            f"{node.name} adds up the gradients of groups as they are complete, and makes its one "
            f"step with the last: until then {instance.name} is as the rollout has it, and "
            f"{instance.gradients} stays"
        )
        plan = replace(plan, parts=parts).noting("stream", text)
    return plan


def step_by_step(plan: Plan, context: Context) -> Plan:
    """Cut every update in the background into its optimizer steps, a run each."""
    steps = {
        node.name: steps_in_order(node)
        for node in plan.graph.nodes
        if in_background(node) and num_prompts(plan.graph, node) is not None and node.always
    }
    if not steps:
        return plan
    actions: list[Action] = []
    for action in plan.actions:
        count = steps.get(str(action.node), 1)
        pieces = [action] if count == 1 else []
        for index in range(count if count > 1 else 0):
            chunk = Chunk(index=index, count=count)
            order = [Dep(action=pieces[-1].id, distance=0, kind="order")] if pieces else []
            text = f"{action.reason.text}; a step at a time, where its devices are idle"
            pieces.append(
                replace(
                    action,
                    id=f"{action.id}{chunk}",
                    chunk=chunk,
                    after=(*action.after, *order),
                    cost=_cost(plan, action, chunk, False, context),
                    reason=Reason(rule="background", text=text),
                )
            )
        actions += pieces
    for name, count in steps.items():
        if count > 1:
            actions = [_after_all(action, (name,), count) for action in actions]
    return replace(plan, actions=tuple(actions))


def choose_chunks(bound: Plan, planned: Callable[[int], Plan]) -> tuple[int, str]:
    """The count of the shortest estimated iteration, and why: more only where worth `MARGIN`.

    `bound` is the plan before it is cut; `planned` compiles with a count. A count whose plan is
    refused is left out; if all are, the error of the first is raised.
    """
    found = {count: crossing_chains(bound, count) for count in COUNTS}
    if not any(found.values()):
        return 1, NO_CHAIN
    fits = {n: not any(_findings(bound, chain, n) for chain in found[n]) for n in COUNTS}
    counts = [n for n in COUNTS if fits[n] and (found[n] or n == 1)]
    if counts == [1]:
        chains = max(found.values(), key=len)
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
            periods[count] = None if timing is None else timing.seconds
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


def _findings(plan: Plan, chain: Chain, count: int) -> list[Finding]:
    """What keeps a chain from being cut into so many chunks."""
    if chain.by != "prompts":
        return [_too_many(chain, count)] if chain.cut[0] < count else []
    if chain.prompts % count:
        nearest = nearest_divisors(chain.prompts, count)
        return [
            Finding(
                code="E224",
                what=f"{chain.root.name}: stream={count} does not divide the {chain.prompts} "
                "prompts of an iteration into equal chunks",
                where=chain.root.where,
                got=f"{chain.prompts} % {count} = {chain.prompts % count}",
                expected=f"a number that divides {chain.prompts}: each chunk has as many prompts, "
                "with all of their responses",
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


def _too_many(chain: Chain, count: int) -> Finding:
    most, pieces = chain.cut
    return Finding(
        code="E224",
        what=f"{chain.root.name}: stream={count} is more chunks than there are {pieces} "
        f"in an iteration, {most}",
        where=chain.root.where,
        expected=f"at most {most}, so that no chunk is empty",
        fix=f"stream={most}",
    )


def _chunks(
    plan: Plan, action: Action, chain: Chain, cut: Mapping[str, Chain], context: Context
) -> list[Action]:
    """The runs of a node that is cut, each after its own chunk of what it reads.

    And after the chunk before: they are alike, so no other order is better.
    """
    count = context.chunks
    begins = action.node == chain.root.name
    needs = (
        (*action.needs, _cache_name(chain)) if begins and chain.by != "prompts" else action.needs
    )
    text = f"{action.reason.text}; {_purpose(plan, action, chain, count)}"
    adds = chain.by == "groups" and plan.graph.node(str(action.node)).op.use == "train"
    made: list[Action] = []
    for index in range(count):
        chunk = Chunk(index=index, count=count, by=chain.by)
        after = tuple(
            replace(dep, action=f"{dep.action}{chunk}") if dep.action in cut else dep
            for dep in action.after
        )
        if made:
            after = (*after, Dep(action=made[-1].id, distance=0, kind="order"))
        made.append(
            replace(
                action,
                id=f"{action.id}{chunk}",
                chunk=chunk,
                begins=begins,
                after=after,
                needs=needs,
                writes=() if adds and index + 1 < count else action.writes,
                cost=_cost(plan, action, chunk, begins, context),
                reason=Reason(rule="streamed", text=text),
            )
        )
    return made


def _after_all(action: Action, cut: Collection[str], count: int) -> Action:
    """An action in one piece, after all chunks of what it reads."""
    after: list[Dep] = []
    for dep in action.after:
        if dep.action in cut:
            chunks = (Chunk(index=index, count=count) for index in range(count))
            after += (replace(dep, action=f"{dep.action}{chunk}") for chunk in chunks)
        else:
            after.append(dep)
    return replace(action, after=tuple(after))


def _purpose(plan: Plan, action: Action, chain: Chain, count: int) -> str:
    """What cutting a node is good for: those that start early, or what it goes along with."""
    name = str(action.node)
    if plan.graph.node(name).op.use == "train":
        if chain.by == "groups":
            return f"gradients add up over {count} chunks of complete groups; the last one steps"
        return _steps(plan.graph.node(name), count)
    readers = [n.name for n in chain.nodes if name in n.sources]
    if not readers:
        return f"cut like {plan.graph.node(name).rows_of}, whose rows it reads"
    *more, last = readers
    who = f"{', '.join(more)} and {last}" if more else last
    if chain.by != "prompts":
        many, what = chain.cut
        first = ended_rows(many, 1, count)
        over = "that end" if chain.by == "finish" else "that are complete"
        return f"cut so that {who} can start on the first {first} {what} {over}"
    each = chain.prompts // count
    groups = "group" if each == 1 else f"{each} groups"
    return f"cut so that {who} can start on the first {groups}"


def _steps(node: Node, count: int) -> str:
    """What an update does of its steps in a chunk."""
    each = steps_in_order(node) // count
    many = "a step" if each == 1 else f"{each} steps"
    return f"cut into {many} a chunk, of the rows that {node.rows_of} has made by then"


def _cost(plan: Plan, action: Action, chunk: Chunk, begins: bool, context: Context) -> Cost:
    """The cost of one chunk of a node's run."""
    node = plan.graph.node(str(action.node))
    instance = plan.instance(action.instance) if action.instance else None
    return context.costs.run(node, instance, work_parts(plan, action), chunk_piece(chunk, begins))


def _cache_name(chain: Chain) -> str:
    return f"{chain.root.name}/cache"


def _cache(plan: Plan, chain: Chain, context: Context) -> Part:
    """The memory that a rollout keeps from one piece to the next."""
    run = next(action for action in plan.actions if action.node == chain.root.name)
    instance = plan.instance(str(run.instance))
    size = context.costs.cache(chain.root, instance, work_parts(plan, run))
    return Part(
        name=_cache_name(chain),
        instance=instance.name,
        kind="cache",
        size=size,
        residual=size or 0,
        devices=run.devices,
    )
