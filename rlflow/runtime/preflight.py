"""What is checked of data, prompts and rewards before anything starts.

Files are read through once, and prompts are tokenized and measured, so that a broken
line or a prompt that is too long costs seconds and not a run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rlflow.data import DataSource
from rlflow.data.sources import as_text
from rlflow.engines.loading import load_tokenizer
from rlflow.errors import RlflowError, RunError, UsageError
from rlflow.graph.graph import Graph, Node
from rlflow.ops.bodies.common import token_rows, too_long
from rlflow.ops.body import Call
from rlflow.scheduler.shapes import model_directory, model_shape

MOST_PROMPTS = 20_000


def check_prompts(graph: Graph, near: Path | None) -> None:
    """Tokenize the prompts that rollouts will read, and measure them against the context.

    Looks at the first 20,000 rows of each source. Raises UsageError naming the row.
    """
    for node in graph.nodes:
        if node.op.use == "rollout":
            source = _prompt_source(graph, node)
            if source is not None:
                _check_node(graph, node, source, near)


def check_rewards(graph: Graph) -> None:
    """Let reward functions look whether what they need is here: a package, a jail.

    A function says so by an attribute `require`. Raises UsageError.
    """
    for node in graph.nodes:
        function = dict(node.params).get("function")
        for each in getattr(function, "functions", {"": function}).values():
            try:
                getattr(each, "require", bool)()
            except RlflowError as error:
                found = [replace(finding, where=node.where) for finding in error.findings]
                raise UsageError(*found, summary="Nothing was started.") from None


def _prompt_source(graph: Graph, node: Node) -> DataSource | None:
    """The data source of the prompts that a rollout or an evaluation reads as they are."""
    own = dict(node.params).get("data")
    if isinstance(own, DataSource):
        return own
    for bound in node.inputs:
        data = dict(graph.node(bound.source).params).get("data")
        if bound.name == "prompt" and isinstance(data, DataSource):
            return data
    return None


def _check_node(graph: Graph, node: Node, source: DataSource, near: Path | None) -> None:
    model = graph.model(str(node.model))
    shape = model_shape(model, near)
    if shape is None or not shape.context:
        return
    directory = model_directory(model.path, near)
    tokenizer: Any = load_tokenizer(str(directory or model.path))
    params = dict(node.params)
    texts = [as_text(row["prompt"]) for row in source.rows()[:MOST_PROMPTS]]
    call = Call(
        node=node.name,
        op=node.op,
        iteration=0,
        seed=0,
        params=params,
        wanted=frozenset(),
        permutation=range,
        tokenizer=load_tokenizer,
        where=node.where,
    )
    try:
        tokens = token_rows(call, tokenizer, texts, "chat" in params)
        too_long(call, tokens, texts, params["max_new_tokens"], shape.context)
    except RunError as error:
        raise UsageError(*error.findings, summary="Nothing was started.") from None
