"""`rlflow report`: a run as one page, other runs' curves laid over its own."""

from __future__ import annotations

from pathlib import Path

import click

from rlflow.cli.shell.printed import json_option, print_json
from rlflow.cli.shell.values import typed_files


@click.command(no_args_is_help=True)
@click.argument(
    "run_dirs", metavar="RUN [RUN ...]", nargs=-1, required=True, shell_complete=typed_files
)
@click.option("-o", "--output", metavar="FILE", help="Where to write; RUN/report.html by default.")
@click.option("--iteration", type=click.IntRange(0), help="Which one the timeline begins with.")
@json_option
def report(
    run_dirs: tuple[str, ...], output: str | None, iteration: int | None, as_json: bool
) -> None:
    """Write one offline HTML page about a run; curves of further runs are laid over its own.

    It has the timeline of every iteration with what idle devices waited for, predicted and
    measured seconds, memory, metrics, the plan and the graph.
    """
    from rlflow.report.report import write_report

    first, *others = map(Path, run_dirs)
    where = Path(output) if output else None
    written = write_report(first, where, others=others, iteration=iteration)
    if as_json:
        print_json({"file": str(written), "runs": [*run_dirs]})
    else:
        click.echo(written)
