"""What is checked of data, prompts and rewards before anything starts.

Files are read through once, and prompts that may be too long are tokenized and measured, so that
a broken line or a long prompt costs seconds and not a run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rlflow.batch import lengths
from rlflow.contract.tokenizers import Tokenizer
from rlflow.data import DataSource
from rlflow.data.sources import as_text
from rlflow.engines.hf.loading import load_tokenizer
from rlflow.errors import RlflowError, RunError, UsageError
from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import Calling, Drawn, SamplingOptions
from rlflow.modelfiles.directories import model_directory
from rlflow.ops.bodies.common import token_rows, too_long
from rlflow.ops.body import Call
from rlflow.runtime.record.stages import stage
from rlflow.scheduler.models.shapes import model_shape

MOST_PROMPTS = 20_000


class MeasuredPrompts(NamedTuple):
    """Prompts of a source, and how many tokens the first of them has, those of the template too."""

    texts: list[str]
    first: int
    tokenizer: Tokenizer

    def doubtful(self, room: int) -> list[int]:
        """Those that may have more tokens than `room`, and those that may have none.

        A token is a byte of text at least, and what a template adds is in the first prompt: most
        prompts are told from their bytes, thousands of times faster than by their tokens.
        """
        return [
            index
            for index, text in enumerate(self.texts)
            if not text.strip() or self.first + len(text.encode()) > room
        ]


@stage("measuring prompts")
def check_prompts(graph: Graph, near: Path | None) -> None:
    """Measure the prompts that rollouts will read against the context.

    Looks at the first 20,000 rows of each source, once for all that read them alike: trips of a
    loop are many. Raises UsageError naming the row.
    """
    read: dict[Any, MeasuredPrompts] = {}
    measured: set[Any] = set()
    for node in graph.nodes:
        drawn = node.op.use == "rollout" and node.op.rows != "same"
        source = _prompt_source(graph, node) if drawn else None
        if source is None:
            continue
        sampling = node.as_a(SamplingOptions)
        alike = (id(source), str(node.model), repr(sampling.chat))
        if (*alike, sampling.max_new_tokens) not in measured:
            measured.add((*alike, sampling.max_new_tokens))
            _check_node(graph, node, source, near, read, alike)


def check_rewards(graph: Graph) -> None:
    """Let reward functions look whether what they need is here: a package, a jail.

    A function says so by an attribute `require`. Raises UsageError.
    """
    for node, calling in graph.having(Calling):
        function = calling.function
        for each in getattr(function, "functions", {"": function}).values():
            try:
                getattr(each, "require", bool)()
            except RlflowError as error:
                found = [replace(finding, where=node.where) for finding in error.findings]
                raise UsageError(*found, summary="Nothing was started.") from None


def _prompt_source(graph: Graph, node: Node) -> DataSource | None:
    """The data source of the prompts that a rollout or an evaluation reads as they are."""
    drawn = [node, *(graph.node(bound.source) for bound in node.inputs if bound.name == "prompt")]
    for role in (each.role(Drawn) for each in drawn):
        if role is not None and isinstance(role.data, DataSource):
            return role.data
    return None


def _check_node(
    graph: Graph,
    node: Node,
    source: DataSource,
    near: Path | None,
    read: dict[Any, MeasuredPrompts],
    alike: Any,
) -> None:
    """Measure the prompts of one node; those that another has `read` alike are not read again."""
    model = graph.model(str(node.model))
    shape = model_shape(model, near)
    if shape is None or not shape.context:
        return
    sampling = node.as_a(SamplingOptions)
    call = Call(
        node=node.name,
        op=node.op,
        iteration=0,
        seed=0,
        params=dict(node.params),
        wanted=frozenset(),
        permutation=range,
        tokenizer=load_tokenizer,
        where=node.where,
    )
    chat, new = sampling.chat is not None, int(sampling.max_new_tokens or 0)
    try:
        if alike not in read:
            directory = model_directory(model.path, near)
            tokenizer = load_tokenizer(str(directory or model.path))
            texts = [as_text(row["prompt"]) for row in source.rows()[:MOST_PROMPTS]]
            first = lengths(token_rows(call, tokenizer, texts[:1], chat)).tolist() if texts else [0]
            read[alike] = MeasuredPrompts(texts, first[0], tokenizer)
        prompts = read[alike]
        doubtful = prompts.doubtful(shape.context - new)
        if doubtful:
            texts = [prompts.texts[index] for index in doubtful]
            tokens = token_rows(call, prompts.tokenizer, texts, chat)
            too_long(call, tokens, texts, new, shape.context, doubtful)
    except RunError as error:
        raise UsageError(*error.findings, summary="Nothing was started.") from None
