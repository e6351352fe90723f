"""The rules of drafters: small models that propose tokens to another one."""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.errors import Finding
from rlflow.graph.graph import Graph
from rlflow.graph.roles import Drafted


def drafters_are_others(graph: Graph) -> Iterator[Finding]:
    """A drafter is a language model, and not the one that it drafts for."""
    heads = {model.name: model.head for model in graph.models}
    for node, drafted in graph.having(Drafted):
        if drafted.by == node.model:
            yield Finding(
                code="E131",
                what=f"{node.name!r}: model {node.model!r} drafts for itself",
                where=node.where,
                expected="a smaller model with the same tokenizer",
                fix='draft = rf.Model("drafter", "path/of/a/smaller/model")',
            )
        elif heads[drafted.by] != "lm":
            yield Finding(
                code="E132",
                what=f"{node.name!r}: {drafted.by!r} proposes no tokens",
                where=node.where,
                got=f"head={heads[drafted.by]!r}",
                expected='head="lm"',
            )
