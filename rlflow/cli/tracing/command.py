"""`rlflow trace`: a run as a file for Perfetto."""

from __future__ import annotations

from pathlib import Path

import click

from rlflow.cli.shell.printed import json_option, print_json
from rlflow.cli.shell.values import typed_files


@click.command()
@click.argument("run_dir", metavar="RUN", shell_complete=typed_files)
@click.option(
    "-o", "--output", metavar="FILE", help="A .json.gz or .json; RUN/trace.json.gz by default."
)
@click.option("--iterations", metavar="FROM:TO", help="Some iterations, TO left out; or one.")
@json_option
def trace(run_dir: str, output: str | None, iterations: str | None, as_json: bool) -> None:
    """Write a run as a trace for Perfetto: actions, what they waited for, memory, kernels."""
    from rlflow.report.trace.trace import trace_run
    from rlflow.runtime.record.devices.profiled import iteration_range

    wanted = None
    if iterations is not None:
        wanted = range(*iteration_range(iterations, "--iterations"))
    written, count = trace_run(Path(run_dir), Path(output) if output else None, wanted)
    if as_json:
        print_json({"file": str(written), "events": count})
        return
    click.echo(written)
    click.echo(f"{count} events; open it at https://ui.perfetto.dev, nothing is sent", err=True)
