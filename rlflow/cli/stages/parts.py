"""`--only` and `--from`: the part of a graph that a command is about, and a placement for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from rlflow.cli.shell.values import typed_nodes
from rlflow.errors import Finding, UsageError
from rlflow.graph.cut.names import ReadEdge
from rlflow.graph.cut.part import NOTHING, GraphPart, cut_graph, models_used
from rlflow.graph.graph import Graph
from rlflow.graph.placement import Placement
from rlflow.runtime.record.replaying.present import require_some_whole
from rlflow.scheduler.passes.bind.bind import assignment
from rlflow.scheduler.plan.plan import Plan

F = TypeVar("F", bound=Callable[..., Any])


def part_options(function: F) -> F:
    """The options that take a part of the graph: nodes by themselves, edges from a record."""
    for option in (
        click.option(
            "--from",
            "from_",
            multiple=True,
            metavar="RUN:NODE",
            help="Read what NODE made from the record of a run, and do not make it; repeatable.",
        ),
        click.option(
            "--only",
            multiple=True,
            metavar="NODE",
            shell_complete=typed_nodes,
            help="This node and what it needs, nothing else; repeatable.",
        ),
    ):
        function = option(function)
    return function


def taken_part(graph: Graph, only: Sequence[str], sources: Sequence[str]) -> GraphPart:
    """The part of a graph that is asked for; all of it where nothing is said.

    Raises UsageError E330 to E333 for what the graph has not, or a record cannot bring, E335 where
    a record has all rows of no iteration, RunDirError E712 for what is no run.
    """
    if not only and not sources:
        return GraphPart(graph=graph, notes=())
    part = cut_graph(graph, only, [_read_edge(text) for text in sources])
    require_some_whole(part.graph)
    return part


def _read_edge(text: str) -> ReadEdge:
    record, colon, edge = text.rpartition(":")
    if not colon or not record or not edge:
        raise UsageError(
            Finding(
                code="E333",
                what=f"--from {text}: no run and node",
                expected="RUN:NODE, a run directory and the node whose rows it has recorded",
                fix="--from runs/grpo-20250131T142501Z:actor.rollout",
            ),
            summary=NOTHING,
        )
    # Whoever reads may be a process in another directory, as on a cluster that is joined.
    return ReadEdge(record=str(Path(record).resolve()), edge=edge)


def part_placement(whole: Graph, part: Graph, placement: Placement) -> Placement:
    """A placement of a whole graph for a part of it: without what that has not, nor idle pools.

    Without an update of what samples there is nothing to pause for.
    A key that names nothing in the whole graph stays, to be refused.
    """
    if whole is part:
        return placement
    gone = {node.name for node in whole.nodes} - {node.name for node in part.nodes}
    models = {model.name for model in whole.models} - models_used(part)
    found = (assignment(node, placement) for node in part.nodes)
    pools = {where.pool for where in found if where is not None}
    pools = pools or set(list(placement.pools)[:1])
    assign = {
        key: where
        for key, where in placement.assign.items()
        if key not in gone and key.partition(".")[0] not in models and where.pool in pools
    }
    kept = {name: devices for name, devices in placement.pools.items() if name in pools}
    made: dict[str, Any] = {"assign": assign, "pools": kept}
    sampled = {node.model for node in part.nodes if node.op.use == "rollout" and node.model}
    if not any(part.updates(model) for model in sampled):
        # Nothing newer comes that a rollout could pause for, or go on with.
        made |= {"pause_at": None, "continuous": False}
    return placement.model_copy(update=made)


def require_trained(weights: str | None, plan: Plan) -> None:
    """Raise UsageError E334 for weights that a run is to begin with where nothing is trained."""
    if weights and not any(instance.trained for instance in plan.instances):
        raise UsageError(
            Finding(
                code="E334",
                what=f"--from-weights {weights}: they are brought to models that are trained, "
                "and none is here",
                expected="a model whose path is a directory of weights",
                fix=f"rlflow export {weights} -o trained, then trained as the model's path",
            ),
            summary=NOTHING,
        )
