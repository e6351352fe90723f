"""What pass `bind` says of rollouts with `draft_rows="auto"`: up to how many rows they draft.

A turn with drafts brings each row several tokens, and takes longer: the more rows there are, the
more its products count beside the weights that it reads. Up to the number of rows below which a
token takes less with drafts than without the rollout drafts.
"""

from __future__ import annotations

from dataclasses import replace

from rlflow.graph.graph import Node
from rlflow.graph.roles import Drafted
from rlflow.scheduler.context import Context
from rlflow.scheduler.costs.lengths import Load
from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.costs.rows.uneven import Step
from rlflow.scheduler.observed import work_parts
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.text import duration

RULE = "draft rows"


def draft_few(plan: Plan, context: Context) -> Plan:
    """The plan, with the rows up to which each rollout drafts that leaves that to its costs."""
    for node, said in plan.graph.having(Drafted):
        if said.rows == "auto":
            plan = _chosen(plan, node, said, context)
    return plan


def _chosen(plan: Plan, node: Node, said: Drafted, context: Context) -> Plan:
    """The plan with the rows up to which one rollout drafts, and a note of why."""
    run = plan.action(node.name)
    costs, instance, parts = context.costs, plan.instance(str(run.instance)), work_parts(plan, run)
    shape = costs.shapes[instance.model]
    roof = None if shape is None else costs.roofline_of(node, instance, shape)
    if roof is None or roof.turn is None:
        rows, text = None, f"{node.name} drafts however many rows go on: nothing tells acceptance"
    else:
        rows, text = _by_costs(node, roof, costs.load(node, parts))
    being = node.being(replace(said, rows=rows))
    again = replace(run, cost=costs.run(being, instance, parts))
    nodes = tuple(being if each is node else each for each in plan.graph.nodes)
    actions = tuple(again if each is run else each for each in plan.actions)
    plan = replace(plan, graph=replace(plan.graph, nodes=nodes), actions=actions)
    return plan.noting(RULE, text)


def _by_costs(node: Node, roof: Roofline, load: Load) -> tuple[int | None, str]:
    """Up to how many rows a token takes less with drafts, None for all there may be; and why."""
    turn = roof.turn
    assert turn is not None
    with_drafts = replace(roof, turn=replace(turn, rows=float("inf"))).stepping()
    plain = replace(roof, turn=replace(turn, rows=0)).stepping()
    context, most = load.mean_prompt + load.lengths.mean / 2, max(round(load.most or load.rows), 1)
    rows = rows_that_gain(with_drafts, plain, context, most)
    said = f"{node.name} drafts " + (
        "however many rows go on"
        if rows == most
        else f"where at most {rows} rows go on in a process"
    )
    said = said if rows else f"{node.name} never drafts"
    at = [max(rows, 1), *([rows + 1] if 0 < rows < most else [])]
    seconds = (
        f"{duration(with_drafts(many, context))} with drafts and "
        f"{duration(plain(many, context))} without for {many} row{'' if many == 1 else 's'}"
        for many in at
    )
    acceptance = f"acceptance {turn.acceptance:.2f}, {turn.how}"
    return (
        None if rows == most else rows
    ), f"{said}: a token takes {', '.join(seconds)} ({acceptance})"


def rows_that_gain(with_drafts: Step, plain: Step, context: float, most: int) -> int:
    """Up to how many rows, of so many at the most, a token takes less with drafts, by halving."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        gains = with_drafts(middle, context) < plain(middle, context)
        low, high = (middle, high) if gains else (low, middle - 1)
    return low
