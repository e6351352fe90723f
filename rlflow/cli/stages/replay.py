"""`rlflow replay`: the update of one iteration again, from its checkpoint and recorded edges."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from rlflow.cli.shell.printed import print_json

EXAMPLES = """\b
Examples:
  rlflow run pipelines/grpo_arithmetic.py --iterations 20 --run-dir runs/demo \\
      --record actor.rollout --save-every 1 --keep 20
  rlflow replay runs/demo --iteration 7
  rlflow replay runs/demo --iteration 7 --set lr=1e-5
  rlflow replay runs/demo --iteration 7 --placement fsdp --devices cpu:2
"""
F = TypeVar("F", bound=Callable[..., Any])


def changing_options(function: F) -> F:
    """Options of a run that a replay may say anew; what is left out is as it was."""
    for option in (
        click.option("--address", metavar="HOST:PORT", help="Join a running Ray cluster."),
        click.option("--backend", type=click.Choice(["local", "ray"]), help="Another than it had."),
        click.option("--threads", type=click.IntRange(1), help="Host threads of each device."),
        click.option("--devices", metavar="KIND:COUNT", help="Other devices than the run's."),
        click.option("--placement", metavar="NAME", help="Another placement than the run's."),
        click.option(
            "--set",
            "settings",
            multiple=True,
            metavar="KEY=VALUE",
            help="A field of the config that is to be another; repeatable.",
        ),
    ):
        function = option(function)
    return function


@click.command("replay", epilog=EXAMPLES, no_args_is_help=True)
@click.argument("run_dir", metavar="RUN")
@click.option(
    "--iteration", type=click.IntRange(0), required=True, help="Which iteration, from 0 on."
)
@click.option(
    "--from",
    "starts",
    multiple=True,
    metavar="NODE",
    help="Compute this node and what reads it again, even where it is recorded; repeatable.",
)
@changing_options
@click.option("--run-dir", "written", metavar="DIR", help="Where to write; RUN/replays by default.")
@click.option("--all", "everything", is_flag=True, help="Also list the figures that are equal.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if a bit differs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON only.")
def replay_update(
    run_dir: str,
    iteration: int,
    everything: bool,
    exit_code: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Compute the update of one iteration again, and lay it beside the run's own.

    It begins with the checkpoint from before the iteration, and reads what was sampled from the
    run's record. With nothing changed it is equal in every bit.
    """
    from rlflow.cli.stages.replaying import replayed
    from rlflow.report.compared.update_text import replayed_lines

    found = replayed(Path(run_dir), iteration, **options)
    if as_json:
        print_json(found.as_json())
    else:
        click.echo("\n".join(replayed_lines(found, everything=everything)))
    if exit_code and found.same is False:
        raise SystemExit(1)
