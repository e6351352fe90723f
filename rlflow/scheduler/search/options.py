"""Options of a placement that `tune` tries once it knows where everything lies.

Drafts by n-grams in engines, which need no other model, and TF32, which changes numbers and is told
beside what was found. Knows graphs, placements and kinds of devices; no seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.graph.graph import Graph
from rlflow.graph.placement import On, Placement
from rlflow.graph.roles import Drafted
from rlflow.graph.user.engines import SGLang
from rlflow.graph.user.speculative import Speculative
from rlflow.scheduler.devices.cluster import Cluster
from rlflow.scheduler.plan.engine_plan import EnginePlan

DRAFTS = (3, 7)
"""How many tokens n-grams propose a turn."""


def drafting(graph: Graph, placement: Placement) -> Iterator[Placement]:
    """The placement with engines that draft by n-grams; none where they do already, or cannot.

    Only where it is said how often drafts are accepted: an assumption decides for no engine.
    """
    if graph.acceptance is None or any(graph.having(Drafted)):
        return
    for tokens in DRAFTS:
        by = Speculative(algorithm="NGRAM", draft_tokens=tokens)
        assign = {key: _drafting(where, by) for key, where in placement.assign.items()}
        if assign != placement.assign:
            yield placement.model_copy(update={"assign": assign})


def _drafting(where: On, by: Speculative) -> On:
    options = where.options
    if not isinstance(options, SGLang) or options.speculative is not None:
        return where
    engine = options.model_copy(update={"speculative": by})
    also = None if where.also is None else _drafting(where.also, by)
    return where.model_copy(update={"engine": engine, "also": also})


def by_tf32(graph: Graph, placement: Placement, cluster: Cluster) -> Placement | None:
    """The placement with products of float32 models by TF32; None where that changes nothing.

    Of what this process computes: engines in processes of their own have dtypes of their own.
    """
    able = any(kind.has_tf32 for kind, _ in cluster.kinds)
    wide = any(model.dtype == "float32" for model in graph.models)
    if not (able and wide):
        return None
    assign = {
        key: where if _outside(where) or where.tf32 is not None else _with_tf32(where)
        for key, where in placement.assign.items()
    }
    return None if assign == placement.assign else placement.model_copy(update={"assign": assign})


def _outside(where: On) -> bool:
    return EnginePlan.chosen(where).own_process


def _with_tf32(where: On) -> On:
    helps = where.also is not None and not _outside(where.also)
    also = where.also.model_copy(update={"tf32": True}) if where.also and helps else where.also
    return where.model_copy(update={"tf32": True, "also": also})
