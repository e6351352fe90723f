"""`rlflow bisect`: the first action at which two runs differ, by what they have recorded."""

from __future__ import annotations

from pathlib import Path

import click

from rlflow.cli.shell.printed import json_option, print_json
from rlflow.cli.shell.values import typed_files
from rlflow.errors import printable

EXAMPLES = """\b
Examples:
  rlflow run pipelines/grpo_arithmetic.py --run-dir runs/a --record actor.rollout=every:1
  rlflow run pipelines/grpo_arithmetic.py --run-dir runs/b --record actor.rollout=every:1
  rlflow bisect runs/a runs/b
"""


@click.command("bisect", epilog=EXAMPLES, no_args_is_help=True)
@click.argument("one", metavar="RUN_A", shell_complete=typed_files)
@click.argument("other", metavar="RUN_B", shell_complete=typed_files)
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the runs differ.")
@json_option
def bisect_runs(one: str, other: str, exit_code: bool, as_json: bool) -> None:
    """Find the first action at which two runs differ: iteration, node, row, field, both values."""
    from rlflow.report.compared.differing import compare_runs
    from rlflow.report.compared.text import parting_lines
    from rlflow.runtime.record.rundir import RunDir

    found = compare_runs(RunDir.view(Path(one)).path, RunDir.view(Path(other)).path)
    if as_json:
        print_json(found.as_json())
    else:
        click.echo(printable("\n".join(parting_lines(found, one, other))))
    if exit_code and not found.same:
        raise SystemExit(1)
