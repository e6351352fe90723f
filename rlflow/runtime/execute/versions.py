"""The versions that weights of loaded instances must have when an action reads them.

Compares the plan's versions with those of the instances in this process; moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlflow.engines.hf.average import difference
from rlflow.errors import Finding, RunError, UsageError
from rlflow.runtime.worker.loaded import Loaded
from rlflow.scheduler.plan.plan import Action, Plan


def require_versions(
    plan: Plan, action: Action, iteration: int, loaded: Mapping[str, Loaded]
) -> None:
    """Refuse weights older than the version declared, or newer than the iteration may read.

    An update that is not due in an iteration writes no version. In the first iterations after a
    checkpoint no weights are old enough for a lag, and the newest are read. An action that writes
    a version may find what other writers of that version have written. Only instances that are
    loaded in this process are looked at.
    """
    for name, lag in action.reads:
        held = loaded.get(name)
        if held is None:
            continue
        updated = plan.trained_instance(held.instance.model) is not None
        written = dict(action.writes).get(name, lag)
        newest, declared = (
            plan.graph.written(held.instance.model, max(iteration - behind, 0)) if updated else 0
            for behind in (min(lag, written, 0), lag)
        )
        if held.version is None or not declared <= held.version <= newest:
            raise RunError(
                Finding(
                    code="E752",
                    what=f"{action.id} declared version {declared} of "
                    f"{name}, which holds {held.version}",
                    expected="the plan brings the weights before they are read",
                )
            )


def require_same(action: Action, different: Mapping[str, tuple[int | str, int | str]]) -> None:
    """Raise RunError where the two ends of a reshard do not hold the same bits.

    `different` has what was sent and what is held, by name: hashes as numbers or as text.
    """
    if not different:
        return
    name, (sent, held) = next(iter(different.items()))
    raise RunError(
        Finding(
            code="E757",
            what=f"{action.id}: {len(different)} parameters differ between the two ends",
            got=f"{name}: {_digest(held)}",
            expected=f"{name}: {_digest(sent)}",
        )
    )


def _digest(found: int | str) -> str:
    return found if isinstance(found, str) else f"{found & (2**64 - 1):016x}"


def require_averages(plan: Plan, loaded: Mapping[str, Loaded]) -> None:
    """Refuse two models of which one is to be the other's average and whose weights differ."""
    for node in plan.graph.nodes:
        ends = [plan.trained_instance(name) for name in (node.model, node.averages) if name]
        held = [loaded[end.name] for end in ends if end is not None and end.name in loaded]
        if node.averages is None or len(held) != len(ends):
            continue
        average, source = held
        found = difference(average.trained_shards(), source.trained_shards())
        if found:
            raise UsageError(
                Finding(
                    code="E767",
                    what=f"{node.name!r} averages {node.averages!r} into a model of other weights",
                    where=node.where,
                    got=found,
                    expected=f"{node.model} and {node.averages} of one architecture",
                )
            )
