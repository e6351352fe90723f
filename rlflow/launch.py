"""`rlflow run`: from a command line to a run, with everything checked before it starts.

The one door from the command line to the runtime: torch is imported here, once the
graph and the plan are known to be right.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.commands import NOTHING, Planned, Target, data_findings, declare, plan_declared
from rlflow.errors import Finding, PlanError, UsageError
from rlflow.graph.graph import Graph
from rlflow.runtime.rundir import RunDir, latest_run
from rlflow.scheduler.plan import Plan
from rlflow.scheduler.text import plan_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended, for standard output."""

    run_dir: Path | None
    iterations: int
    text: str
    metrics: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """The outcome as plain data."""
        return {
            "run_dir": str(self.run_dir) if self.run_dir else None,
            "iterations": self.iterations,
            "metrics": self.metrics,
        }


def launch(
    *,
    dry_run: bool,
    iterations: int | None,
    run_dir: str | None,
    resume: str | None,
    save_every: int,
    quiet: bool,
    as_json: bool,
    no_color: bool,
    **options: Any,
) -> Outcome:
    """Compile, check, and run; or compile and check only."""
    target = Target(**options)
    declared = declare(target)
    findings = data_findings(declared.graph, remote=True)
    if findings:
        raise UsageError(*findings, summary=NOTHING)
    planned = plan_declared(declared, target)
    plan = planned.compiled.plan
    _require_local(plan)
    count = iterations or planned.declared.config.iterations
    if dry_run:
        _preflight(plan.graph, planned)
        return Outcome(
            run_dir=None,
            iterations=0,
            metrics={},
            text=""
            if as_json
            else f"{plan_text(plan)}\n\n  dry run: {count} iterations would run; "
            "nothing was started",
        )
    if no_color:
        os.environ["NO_COLOR"] = "1"
    existing = _existing_run(resume, run_dir, planned) if resume else None
    return _execute(planned, count, existing, run_dir, save_every, quiet or as_json)


def _require_local(plan: Plan) -> None:
    """Refuse a plan that this process cannot run."""
    if plan.backend == "local":
        return
    pools = ", ".join(f"{name} has {len(devices)}" for name, devices in plan.pools.items())
    raise PlanError(
        Finding(
            code="E403",
            what="the local backend runs CPU pools of one device each",
            got=f"{pools}; devices: {plan.cluster}",
            expected="one device a pool (several devices a pool are planned, not run, so far)",
            fix="rlflow plan shows this placement; --placement chooses another",
        )
    )


def _existing_run(resume: str, run_dir: str | None, planned: Planned) -> Path:
    """The run that `--resume` names; without a name `--run-dir`, or else the latest one."""
    if resume != "latest":
        return Path(resume)
    return Path(run_dir) if run_dir else latest_run(pipeline=planned.target.pipeline)


def _preflight(graph: Graph, planned: Planned) -> None:
    from rlflow.runtime.preflight import check_prompts

    check_prompts(graph, planned.declared.pipeline.path)


def _execute(
    planned: Planned,
    iterations: int,
    existing: Path | None,
    run_dir: str | None,
    save_every: int,
    quiet: bool,
) -> Outcome:
    os.environ.setdefault("OMP_NUM_THREADS", str(planned.cluster.threads))
    from rich.console import Console

    from rlflow.runtime.allocator import keep_freed_memory
    from rlflow.runtime.display import Display
    from rlflow.runtime.durable import check_armed
    from rlflow.runtime.metrics import read_metrics
    from rlflow.runtime.run import Run, Settings
    from rlflow.runtime.worker import Worker

    check_armed()
    keep_freed_memory()
    plan, near = planned.compiled.plan, planned.declared.pipeline.path
    config = planned.declared.config
    display = Display(Console(stderr=True), quiet=quiet)
    directory = RunDir.open(existing) if existing else None
    _preflight(plan.graph, planned)
    display.say(plan_text(plan))
    worker = Worker(plan, seed=config.seed, near=near)
    if directory is None:
        directory = RunDir.create(
            Path(run_dir) if run_dir else None,
            plan.graph.name,
            pipeline=planned.target.pipeline,
            command=["rlflow", *sys.argv[1:]],
        )
    with directory:
        settings = Settings(
            seed=config.seed,
            iterations=iterations,
            threads=planned.cluster.threads,
            save_every=save_every,
            near=near,
            resume_line=resume_line(planned, iterations, save_every, directory.path),
        )
        display.say(f"\nrun directory: {directory.path}")
        run = Run(plan, settings, worker, directory, display)
        directory.write_config(config.model_dump(mode="json"))
        directory.write_graph(plan.graph.to_json())
        directory.write_plan(plan_text(plan) + "\n", plan.to_json())
        done = run.execute()
    lines = read_metrics(directory.metrics)
    return Outcome(
        run_dir=directory.path,
        iterations=done,
        metrics=dict(lines[-1].metrics) if lines else {},
        text="" if quiet else _summary(directory.path),
    )


def resume_line(planned: Planned, iterations: int, save_every: int, path: Path) -> str:
    """The command that continues a run."""
    target = planned.target
    words = ["rlflow", "run", target.pipeline]
    words += ["--placement", planned.compiled.plan.placement]
    for setting in target.settings:
        words += ["--set", setting]
    words += ["--devices", target.devices] if target.devices else []
    words += ["--threads", str(target.threads)] if target.threads else []
    words += ["--iterations", str(iterations), "--save-every", str(save_every)]
    return shlex.join([*words, "--resume", str(path)])


def _summary(path: Path) -> str:
    from rlflow.viz.report import summary_text

    return summary_text(path)
