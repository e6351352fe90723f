"""`rlflow check`, `rlflow viz` and `rlflow plan`. None of them runs anything."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from rlflow.cli.commands import Target, compile_target, declare
from rlflow.cli.options import plan_options, range_option, repeated
from rlflow.cli.shell.printed import hint, json_option, print_json
from rlflow.errors import UsageError


@click.command("check")
@plan_options
@json_option
def check(as_json: bool, **options: Any) -> None:
    """Check a pipeline and all of its placements; run nothing."""
    from rlflow.cli.commands import check_all

    result = check_all(Target(**options))
    if as_json:
        print_json(result)
        return
    click.echo("\n".join(result["lines"]))
    hint(f"next: rlflow plan {options['pipeline']}")


@click.command("viz")
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
@json_option
def viz(
    level: str, form: str | None, output: str | None, direction: str, as_json: bool, **options: Any
) -> None:
    """Draw the graph, or the plan of a placement."""
    from rlflow.report.render import format_of, render

    path = None if output in (None, "-") else Path(str(output))
    if as_json and path is None and form not in (None, "json"):
        raise UsageError(summary=f"error: --json prints no {form}; say where to write it: -o FILE")
    form = "json" if as_json and path is None else form
    target = Target(**options)
    graph = declare(target).graph
    plan = compile_target(target).compiled.plan if level == "plan" else None
    shape: Any = {"level": level, "direction": direction}
    made = render(graph, plan, format=form, output=path, **shape)
    if path is not None:
        hint(f"wrote {path}")
        if as_json:
            print_json({"file": str(path), "format": format_of(form, path), "level": level})
    elif isinstance(made, bytes):
        if output is None:
            raise UsageError(summary=f"error: {form} is not text; say where to write it: -o FILE")
        sys.stdout.buffer.write(made)
    else:
        click.echo(made)


@click.command("plan")
@plan_options
@click.option("--show-passes", is_flag=True, help="Print the plan after every pass.")
@click.option("--explain", metavar="ACTION", help="Everything about one action.")
@click.option("--config", "show_config", is_flag=True, help="Print the resolved config.")
@range_option
@json_option
@click.option("-o", "--output", metavar="FILE", help="Write the plan as JSON to a file.")
def plan(
    show_passes: bool,
    explain: str | None,
    show_config: bool,
    ranged: bool,
    as_json: bool,
    output: str | None,
    **options: Any,
) -> None:
    """Compile a placement and print every action, with its reason."""
    from rlflow.cli.commands import config_lines, explain_action
    from rlflow.cli.planning.compared import with_range
    from rlflow.scheduler.compile import dump_plan
    from rlflow.scheduler.plan.text import plan_text

    if as_json and (show_passes or explain or show_config):
        other = "--show-passes" if show_passes else "--explain" if explain else "--config"
        raise click.UsageError(f"--json prints the whole plan, {other} a part of it: give one")
    found = compile_target(Target(**options))
    made = found.compiled.plan
    if not (show_config or explain or show_passes):
        made = with_range(found, asked=ranged)
    if output:
        Path(output).write_text(dump_plan(made))
        hint(f"wrote {output}")
    if as_json:
        click.echo(dump_plan(made), nl=False)
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
        click.echo(plan_text(made))
    again = repeated(options, found.compiled.plan.placement, run=True)
    if options["model_shape"] is None:
        hint(f"next: rlflow run {again}     picture: rlflow viz {again} --level plan -o plan.svg")
