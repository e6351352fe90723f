"""What `rlflow tune` does: declare, search, and say what was found. Imports no torch, no ray."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlflow.cli.commands import NOTHING, Target, cluster_of, declare
from rlflow.cli.config import named_placement
from rlflow.cli.options import repeated
from rlflow.cli.planning.missing_models import missing_model_findings
from rlflow.errors import DataError, Finding, UsageError
from rlflow.scheduler.devices.cluster import machine_cores
from rlflow.scheduler.passes.staleness import allowed
from rlflow.scheduler.search.text import as_written, placement_file
from rlflow.scheduler.search.tune import SearchLimits, Tuned, search_placements

# Values that are made between two looks for those that nobody needs.
RARELY = 100_000


def tune_target(
    target: Target,
    *,
    max_staleness: int | None = None,
    top: int = 10,
    engine: str | None = None,
    families: bool = False,
) -> Tuned:
    """Search placements of a pipeline on the devices asked for, or the cores of this machine.

    Staleness is used up to `max_staleness`; left out, as far as the pipeline or a placement of
    it allows. With a placement named it alone is what the search has to beat. An `engine` that is
    named makes all rollouts. With `families` the best of each family is kept too.
    """
    declared = declare(target)
    pipeline = declared.pipeline
    placements = dict(pipeline.placements)
    if target.placement is not None:
        placements = dict([named_placement(pipeline, target.placement)])
    if max_staleness is None:
        max_staleness = max(allowed(declared.graph, given) for given in placements.values())
    cluster = cluster_of(target, machine_cores())
    limits = SearchLimits(staleness=max_staleness, top=top, engine=engine, families=families)
    near, backend = pipeline.path, target.backend
    try:
        with _collecting_rarely():
            return search_placements(
                declared.graph, placements, cluster, limits=limits, near=near, backend=backend
            )
    except DataError as error:
        raise UsageError(*error.findings, summary=NOTHING) from None
    except UsageError as error:
        findings = missing_model_findings(declared.graph, near) or list(error.findings)
        raise UsageError(*findings, summary=NOTHING) from None


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    """A search makes many values that live on: to look for cycles in them takes a tenth of it."""
    known = gc.get_threshold()
    gc.set_threshold(RARELY, *known[1:])
    try:
        yield
    finally:
        gc.set_threshold(*known)


def next_words(tuned: Tuned, options: Mapping[str, Any], path: str, *, run: bool) -> str:
    """The line that runs, or plans, the placement in a file, on the devices it was found for.

    Left out, shares would be of as few CPU devices as they divide.
    """
    cluster, found = tuned.cluster, dict(options)
    if found["devices"] is None and cluster.is_cpu and as_written(tuned, tuned.best).shares:
        found["devices"] = f"{cluster.kind.name}:{cluster.count}"
    return f"rlflow {'run' if run else 'plan'} {repeated(found, path, run=run)}"


def write_placement(tuned: Tuned, path: Path) -> None:
    """Write the best placement as a Python file; UsageError E243 for another kind of file."""
    if path.suffix != ".py":
        raise UsageError(
            Finding(
                code="E243",
                what=f"-o {path}: a placement is written as Python",
                expected="a file that ends in .py",
                fix=f"-o {path.with_suffix('.py')}",
            )
        )
    path.write_text(placement_file(tuned))
