"""The rules of drafters: small models that propose tokens to another one."""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.errors import Finding
from rlflow.graph.graph import Graph


def drafters_are_others(graph: Graph) -> Iterator[Finding]:
    """A drafter is a language model, and not the one that it drafts for."""
    heads = {model.name: model.head for model in graph.models}
    for node in graph.nodes:
        if node.drafter is None:
            continue
        if node.drafter == node.model:
            yield Finding(
                code="E131",
                what=f"{node.name!r}: model {node.model!r} drafts for itself",
                where=node.where,
                expected="a smaller model with the same tokenizer",
                fix='draft = rf.Model("drafter", "path/of/a/smaller/model")',
            )
        elif heads[node.drafter] != "lm":
            yield Finding(
                code="E132",
                what=f"{node.name!r}: {node.drafter!r} proposes no tokens",
                where=node.where,
                got=f"head={heads[node.drafter]!r}",
                expected='head="lm"',
            )
