"""`rf.compile`, `rf.simulate`, `rf.tune`, `rf.run`, `rf.eval`: what the commands do, for a program.

Each goes the way of the command of its name, from the same options to the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from rlflow.cli.commands import compile_target
from rlflow.cli.door.asking import (
    Declaring,
    PlanOptions,
    RunOptions,
    SearchOptions,
    of_a_plan,
    run_values,
    target_of,
)
from rlflow.cli.door.evaluating import EvalOptions, Evaluation, as_evaluation, eval_values
from rlflow.cli.door.events import Callback, RunWatch
from rlflow.cli.door.handle import RunHandle, started
from rlflow.cli.door.shown import CompiledPlan, Simulated, TunedPlacements, as_kind
from rlflow.cli.planning.compared import with_range
from rlflow.cli.simulating import simulate_plan
from rlflow.cli.tuning import tune_target
from rlflow.errors import UsageError
from rlflow.scheduler.plan.plan import Plan


def compile(pipeline: Declaring, **options: Unpack[PlanOptions]) -> CompiledPlan:
    """The plan of a pipeline under a placement, `rlflow plan` for a program; nothing is run.

    `pipeline` is what `@rf.pipeline` made, or the path of a file with one. Options are those of
    the command: `placement` by name or as a value, the first of the pipeline if left out;
    `devices="h100:8"`, this machine's if left out; `config={"lr": 1e-5}`, `backend`, `threads`,
    `model_shape`, `engine`, `staleness`, `stream`, `pause_at`, `optimize`, `host_memory`,
    `reserve`, `lengths`, `acceptance`; `only="actor.rollout"` and `from_="runs/a:actor.rollout"`
    take a part of the graph. The plan's `range` is that of its period, for accelerators.

    Raises UsageError for options that are not understood (E820), GraphError where the pipeline is
    wrong, PlanError where it does not fit.
    """
    planned = compile_target(target_of(pipeline, options, "rf.compile", PlanOptions))
    return as_kind(CompiledPlan, with_range(planned))


def simulate(
    pipeline: Declaring | Plan, *, iterations: int | None = None, **options: Unpack[PlanOptions]
) -> Simulated:
    """Play a plan on a virtual clock, `rlflow simulate` for a program: seconds, idle time, causes.

    Takes a plan of `rf.compile`, or a pipeline and the options of that. `iterations` are played;
    until they repeat if left out. Raises PlanError E236 where an action's cost is not known, and
    what `rf.compile` raises.
    """
    if isinstance(pipeline, Plan):
        if options:
            raise UsageError(of_a_plan(options))
        return as_kind(Simulated, simulate_plan(pipeline, iterations))
    target = target_of(pipeline, options, "rf.simulate", PlanOptions)
    return as_kind(Simulated, simulate_plan(compile_target(target).compiled.plan, iterations))


def tune(
    pipeline: Declaring,
    *,
    max_staleness: int | None = None,
    top: int = 10,
    **options: Unpack[SearchOptions],
) -> TunedPlacements:
    """Search for the placement with the shortest iteration that fits, as `rlflow tune` does.

    `devices` are those to search on; `placement` names the one to beat, all of the pipeline's if
    left out. Staleness is used up to `max_staleness`, as far as the pipeline allows if left out;
    `top` rows are kept. `.placement` of the answer is the best one, for `rf.compile` or `rf.run`.

    Raises PlanError E240 where nothing fits, E241 where a model's size is not known, and what
    `rf.compile` raises.
    """
    said: SearchOptions = {**options, "engine": None}
    target = target_of(pipeline, said, "rf.tune", SearchOptions)
    engine = options.get("engine")
    found = tune_target(target, max_staleness=max_staleness, top=top, engine=engine)
    return as_kind(TunedPlacements, found)


def eval(weights: Declaring, **options: Unpack[EvalOptions]) -> Evaluation:
    """Sample held-out rows with some weights, as `rlflow eval` does, and wait for what they score.

    `weights` are a run directory, one of its checkpoints, a model, or a pipeline for those that it
    begins with. Options are those of the command: `samples=8` of each prompt, `k=(1, 4)`, `data`,
    `limit`, `answer`, `passes`, `pipeline`, `placement`, `devices`, `config` and others. Nothing is
    printed unless `quiet=False`.

    Raises UsageError E360 to E370 for what cannot be evaluated, E820 for options that are not
    understood, and what a run raises.
    """
    from rlflow.cli.evaluation.running import evaluate_named

    found = evaluate_named(*eval_values(weights, options), watch=RunWatch(()))
    assert found is not None, "only a dry run finds nothing"
    return as_evaluation(found)


def run(
    pipeline: Declaring, *, callbacks: Sequence[Callback] = (), **options: Unpack[RunOptions]
) -> RunHandle:
    """Run a pipeline as `rlflow run` does, in a thread; returns once the first iteration can begin.

    Options are those of the command: `placement`, `devices`, `config`, `only`, `from_` and others
    of `rf.compile`, `iterations`, `run_dir`, `resume`, `record`, `track`, `profile_action`,
    `save_every`, `keep`, `strict`. Nothing is printed unless `quiet=False`. Each of `callbacks` is
    called with every `IterationDone`, in the run's thread, which waits for it; what one raises ends
    the run with CallbackError (E821).

    Raises what is wrong before anything starts, as the command does; what goes wrong later is
    raised by the handle, where it is iterated over or waited for.
    """
    from rlflow.cli.running import run_as_asked

    values, watch = run_values(pipeline, options), RunWatch(callbacks)
    return started(watch, lambda: run_as_asked(watch=watch, **values))
