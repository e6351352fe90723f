"""`rlflow idle`: why the devices of a run were idle."""

from __future__ import annotations

from pathlib import Path

import click

from rlflow.cli.shell.printed import json_option, print_json
from rlflow.cli.shell.values import typed_files

EXAMPLES = """\b
Examples:
  rlflow idle runs/grpo-20250131T142501Z
  rlflow idle runs/grpo-20250131T142501Z --device 1 --iteration 30
"""


@click.command("idle", epilog=EXAMPLES, no_args_is_help=True)
@click.argument("run_dir", metavar="RUN", shell_complete=typed_files)
@click.option("--device", metavar="DEVICE", help="A number, a pool, or gen[1]; else all.")
@click.option(
    "--iteration", type=click.IntRange(0), metavar="N", help="Which; else one of median length."
)
@json_option
def why_idle(run_dir: str, device: str | None, iteration: int | None, as_json: bool) -> None:
    """Say why devices of a run were idle: each gap of an iteration, and what it waited for."""
    from rlflow.report.runfiles import read_run_files
    from rlflow.report.waiting.idle import idle_iteration, idle_text

    found = idle_iteration(read_run_files(Path(run_dir)), iteration, device)
    if as_json:
        print_json(found.as_json())
    else:
        click.echo(idle_text(found))
