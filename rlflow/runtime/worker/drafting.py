"""Drafters that lie in engines: what an engine is told of one, and the instance that it is here.

Knows engines and instances; neither the plan's order nor who reads what.
"""

from __future__ import annotations

from collections.abc import Callable

from rlflow.contract.engines import HoldsDraft
from rlflow.contract.values import Drafting
from rlflow.runtime.worker.loaded import Loaded
from rlflow.scheduler.plan.plan import Instance, Plan


def drafting_in(plan: Plan, engine: Instance, path: Callable[[str], str]) -> Drafting | None:
    """What an engine is to draft with; `path` finds the files of a model. None without a drafter.

    Its first weights are those of the instance that is trained.
    """
    if not engine.engine_plan.has_drafter:
        return None
    (name,) = (i.name for i in plan.instances if i.inside == engine.name)
    declared = plan.graph.model(str(engine.drafter))
    return Drafting(
        name=name,
        path=path(declared.path),
        init="random" if declared.init == "random" else "weights",
        tokens=engine.draft_tokens,
    )


def drafter_within(instance: Instance, engine: Loaded) -> Loaded:
    """A drafter that an engine was started with: weights to be written, and nothing to run."""
    assert isinstance(engine.model, HoldsDraft)
    assert engine.model.draft is not None, f"{engine.instance.name} was started without a drafter"
    return Loaded(
        instance=instance,
        model=engine.model.draft,
        train=None,
        rollout=None,
        tokenizer=engine.tokenizer,
        stop_tokens=engine.stop_tokens,
    )
