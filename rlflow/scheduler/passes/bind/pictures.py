"""What keeps a model from the pictures that its nodes are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlflow.errors import Finding
from rlflow.graph.fields import PIXELS
from rlflow.graph.graph import Node
from rlflow.graph.model import Model
from rlflow.modelfiles.pictures.sights import blind_finding, unshared_sight
from rlflow.scheduler.models.shapes import Shape
from rlflow.scheduler.plan.plan import Instance


def unseen_findings(
    instance: Instance, model: Model, shape: Shape, nodes: Sequence[Node]
) -> list[Finding]:
    """E551 for a model that sees no pictures, E554 where its layout does not bring them."""
    own = [node for node in nodes if node.model == model.name]
    given = any(bound.field.name == PIXELS for node in own for bound in node.inputs)
    given |= any(made.name == PIXELS for node in own for made in node.op.outputs)
    if not given:
        return []
    if shape.sight is None:
        return [replace(blind_finding(model.path, shape.kind), where=model.where)]
    if (
        instance.engine_plan.in_process
        or max(instance.tp, instance.ep, instance.cp, instance.pp) == 1
    ):
        return []
    return [replace(unshared_sight(model.path, instance.layout()), where=model.where)]
