"""Who made the rows that a node works on, and how long its prompts and responses may be.

Rows of several row sets below each other have several makers. Knows graphs; no costs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlflow.errors import UsageError
from rlflow.graph.fields import PIXELS
from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import Drawn, Portion, SamplingOptions
from rlflow.graph.rules.nesting import nodes_within
from rlflow.modelfiles.configs import read_config
from rlflow.modelfiles.directories import model_directory
from rlflow.modelfiles.pictures.sights import Sight, sight_of
from rlflow.scheduler.models.known_shapes import PREFIX
from rlflow.scheduler.models.prompts import PromptTokens, counted_prompts, with_picture_tokens
from rlflow.scheduler.models.tokenizers import tokenizer_file

ASSUMED_RESPONSE_TOKENS = 256


def origins(graph: Graph, node: Node) -> tuple[Node, ...]:
    """The nodes that made the rows: a rollout, the data, or what ended a loop without any.

    Each of several row sets has its own; what counts, chooses or repeats rows makes none. Parts of
    one rollout are alike, and the first stands for them.
    """
    maker = graph.node(node.rows_of) if node.rows_of else node
    if maker.ends_loop:
        sampled = (n for n in nodes_within(graph, maker.name) if n.op.rows == "expand")
        return (next(sampled, maker),)
    if maker.counts is None:
        return (maker,)
    firsts = {bound.part: graph.node(bound.source) for bound in reversed(maker.inputs)}
    found = [one for part in sorted(firsts) for one in origins(graph, firsts[part])]
    helped = [one for one in found if (part := one.role(Portion)) is None or not part.helps]
    return tuple(dict.fromkeys(helped)) or (maker,)


class Prompts:
    """Tokens of the prompts of each data, which is read once for all that is estimated.

    Models are looked for `near` the pipeline's file.
    """

    def __init__(self, near: Path | None = None) -> None:
        self.near = near
        self._known: dict[tuple[int, Path | None], tuple[Any, PromptTokens]] = {}

    def tokens(self, graph: Graph, origin: Node, *, counted: bool) -> PromptTokens:
        """Tokens of the prompts of the rows that a node has made, `counted` by its tokenizer."""
        data, file = _data_of(graph, origin), None
        if counted and origin.model is not None:
            file = self._tokenizer(graph.model(origin.model).path)
        key = id(data), file
        sight = self._sight(graph, origin) if getattr(data, "pictured", False) else None
        if key not in self._known:
            found = with_picture_tokens(counted_prompts(data, file), data, sight)
            self._known[key] = data, found
        return self._known[key][1]

    def _sight(self, graph: Graph, origin: Node) -> Sight | None:
        """How the model of a node sees pictures, where its files are here."""
        path = None if origin.model is None else graph.model(origin.model).path
        if path is None or path.startswith(PREFIX):
            return None
        folder = model_directory(path, self.near)
        return None if folder is None else sight_of(folder, read_config(folder))

    def _tokenizer(self, path: str) -> Path | None:
        """The tokenizer's file of a model, where it is here; a missing model is told elsewhere."""
        if path.startswith(PREFIX):
            return None
        try:
            return tokenizer_file(path, self.near)
        except UsageError:
            return None


def sees_pictures(node: Node) -> bool:
    """Whether a node gives its model pictures: of its data, or what was made of some."""
    drawn = node.role(Drawn)
    fields = (*(bound.field for bound in node.inputs), *node.op.outputs)
    return any(f.name == PIXELS for f in fields) or (drawn is not None and drawn.data.pictured)


def _data_of(graph: Graph, origin: Node) -> Any:
    """The data that a node's prompts are drawn from; None where they are from none."""
    while (drawn := origin.role(Drawn)) is None:
        parents = [graph.node(name) for name in origin.sources]
        if not parents:
            return None
        origin = parents[0]
    return drawn.data


def response_tokens(origin: Node) -> int:
    """Tokens of the longest response of the rows that a node has made, or an assumed number."""
    sampling = origin.role(SamplingOptions)
    return int((sampling and sampling.max_new_tokens) or ASSUMED_RESPONSE_TOKENS)
