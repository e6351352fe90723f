"""`rlflow profile`: a few iterations, to learn how long everything takes on these devices.

The run directory is a temporary one and nothing of it stays; what is kept are the medians, in
the file of measured costs.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rlflow.cli.commands import Planned, costs_of, plan_declared
from rlflow.cli.options import read_run
from rlflow.cli.running import run_as_asked
from rlflow.errors import Finding, RunError
from rlflow.runtime.record.spans import Span, read_spans
from rlflow.scheduler.devices.measured import NOTHING, costs_path, load_measured
from rlflow.scheduler.observed import estimate, period_of, window
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.text import duration, table

NEVER = "1000000"
HEADINGS = ("action", "kind", "on", "table", "measured", "ratio", "times")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledAction:
    """One action: seconds by the table, None where it has none; the median measured; how often."""

    action: str
    kind: str
    pool: str
    table: float | None
    measured: float
    count: int

    @property
    def ratio(self) -> float | None:
        """How many times longer it took than the table says."""
        return self.measured / self.table if self.table else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """What a profile found: every action, and seconds of an iteration by three measures.

    `table` is the period planned without measurements, `calibrated` the one planned with them,
    `measured` the median of the run. `path` is where they are kept, None for nowhere.
    """

    plan: Plan
    rows: tuple[ProfiledAction, ...]
    table: float | None
    calibrated: float | None
    measured: float | None
    path: Path | None

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "pipeline": self.plan.graph.name,
            "placement": self.plan.placement,
            "cluster": self.plan.cluster,
            "backend": self.plan.backend,
            "actions": [
                {
                    "action": row.action,
                    "kind": row.kind,
                    "table": row.table,
                    "measured": row.measured,
                    "count": row.count,
                }
                for row in self.rows
            ],
            "iteration": {
                "table": self.table,
                "calibrated": self.calibrated,
                "measured": self.measured,
            },
            "path": str(self.path) if self.path else None,
        }

    def text(self) -> str:
        """The printed form: a line an action, the iteration, where it is kept."""
        plan = self.plan
        cells = [
            (
                row.action,
                row.kind,
                row.pool,
                duration(row.table),
                duration(row.measured),
                "-" if row.ratio is None else f"{row.ratio:.2f}",
                str(row.count),
            )
            for row in self.rows
        ]
        kept = f"kept in {self.path}" if self.path else "not kept: RLFLOW_COSTS is off"
        return "\n".join(
            [
                f"{plan.graph.name}   placement {plan.placement} on {plan.cluster}   "
                f"backend {plan.backend}",
                "",
                *table([HEADINGS, *cells]),
                "",
                f"  iteration: {duration(self.measured)} measured, {duration(self.table)} by the "
                f"table, {duration(self.calibrated)} with what was measured",
                f"  {kept}",
            ]
        )


def profile_run(*, iterations: int, address: str | None = None, **options: Any) -> Profiled:
    """Run a pipeline for a few iterations and a first one that warms up; keep what it took.

    Raises what `rlflow run` raises, and RunError where nothing was measured.
    """
    with tempfile.TemporaryDirectory(prefix="rlflow-profile-") as folder:
        how = {
            "iterations": iterations + 1,
            "run_dir": str(Path(folder) / "run"),
            "save_every": NEVER,
            "quiet": True,
            "no_color": True,
            "address": address,
            "track": ("none",),
            "record": ("none",),
        }
        asked = {**read_run([options["pipeline"]]), **how, **options}
        outcome = run_as_asked(origin="profile", **asked)
        assert outcome.run_dir is not None
        assert outcome.planned is not None
        spans = read_spans(outcome.run_dir / "spans")
    return profiled(outcome.planned, spans)


def profiled(planned: Planned, spans: list[Span]) -> Profiled:
    """The table of predictions beside what was measured, and the periods."""
    plan, seen = planned.compiled.plan, window(spans, 0)
    plain = replace(planned, cluster=replace(planned.cluster, measured=NOTHING))
    costs = costs_of(plain)
    rows = []
    for action in plan.actions:
        took = [s.seconds for s in spans if s.action == action.id and s.iteration >= seen.first]
        if took:
            rows.append(
                ProfiledAction(
                    action=action.id,
                    kind=action.kind,
                    pool=action.pool,
                    table=estimate(plan, costs, action).seconds,
                    measured=median(took),
                    count=len(took),
                )
            )
    if not rows:
        raise RunError(
            Finding(
                code="E234",
                what="nothing was measured",
                expected="an action that ran after the first iteration",
                fix="--iterations 10",
            )
        )
    return Profiled(
        plan=plan,
        rows=tuple(rows),
        table=_period(plain),
        calibrated=_period(replace(planned, cluster=_again(planned))),
        measured=period_of(spans, 0),
        path=costs_path(),
    )


def _again(planned: Planned) -> Any:
    return replace(planned.cluster, measured=load_measured())


def _period(planned: Planned) -> float | None:
    """The estimated period of the placement on a cluster, compiled anew."""
    again = plan_declared(planned.declared, planned.target, planned.cluster)
    timing = again.compiled.plan.timing
    return None if timing is None else timing.seconds
