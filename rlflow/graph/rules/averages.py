"""The rules of models whose weights are averages of other models' weights.

They know what is declared; whether two architectures are one is found where their files are
read.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.errors import Finding
from rlflow.graph.graph import Graph, Node
from rlflow.graph.model import Average, Model
from rlflow.graph.roles import Averaged

DECLARED_ALIKE = ("head", "init", "lora", "freeze")
# What an average starts from has to be what the averaged model starts from.
ALIKE_FROM = {"part": ("path",), "random": ("path", "dtype")}


def averages_are_taken(graph: Graph) -> Iterator[Finding]:
    """A model is an average exactly where one `ops.average`, and nothing else, writes it."""
    for model in graph.models:
        updates = graph.updates(model.name)
        taken = [node for node in updates if node.role(Averaged)]
        others = [node for node in updates if not node.role(Averaged)]
        if isinstance(model.optimizer, Average) and not taken:
            yield Finding(
                code="E113",
                what=f"model {model.name!r} is an average and nothing says of what",
                where=model.where,
                got=model.optimizer.describe(),
                fix=f"ops.average({model.name}, actor), or remove optimizer=",
            )
        if taken and not model.averaged:
            yield Finding(
                code="E114",
                what=f"{taken[0].name!r} makes model {model.name!r} an average, which it is not"
                " declared to be",
                where=taken[0].where,
                got=f"{model.name} is declared at {model.where}",
                fix=f'rf.Model("{model.name}", ..., optimizer=rf.Average(decay=0.99))',
            )
        if model.averaged and others:
            yield Finding(
                code="E114",
                what=f"{others[0].name!r} trains model {model.name!r}, which is an average",
                where=others[0].where,
                got=f"{model.name} is declared at {model.where}",
                expected="ops.average alone writes an average",
                fix=f'rf.Model("{model.name}", ..., optimizer=rf.AdamW(lr=1e-4))',
            )
        for node in taken[1:]:
            yield Finding(
                code="E128",
                what=f"model {model.name!r} is an average of two",
                where=node.where,
                got=f"the first is taken at {taken[0].where}",
                fix=f'rf.Model("{model.name}_2", ..., optimizer=rf.Average(decay=0.99))',
            )


def averages_are_alike(graph: Graph) -> Iterator[Finding]:
    """An average is of a model that learns, has the same weights, and begins with them."""
    models = {model.name: model for model in graph.models}
    for node, averaged in graph.having(Averaged):
        source = models.get(averaged.source)
        if source is None or source.averaged or not graph.updates(source.name):
            yield _of_nothing_that_learns(node)
        else:
            yield from _different(node, graph.model(str(node.model)), source)


def _of_nothing_that_learns(node: Node) -> Finding:
    return Finding(
        code="E128",
        what=f"{node.name!r} averages model {node.averages!r}, which no ops.update trains",
        where=node.where,
        expected="a model with an optimizer that ops.update trains",
        fix=f"ops.update({node.averages}, ...)",
    )


def _different(node: Node, average: Model, source: Model) -> Iterator[Finding]:
    """What two models are declared with that keeps one from being the average of the other."""
    names = [*DECLARED_ALIKE]
    if average.trained_in_part or source.trained_in_part:
        names += ALIKE_FROM["part"]
    if "random" in (average.init, source.init):
        names += ALIKE_FROM["random"]
    wrong = [name for name in dict.fromkeys(names) if _said(average, name) != _said(source, name)]
    if source.dtype == "float64" != average.dtype:
        wrong.append("dtype")
    if wrong:
        yield Finding(
            code="E128",
            what=f"{node.name!r} averages {source.name!r} into a model of other weights",
            where=node.where,
            got="\n".join(
                f"{model.name}: {', '.join(f'{name}={_said(model, name)}' for name in wrong)}"
                for model in (average, source)
            ),
            expected=f"{average.name} declared with the {' and '.join(wrong)} of {source.name}",
        )


def _said(model: Model, name: str) -> str:
    value = getattr(model, name)
    return value.describe() if name == "lora" and value is not None else str(value)
