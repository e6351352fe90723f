"""`rlflow report`: a run as one page, other runs' curves laid over its own."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(no_args_is_help=True)
@click.argument("run_dirs", metavar="RUN [RUN ...]", nargs=-1, required=True)
@click.option("-o", "--output", metavar="FILE", help="Where to write; RUN/report.html by default.")
@click.option("--iteration", type=click.IntRange(0), help="Which one the timeline begins with.")
def report(run_dirs: tuple[str, ...], output: str | None, iteration: int | None) -> None:
    """Write one offline HTML page about a run; curves of further runs are laid over its own.

    It has the timeline of every iteration with what idle devices waited for, predicted and
    measured seconds, memory, metrics, the plan and the graph.
    """
    from rlflow.report.report import write_report

    first, *others = map(Path, run_dirs)
    where = Path(output) if output else None
    click.echo(write_report(first, where, others=others, iteration=iteration))
