"""`rlflow trace`: a run as a file for Perfetto."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run_dir", metavar="RUN")
@click.option(
    "-o", "--output", metavar="FILE", help="A .json.gz or .json; RUN/trace.json.gz by default."
)
@click.option("--iterations", metavar="FROM:TO", help="Some iterations, TO left out; or one.")
def trace(run_dir: str, output: str | None, iterations: str | None) -> None:
    """Write a run as a trace for Perfetto: actions, what they waited for, memory, kernels."""
    from rlflow.report.trace.trace import trace_run
    from rlflow.runtime.record.devices.profiled import iteration_range

    wanted = None
    if iterations is not None:
        wanted = range(*iteration_range(iterations, "--iterations"))
    written, count = trace_run(Path(run_dir), Path(output) if output else None, wanted)
    click.echo(written)
    click.echo(f"{count} events; open it at https://ui.perfetto.dev, nothing is sent", err=True)
