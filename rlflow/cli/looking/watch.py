"""`rlflow watch`: the page of a run on this machine alone, new as the run goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import click

from rlflow.cli.shell.printed import json_option, print_json
from rlflow.cli.shell.values import typed_files


@click.command("watch", no_args_is_help=True)
@click.argument(
    "run_dirs", metavar="RUN [RUN ...]", nargs=-1, required=True, shell_complete=typed_files
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="A free one by default.")
@json_option
def watch_run(run_dirs: tuple[str, ...], port: int, as_json: bool) -> None:
    """Serve a run's report while it goes on, on this machine alone; Ctrl-C ends it.

    The address that is printed has a token, without which nothing is answered. Nothing is written.
    """
    from rlflow.report.interactive.serve import WatchedRun, serving_page

    first, *others = map(Path, run_dirs)
    watched = WatchedRun(first, others)
    watched.answer("")
    with serving_page(watched, port) as served:
        # Who starts it in the background of a script has it ignore Ctrl-C, its only end.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            if as_json:
                print_json({"address": served.address, "runs": [*run_dirs]})
            else:
                click.echo(served.address)
            click.echo("Ctrl-C ends it", err=True)
            served.serve_forever()
        except KeyboardInterrupt:
            click.echo("ended", err=True)
