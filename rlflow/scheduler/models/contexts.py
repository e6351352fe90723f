"""Whether rows are as long as the contexts of the models that read them allow, from shapes alone.

A prompt has a token at least, and its response as many as its rollout may draw. How long prompts
are beyond that is found where a run begins. Knows neither data nor tokenizers; imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlflow.errors import Finding
from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import Drawn, LoopEnd, SamplingOptions
from rlflow.modelfiles.widths import length_finding
from rlflow.scheduler.models.shapes import Shape

LEAST_PROMPT = 1


def length_findings(graph: Graph, shapes: Mapping[str, Shape | None]) -> list[Finding]:
    """E505 for every node whose rows may be longer than the context of its model.

    Models whose shape is not known are not looked at, nor rows of loops, which end in time.
    """
    findings = []
    for node in graph.nodes:
        shape = None if node.model is None else shapes.get(node.model)
        origin = _drawn_by(graph, node)
        if shape is None or origin is None:
            continue
        new = int(origin.as_a(SamplingOptions).max_new_tokens or 0)
        found = length_finding(
            f"rows of {node.name!r} may be longer than the context of model {node.model!r}",
            f"a prompt of {LEAST_PROMPT} token at least + {new} new tokens of {origin.name}",
            LEAST_PROMPT,
            new,
            shape.context,
        )
        findings += [] if found is None else [replace(found, where=node.where)]
    return findings


def _drawn_by(graph: Graph, node: Node) -> Node | None:
    """What has drawn a node's rows, outside of loops: a rollout, or itself where it evaluates."""
    if node.model is None or node.loop is not None:
        return None
    if node.rows_of is None:
        return node if node.role(Drawn) and node.role(SamplingOptions) else None
    origin = graph.node(node.rows_of)
    single = origin.loop is None and origin.role(LoopEnd) is None
    return origin if single and origin.role(SamplingOptions) is not None else None
