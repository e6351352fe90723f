"""The command line, one function a command; groups of them are in folders of their own.

Declaring never executes: only `run` and `report` reach for the runtime, and only `run`
imports torch. Results go to standard output, everything else to standard error. Exit
codes: 0 done, 1 failed, 2 usage, 3 graph, 4 plan, 70 a bug in rlflow, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import click

from rlflow.cli.commands import Target
from rlflow.cli.evaluation.command import evaluate_weights
from rlflow.cli.launching.command import launch_run
from rlflow.cli.looking.bisect import bisect_runs
from rlflow.cli.looking.idle import why_idle
from rlflow.cli.looking.report import report
from rlflow.cli.looking.samples import show_samples
from rlflow.cli.looking.watch import watch_run
from rlflow.cli.options import (
    acceptance_option,
    engine_option,
    lengths_option,
    memory_options,
    model_shape_option,
    plan_options,
    range_option,
    repeated,
    run_options,
    schedule_options,
    target_options,
)
from rlflow.cli.planning.command import check, plan, viz
from rlflow.cli.recipes.command import init_pipeline, list_recipes
from rlflow.cli.rehearsal.command import rehearse
from rlflow.cli.shell.completion import print_completion
from rlflow.cli.shell.early import STOPPED
from rlflow.cli.shell.leaving import leave, stop_on_signals
from rlflow.cli.shell.numbers import Finite
from rlflow.cli.shell.printed import hint, json_option, print_json
from rlflow.cli.shell.values import typed_files
from rlflow.cli.stages.replay import replay_update
from rlflow.cli.tracing.command import trace
from rlflow.errors import (
    RlflowError,
    error_text,
    printable,
)

BUG = 70

EXAMPLES = """\b
Examples:
  rlflow viz  pipelines/grpo_arithmetic.py -o grpo.svg
  rlflow plan pipelines/grpo_arithmetic.py --placement split
  rlflow run  pipelines/grpo_arithmetic.py --set group_size=16 --iterations 200
"""

RUN_EXAMPLES = """\b
Examples:
  rlflow run pipelines/grpo_arithmetic.py --placement split --iterations 200
  rlflow run pipelines/grpo_arithmetic.py --resume runs/grpo-20250131T142501Z
"""


@click.group(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rlflow-engine", prog_name="rlflow")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def cli(debug: bool) -> None:
    """Declare RL for language models as a graph, look at its plan, run it."""


for command in (check, viz, plan, rehearse, list_recipes, init_pipeline, print_completion):
    cli.add_command(command)
for command in (report, trace, why_idle, watch_run, show_samples, bisect_runs, evaluate_weights):
    cli.add_command(command)
cli.add_command(launch_run)
cli.add_command(replay_update)


@cli.command("run", no_args_is_help=True, epilog=RUN_EXAMPLES)
@run_options
def run_pipeline(as_json: bool, **options: Any) -> None:
    """Run a pipeline; Ctrl-C stops after the iteration, --resume continues."""
    from rlflow.cli.running import run_as_asked

    outcome = run_as_asked(as_json=as_json, **options)
    if as_json:
        print_json(outcome.as_json())
    elif outcome.text:
        click.echo(printable(outcome.text))


@cli.command(no_args_is_help=True)
@target_options
@schedule_options
@click.option(
    "--iterations",
    type=click.IntRange(2),
    default=3,
    show_default=True,
    help="Iterations that count, after one that warms up.",
)
@click.option("--address", metavar="HOST:PORT", help="Join a running Ray cluster.")
@json_option
def profile(iterations: int, address: str | None, as_json: bool, **options: Any) -> None:
    """Run a few iterations, and keep how long everything took for later plans."""
    from rlflow.cli.profile import profile_run as calibrate

    found = calibrate(iterations=iterations, address=address, **options)
    if as_json:
        print_json(found.as_json())
    else:
        click.echo(found.text())


@cli.command()
@click.argument("run_dir", metavar="RUN", shell_complete=typed_files)
@click.option("-o", "--output", metavar="DIR", required=True, help="Where to write.")
@click.option("--model", "name", metavar="NAME", help="Which trained model; else the only one.")
@json_option
def export(run_dir: str, output: str, name: str | None, as_json: bool) -> None:
    """Write a run's trained weights as a Hugging Face directory."""
    from rlflow.cli.export import export_run as write

    written, done = write(Path(run_dir), Path(output), name)
    if as_json:
        print_json({"directory": str(written), "iterations": done})
    else:
        click.echo(f"{written}   weights after {done} iterations")


