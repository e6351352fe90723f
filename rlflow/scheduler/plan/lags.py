"""How many updates old the weights are that each instance samples with, read off a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm

from rlflow.graph.schedule import Scheduled, dues, last_due
from rlflow.scheduler.plan.plan import Action, Plan


def largest_lag(plan: Plan) -> dict[str, int]:
    """For every node that reads a model that learns: the most updates its weights can be behind.

    Proven from what actions come `after`, in every interleaving; 0 is on-policy. Nodes stand in
    the order of the plan. Raises AssertionError where no bound follows.
    """
    found: dict[str, int] = {}
    for action in plan.actions:
        if action.kind != "run" or not action.reads:
            continue
        if plan.graph.node(str(action.node)).op.use == "train":
            continue
        instance = plan.instance(str(action.instance))
        trained = plan.trained_instance(instance.model)
        if trained is None:
            continue
        lags = [
            _behind(action, writer, gap, plan.graph.updates(instance.model))
            for writer in _writers(plan, instance.name, trained.name)
            if (gap := _gap(plan, action, writer)) is not None
        ]
        if not lags:
            raise AssertionError(f"nothing bounds how old the weights are that {action.id} reads")
        node = str(action.node)
        found[node] = max(found.get(node, 0), min(lags))
    return found


def _writers(plan: Plan, instance: str, trained: str) -> Iterator[Action]:
    """The last update of a trained instance, or the reshards that fill another one."""
    if instance == trained:
        model = plan.instance(trained).model
        last = plan.graph.updates(model)[-1].name
        runs = [a for a in plan.actions if a.kind == "run" and a.node == last]
        return (a for a in runs if a.chunk is None or a.chunk.index + 1 == a.chunk.count)
    return (a for a in plan.actions if a.kind == "reshard" and instance in a.targets)


def _behind(reader: Action, writer: Action, gap: int, updates: Sequence[Scheduled]) -> int:
    """The most updates by which the weights that iteration i reads can be behind version i.

    Before the reader starts, the writer is over for iteration i - `gap`, which brought version
    i - `gap` + 1. Of the iterations since, those count in which one of `updates` is due.
    """
    ends = [n for each in (reader, writer, *updates) for n in each.within if n]
    period = lcm(*(each.every for each in (reader, writer, *updates)))
    most = 0
    for begun in (number + max(gap, 0) for number in {0, *ends}):
        for iteration in range(begun + period, begun + 2 * period + 1):
            if reader.due(iteration):
                over = last_due(writer, iteration - gap)
                missed = dues(updates, 0 if over is None else over + 1, iteration)
                most = max(most, len(list(missed)))
    return most


def _gap(plan: Plan, reader: Action, writer: Action) -> int | None:
    """The smallest d such that the writer of iteration i - d is over before the reader of i.

    None where they are not ordered. A dependency of turn distance t spans
    t + ahead(waiting) - ahead(waited for) iterations.
    """
    shortest = {reader.id: 0}
    for _ in plan.actions:
        changed = False
        for action in reversed(plan.actions):
            for dep in action.after if action.id in shortest else ():
                span = dep.distance + action.ahead - plan.action(dep.action).ahead
                total = shortest[action.id] + span
                if total < shortest.get(dep.action, total + 1):
                    shortest[dep.action], changed = total, True
        if not changed:
            break
    return shortest.get(writer.id)
