"""What `rlflow run` is told of trackers and kernels, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.errors import Finding, UsageError, near_names
from rlflow.report.render import render
from rlflow.report.samples.tracked import TrackedSamples
from rlflow.runtime.record.devices.profiled import PROFILES, ProfiledActions, iteration_range
from rlflow.runtime.record.trackers.observer import Observer, chosen_trackers

if TYPE_CHECKING:
    from rlflow.cli.commands import Planned
    from rlflow.scheduler.plan.plan import Plan

# Without --profile-iterations the second iteration of a run: the first one warms up.
SECOND = (1, 2)


def check_observed(planned: Planned, options: Mapping[str, Any]) -> None:
    """Raise UsageError for trackers and kernels that cannot be had: E340 to E343."""
    chosen_trackers(options["track"], planned.declared.pipeline.track)
    profiled_actions(planned, options, Path())


def observer_of(planned: Planned, options: Mapping[str, Any], path: Path) -> Observer:
    """What tells trackers of the run in a directory, as the command line or the pipeline says."""
    graph = planned.compiled.plan.graph

    def picture() -> bytes:
        made = render(graph, None, level="graph", format="png")
        return made if isinstance(made, bytes) else made.encode()

    names = chosen_trackers(options["track"], planned.declared.pipeline.track)
    return Observer(path, names=names, picture=picture, tables=partial(TrackedSamples, path))


def profiled_actions(
    planned: Planned, options: Mapping[str, Any], path: Path
) -> ProfiledActions | None:
    """The actions whose kernels are recorded, in the run of a directory; None without any."""
    named, said = options["profile_action"], options["profile_iterations"]
    if not named:
        if said is not None:
            what = "--profile-iterations says when, and no --profile-action says what"
            raise UsageError(Finding(code="E342", what=what, fix="--profile-action actor.update"))
        return None
    first, last = SECOND if said is None else iteration_range(said, "--profile-iterations")
    plan = planned.compiled.plan
    return ProfiledActions(
        actions=frozenset(each for name in named for each in _actions(plan, name)),
        first=first,
        last=last,
        directory=(path / PROFILES).resolve(),
        cuda=not planned.cluster.is_cpu,
    )


def _actions(plan: Plan, name: str) -> list[str]:
    """The ids of the actions of that name, or of the runs of a node of that name."""
    known = [action for action in plan.actions if action.kind != "transfer"]
    found = [a.id for a in known if a.id == name or (a.kind == "run" and a.node == name)]
    if found:
        return found
    names = [action.id for action in known]
    raise UsageError(
        Finding(
            code="E342",
            what=f"--profile-action {name}: the plan has no such action to profile",
            expected=", ".join(names),
            near=near_names(name, names),
        )
    )
