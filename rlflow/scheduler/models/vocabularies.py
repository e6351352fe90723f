"""Whether distributions over a vocabulary are as wide as those who read them need, from shapes.

A model's likeliest tokens are at most its vocabulary; a sum over the vocabulary needs all of it;
and a student has a logit for every token that a teacher may name. Knows neither weights nor
tokenizers; imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlflow.errors import Finding
from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import Learning, Scoring
from rlflow.scheduler.models.shapes import Shape

IDS = "top_ids"


def vocabulary_findings(graph: Graph, shapes: Mapping[str, Shape | None]) -> list[Finding]:
    """E635 for more likeliest tokens than there are, E637 for a full KL that misses some.

    Models whose shape is not known are not looked at.
    """
    findings = []
    for node in graph.nodes:
        size = _vocabulary(node, shapes)
        if size is None:
            continue
        scoring = node.role(Scoring)
        top_k = None if scoring is None else scoring.top_k
        if top_k is not None and top_k > size:
            findings.append(_too_many(node, top_k, size))
        findings += _missed(graph, node, size, shapes)
    return findings


def _vocabulary(node: Node, shapes: Mapping[str, Shape | None]) -> int | None:
    shape = None if node.model is None else shapes.get(node.model)
    return None if shape is None else shape.vocab


def _too_many(node: Node, top_k: int, size: int) -> Finding:
    return Finding(
        code="E635",
        what=f"{node.name} wants the {top_k} likeliest tokens of model {node.model!r}",
        where=node.where,
        got=f"a vocabulary of {size}",
        expected=f"top_k from 1 to {size}",
    )


def _missed(
    graph: Graph, node: Node, size: int, shapes: Mapping[str, Shape | None]
) -> list[Finding]:
    """What is wrong with the reference of an update whose KL is over the whole vocabulary."""
    learning = node.role(Learning)
    if not getattr(learning and learning.loss, "full_kl", False):
        return []
    sources = [graph.node(bound.source) for bound in node.inputs if bound.name == IDS]
    findings = []
    for source in sources:
        scoring = source.role(Scoring)
        top_k = None if scoring is None else scoring.top_k
        theirs = _vocabulary(source, shapes)
        if theirs not in (None, size):
            got, fix = f"model {source.model!r} with a vocabulary of {theirs}", ""
        elif top_k is not None and top_k < size:
            got, fix = f"top_k={top_k} of {source.name}", f"top_k={size}, or an estimate: kl='k3'"
        else:
            continue
        findings.append(
            Finding(
                code="E637",
                what=f"{node.name}: kl='full' sums over the vocabulary, and some of it is missing",
                where=node.where,
                got=got,
                expected=f"all {size} tokens of model {node.model!r}",
                fix=fix,
            )
        )
    return findings
