"""The command line, one function a command; `rehearse` is in a file of its own.

Declaring never executes: only `run` and `report` reach for the runtime, and only `run`
imports torch. Results go to standard output, everything else to standard error. Exit
codes: 0 done, 1 failed, 2 usage, 3 graph, 4 plan, 70 a bug in rlflow, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import click

from rlflow.cli.commands import Target, compile_target, declare
from rlflow.cli.evaluation.command import evaluate_weights
from rlflow.cli.looking.bisect import bisect_runs
from rlflow.cli.looking.report import report
from rlflow.cli.looking.samples import show_samples
from rlflow.cli.looking.watch import watch_run
from rlflow.cli.options import (
    check_deadline,
    engine_option,
    memory_options,
    model_shape_option,
    plan_options,
    repeated,
    run_options,
    schedule_options,
    target_options,
)
from rlflow.cli.recipes.command import init_pipeline, list_recipes
from rlflow.cli.rehearsal.command import rehearse
from rlflow.cli.tracing.command import trace
from rlflow.errors import RlflowError, UsageError

BUG = 70
INTERRUPTED = 130

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


cli.add_command(rehearse)
cli.add_command(trace)
cli.add_command(list_recipes)
cli.add_command(init_pipeline)
cli.add_command(report)
cli.add_command(watch_run)
cli.add_command(show_samples)
cli.add_command(bisect_runs)
cli.add_command(evaluate_weights)


@cli.command()
@plan_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON only.")
def check(as_json: bool, **options: Any) -> None:
    """Check a pipeline and all of its placements; run nothing."""
    from rlflow.cli.commands import check_all

    result = check_all(Target(**options))
    if as_json:
        emit(result)
        return
    click.echo("\n".join(result["lines"]))
    hint(f"next: rlflow plan {options['pipeline']}")


@cli.command()
@plan_options
@click.option("--level", type=click.Choice(["graph", "plan"]), default="graph", show_default=True)
@click.option(
    "--format",
    "form",
    metavar="FORMAT",
    help="text, mermaid, dot, svg, png, pdf or json; by suffix of -o if left out.",
)
@click.option("-o", "--output", metavar="FILE", help="Where to write; - is standard output.")
@click.option("--direction", type=click.Choice(["LR", "TB"]), default="TB", show_default=True)
def viz(level: str, form: str | None, output: str | None, direction: str, **options: Any) -> None:
    """Draw the graph, or the plan of a placement."""
    from rlflow.report.render import render

    target = Target(**options)
    graph = declare(target).graph
    plan = compile_target(target).compiled.plan if level == "plan" else None
    path = None if output in (None, "-") else Path(str(output))
    shape: Any = {"level": level, "direction": direction}
    made = render(graph, plan, format=form, output=path, **shape)
    if path is not None:
        hint(f"wrote {path}")
    elif isinstance(made, bytes):
        if output is None:
            raise UsageError(summary=f"error: {form} is not text; say where to write it: -o FILE")
        sys.stdout.buffer.write(made)
    else:
        click.echo(made)


@cli.command()
@plan_options
@click.option("--show-passes", is_flag=True, help="Print the plan after every pass.")
@click.option("--explain", metavar="ACTION", help="Everything about one action.")
@click.option("--config", "show_config", is_flag=True, help="Print the resolved config.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON only.")
@click.option("-o", "--output", metavar="FILE", help="Write the plan as JSON to a file.")
def plan(
    show_passes: bool,
    explain: str | None,
    show_config: bool,
    as_json: bool,
    output: str | None,
    **options: Any,
) -> None:
    """Compile a placement and print every action, with its reason."""
    from rlflow.cli.commands import config_lines, explain_action
    from rlflow.scheduler.compile import dump_plan
    from rlflow.scheduler.plan.text import plan_text

    found = compile_target(Target(**options))
    if output:
        Path(output).write_text(dump_plan(found.compiled.plan))
        hint(f"wrote {output}")
    if as_json:
        click.echo(dump_plan(found.compiled.plan), nl=False)
        return
    if show_config:
        click.echo("\n".join(config_lines(found)))
        return
    if explain:
        click.echo(explain_action(found.compiled.plan, explain))
        return
    if show_passes:
        for title, stage in found.compiled.stages:
            click.echo(f"after {title}\n{plan_text(stage)}\n")
    else:
        click.echo(plan_text(found.compiled.plan))
    again = repeated(options, found.compiled.plan.placement, run=True)
    if options["model_shape"] is None:
        hint(f"next: rlflow run {again}     picture: rlflow viz {again} --level plan -o plan.svg")


@cli.command("run", no_args_is_help=True, epilog=RUN_EXAMPLES)
@run_options
def run_pipeline(as_json: bool, **options: Any) -> None:
    """Run a pipeline; Ctrl-C stops after the iteration, --resume continues."""
    from rlflow.cli.launch import launch

    check_deadline(options["deadline"])
    outcome = launch(as_json=as_json, **options)
    if as_json:
        emit(outcome.as_json())
    elif outcome.text:
        click.echo(outcome.text)


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
@click.option("--json", "as_json", is_flag=True, help="Print JSON only.")
def profile(iterations: int, address: str | None, as_json: bool, **options: Any) -> None:
    """Run a few iterations, and keep how long everything took for later plans."""
    from rlflow.cli.profile import profile_run as calibrate

    found = calibrate(iterations=iterations, address=address, **options)
    if as_json:
        emit(found.as_json())
    else:
        click.echo(found.text())


@cli.command()
@click.argument("run_dir", metavar="RUN")
@click.option("-o", "--output", metavar="DIR", required=True, help="Where to write.")
@click.option("--model", "name", metavar="NAME", help="Which trained model; else the only one.")
def export(run_dir: str, output: str, name: str | None) -> None:
    """Write a run's trained weights as a Hugging Face directory."""
    from rlflow.cli.export import export_run as write

    written, done = write(Path(run_dir), Path(output), name)
    click.echo(f"{written}   weights after {done} iterations")


