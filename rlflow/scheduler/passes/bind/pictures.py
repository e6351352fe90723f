"""What keeps a model from the pictures that its nodes are given, and parts of it from a freeze."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlflow.errors import Finding
from rlflow.graph.graph import Node
from rlflow.graph.model import Model
from rlflow.modelfiles.pictures.sights import blind_finding, seen_in, unshared_sight
from rlflow.modelfiles.pictures.towers import FREEZABLE, frozen_findings
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.origins import sees_pictures
from rlflow.scheduler.models.shapes import Shape
from rlflow.scheduler.plan.plan import Instance, Plan


def picture_findings(instance: Instance, plan: Plan, costs: Costs) -> list[Finding]:
    """E555 for parts that are to be frozen and are not there; E551 and E554 of pictures."""
    model, shape = plan.graph.model(instance.model), costs.shapes[instance.model]
    has = FREEZABLE if shape is None else shape.seeing
    found = [replace(f, where=model.where) for f in frozen_findings(model.path, model.freeze, has)]
    return found if shape is None else found + _unseen(instance, model, shape, plan.graph.nodes)


def _unseen(instance: Instance, model: Model, shape: Shape, nodes: Sequence[Node]) -> list[Finding]:
    """E551 for a model that sees no pictures, E554 where its layout or engine brings none."""
    if not any(sees_pictures(node) for node in nodes if node.model == model.name):
        return []
    if shape.sight is None:
        return [replace(blind_finding(model.path, shape.kind), where=model.where)]
    engine = instance.engine_plan
    own = engine.own_process
    if not own or (seen_in(engine.name, shape.kind, shape.sight) and instance.ep == 1):
        return []
    found = unshared_sight(model.path, f"{shape.kind}, {instance.layout()}")
    return [replace(found, where=model.where)]