@cli.command("simulate")
@plan_options
@click.option(
    "--iterations",
    type=click.IntRange(1, 100_000),
    help="Iterations to play; until they repeat by default.",
)
@json_option
@click.option("-o", "--output", metavar="FILE", help="Write a .svg, .png, .pdf, .html or .json.")
def simulate_pipeline(
    iterations: int | None, as_json: bool, output: str | None, **options: Any
) -> None:
    """Play the plan of a placement on a virtual clock: period, idle time and its causes."""
    from rlflow.cli.simulating import (
        picture_format,
        simulate_target,
        simulation_json,
        write_simulation,
    )
    from rlflow.scheduler.simulate.text import simulation_text

    if output is not None:
        picture_format(Path(output))
    found = simulate_target(Target(**options), iterations)
    if output is not None:
        write_simulation(found, Path(output))
        hint(f"wrote {output}")
    click.echo(simulation_json(found).rstrip() if as_json else simulation_text(found))
    if output is None and not as_json:
        again = repeated(options, found.plan.placement, run=False)
        hint(f"next: rlflow simulate {again} -o gantt.svg")


@cli.command("tune")
@target_options
@model_shape_option
@acceptance_option
@lengths_option
@click.option(
    "--max-staleness",
    type=click.IntRange(0),
    metavar="K",
    help="How far rollouts may run ahead; what the pipeline's placements have by default.",
)
@engine_option
@click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="How many.")
@click.option(
    "--sweep",
    metavar="devices=A..B",
    help="Search at each size, doubled, or a list: devices=8,96; -o draws .png, .svg or .pdf.",
)
@click.option(
    "--price",
    type=Finite(min=0, min_open=True),
    metavar="COST",
    help="With --sweep: what an hour of a device costs.",
)
@json_option
@click.option("-o", "--output", metavar="FILE.py", help="Write the best placement to a file.")
def tune_pipeline(
    max_staleness: int | None,
    top: int,
    sweep: str | None,
    price: float | None,
    as_json: bool,
    output: str | None,
    **options: Any,
) -> None:
    """Search pools, sizes and layouts for the placement with the shortest iteration."""
    if sweep is not None:
        from rlflow.cli.planning.sweeping import print_sweep

        limits = {"max_staleness": max_staleness, "top": top}
        print_sweep(sweep, price, output, options, as_json=as_json, limits=limits)
        return
    if price is not None:
        raise click.UsageError("--price is of a sweep: give --sweep devices=8..512 too")
    from rlflow.cli.tuning import next_words, tune_target, write_placement
    from rlflow.scheduler.search.text import tuned_json, tuned_text

    asked = {**options, "engine": None}
    found = tune_target(
        Target(**asked), max_staleness=max_staleness, top=top, engine=options["engine"]
    )
    if output is not None:
        write_placement(found, Path(output))
        hint(f"wrote {output}")
    if as_json:
        print_json(tuned_json(found))
        return
    click.echo(tuned_text(found))
    known = options["model_shape"] is None
    then = next_words(found, asked, output or "best.py", run=known)
    again = repeated(options, options["placement"], run=False)
    again += "" if max_staleness is None else f" --max-staleness {max_staleness}"
    hint(f"next: {then}" if output else f"next: rlflow tune {again} -o best.py && {then}")