@cli.command("simulate")
@plan_options
@click.option(
    "--iterations", type=click.IntRange(1), help="Iterations to play; until they repeat by default."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON only.")
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
@click.option(
    "--max-staleness",
    type=click.IntRange(0),
    metavar="K",
    help="How far rollouts may run ahead; what the pipeline's placements have by default.",
)
@engine_option
@click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="How many.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON only.")
@click.option("-o", "--output", metavar="FILE.py", help="Write the best placement to a file.")
def tune_pipeline(
    max_staleness: int | None, top: int, as_json: bool, output: str | None, **options: Any
) -> None:
    """Search pools, sizes and layouts for the placement with the shortest iteration."""
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
        emit(tuned_json(found))
        return
    click.echo(tuned_text(found))
    known = options["model_shape"] is None
    then = next_words(found, asked, output or "best.py", run=known)
    again = repeated(options, options["placement"], run=False)
    again += "" if max_staleness is None else f" --max-staleness {max_staleness}"
    hint(f"next: {then}" if output else f"next: rlflow tune {again} -o best.py && {then}")


@cli.command()
@click.argument("targets", metavar="PIPELINE | PLAN.json PLAN.json", nargs=-1, required=True)
@click.option("--placement", "placements", multiple=True, metavar="NAME", help="Given twice.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE")
@click.option("--devices", metavar="KIND:COUNT")
@memory_options
@click.option("--threads", type=click.IntRange(1))
@click.option("--backend", type=click.Choice(["local", "ray"]))
@schedule_options
@model_shape_option
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the plans differ.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON only.")
def diff(
    targets: tuple[str, ...],
    placements: tuple[str, ...],
    exit_code: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare the plans of two placements, or two that `plan -o` wrote, side by side."""
    from rlflow.cli.simulating import diff_of
    from rlflow.scheduler.plan.diff import diff_text

    found = diff_of(targets, placements, **options)
    if as_json:
        emit(found.as_json())
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
@click.option("--json", "as_json", is_flag=True, help="Print JSON only.")
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
        emit([row.as_json() for row in rows])
    else:
        for row in rows:
            click.echo(row.line())
    if any(row.missing and row.required for row in rows):
        raise SystemExit(1)


def emit(value: object) -> None:
    """Print JSON on standard output."""
    click.echo(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False))


def hint(text: str) -> None:
    """A line for a person, on standard error."""
    click.echo(text, err=True)


def main() -> None:
    """The entry point: runs a command and turns its error into a message and an exit code."""
    debug = "--debug" in sys.argv
    try:
        cli(prog_name="rlflow", standalone_mode=False)
    except RlflowError as error:
        if debug:
            traceback.print_exc()
        click.echo(painted(error.render()), err=True)
        raise SystemExit(error.exit_code) from None
    except click.exceptions.Abort:  # what click makes of Ctrl-C
        click.echo("stopped at once", err=True)
        raise SystemExit(INTERRUPTED) from None
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except Exception as error:
        raise SystemExit(bug(error)) from None


def painted(text: str) -> str:
    """The word `error` in red, on a terminal that wants colour."""
    if not sys.stderr.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return text
    return text.replace("error[", click.style("error", fg="red", bold=True) + "[")


def bug(error: Exception) -> int:
    """Write a traceback to a file and say where; returns the exit code of a bug."""
    with tempfile.NamedTemporaryFile("w", prefix="rlflow-bug-", suffix=".txt", delete=False) as log:
        log.write("".join(traceback.format_exception(error)))
    click.echo(f"error[E900]: a bug in rlflow: {type(error).__name__}: {error}", err=True)
    click.echo(f"  traceback    {log.name}\n  please report it with that file", err=True)
    return BUG


if __name__ == "__main__":
    main()
