"""The graph of an evaluation: prompts, a rollout, the reward, and what the samples say together.

An ordinary graph: it is compiled, placed and run as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlflow import ops
from rlflow.cli.evaluation.terms import Terms
from rlflow.errors import Finding, GraphError, UsageError
from rlflow.graph.graph import Graph
from rlflow.graph.model import Model
from rlflow.graph.pipeline import Config, Pipeline
from rlflow.ops.evaluating.passing import Answer, PassRule, passes

COUNTED = "passes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What is counted of `n` samples of each prompt: for which k, which are right, what votes."""

    n: int
    ks: tuple[int, ...]
    rule: PassRule
    answer: Answer


def ks_of(n: int, said: Sequence[int]) -> tuple[int, ...]:
    """The k to count for: those that are said, or 1, 2, 4, ... and n itself.

    Raises UsageError E370 for one above n: nothing is known of more samples than there are.
    """
    if said and max(said) > n:
        raise UsageError(
            Finding(
                code="E370",
                what=f"-k {max(said)} of {n} sample{'s' if n > 1 else ''} of each prompt",
                expected=f"at most {n}",
                fix=f"-n {max(said)}",
            ),
            summary="Nothing was started.",
        )
    if said:
        return tuple(sorted(set(said)))
    return tuple(dict.fromkeys([*(1 << i for i in range(n.bit_length())), n]))


def evaluation_graph(whole: Graph, terms: Terms, model: Model, counted: Counted) -> Graph:
    """The graph that samples `model` on all rows of the data, once, and counts.

    Nodes and models have the names that a placement of the `whole` pipeline knows them by. What
    is wrong is of the line that declares the evaluation. Raises GraphError.
    """
    where, size = terms.node.where, terms.data.size()
    rows = len(terms.data.rows()) if size is None else size

    def declare(cfg: Config) -> None:
        asked = ops.prompts(terms.data, batch=rows)
        samples = ops.rollout(model, asked, n=counted.n, **terms.sampling)
        reward = ops.reward(terms.function, samples, **terms.options)
        rule, answer = counted.rule, counted.answer
        passes(samples, reward, ks=counted.ks, rule=rule, answer=answer, name=COUNTED)

    named = Pipeline(
        name=f"{whole.name}-eval",
        function=declare,
        config=Config,
        placements={},
        where=whole.source,
        headline=(f"{COUNTED}/pass@1",),
    )
    try:
        made = named.trace()
    except GraphError as error:
        found = [replace(finding, where=where) for finding in error.findings]
        raise GraphError(*found, summary=error.summary) from None
    return replace(made, nodes=tuple(replace(node, where=where) for node in made.nodes))