@cli.command()
@click.argument(
    "targets",
    metavar="PIPELINE | PLAN.json PLAN.json",
    nargs=-1,
    required=True,
    shell_complete=typed_files,
)
@click.option("--placement", "placements", multiple=True, metavar="NAME", help="Given twice.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE")
@click.option("--devices", metavar="KIND:COUNT")
@memory_options
@click.option("--threads", type=click.IntRange(1))
@click.option("--backend", type=click.Choice(["local", "ray"]))
@schedule_options
@model_shape_option
@acceptance_option
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the plans differ.")
@range_option
@json_option
def diff(
    targets: tuple[str, ...],
    placements: tuple[str, ...],
    exit_code: bool,
    ranged: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare the plans of two placements, or two that `plan -o` wrote, side by side."""
    from rlflow.cli.simulating import diff_of
    from rlflow.scheduler.plan.diff import diff_text

    found = diff_of(targets, placements, ranged=ranged, **options)
    if as_json:
        print_json(found.as_json())
    else:
        click.echo(diff_text(found))
    if exit_code and not found.same:
        raise SystemExit(1)


@cli.command()
@click.option(
    "--measure",
    is_flag=True,
    help="Time this machine's devices, under a minute on a CPU, and print a file for --devices.",
)
@click.option("-o", "--output", metavar="FILE.toml", help="Write what --measure finds to a file.")
@json_option
def doctor(measure: bool, output: str | None, as_json: bool) -> None:
    """Say what is installed, what is missing, and what to type; or measure the devices."""
    from rlflow.cli.doctor import examine

    if output is not None and not measure:
        raise click.UsageError("-o writes what --measure finds: give both")
    if measure:
        from rlflow.cli.measuring import measure_here

        click.echo(measure_here(output, hint, as_json=as_json), nl=False)
        return
    rows = examine()
    if as_json:
        print_json([row.as_json() for row in rows])
    else:
        for row in rows:
            click.echo(row.line())
    if any(row.missing and row.required for row in rows):
        raise SystemExit(1)


def main() -> None:
    """The entry point: a command and its exit code, whatever its threads do in the end."""
    code: str | int | None = 0
    try:
        stop_on_signals()
        run_command()
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:  # while the end of a command was told
        code = STOPPED
    leave(code)


def run_command() -> None:
    """Run a command and turn its error into a message and SystemExit with its exit code."""
    debug = "--debug" in sys.argv
    try:
        cli(prog_name="rlflow", standalone_mode=False)
    except RlflowError as error:
        if debug:
            click.echo(printable(traceback.format_exc()), err=True)
        click.echo(painted(error.render()), err=True)
        raise SystemExit(error.exit_code) from None
    except (click.exceptions.Abort, KeyboardInterrupt):  # what click makes of Ctrl-C, or misses
        click.echo("stopped at once", err=True)
        raise SystemExit(STOPPED) from None
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(0) from None
    except SystemExit:
        raise
    except BaseException as error:  # also what is no Exception, of a user's file
        from rlflow.runtime.refusals import refusal

        told = refusal(error)
        if told is None:
            raise SystemExit(bug(error)) from None
        click.echo(painted(told.render()), err=True)
        raise SystemExit(told.exit_code) from None


def painted(text: str) -> str:
    """The word `error` in red, on a terminal that wants colour."""
    if not sys.stderr.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return text
    return text.replace("error[", click.style("error", fg="red", bold=True) + "[")


def bug(error: BaseException) -> int:
    """Write a traceback to a file and say where; returns the exit code of a bug."""
    trace = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="rlflow-bug-", suffix=".txt", delete=False, errors="replace"
        ) as log:
            log.write(trace)
        kept = log.name
    except OSError:  # no temporary directory, or one that is full
        kept = f"\n{printable(trace)}"
    said = printable(error_text(error)).replace("\n", "\n  ")
    click.echo(f"error[E900]: a bug in rlflow: {said}", err=True)
    click.echo(f"  traceback    {kept}\n  please report it with that traceback", err=True)
    return BUG


if __name__ == "__main__":
    main()
