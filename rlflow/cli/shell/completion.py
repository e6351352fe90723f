"""`rlflow completion`: what makes a shell complete commands, options and their values with Tab."""

from __future__ import annotations

import sys

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from rlflow.cli.shell.printed import json_option, print_json

SHELLS: dict[str, type[ShellComplete]] = {
    "bash": BashComplete,
    "zsh": ZshComplete,
    "fish": FishComplete,
}
FILES = {
    "bash": ("~/.bashrc", 'eval "$(rlflow completion bash)"'),
    "zsh": ("~/.zshrc", 'eval "$(rlflow completion zsh)"'),
    "fish": ("~/.config/fish/completions/rlflow.fish", "rlflow completion fish | source"),
}


@click.command("completion", no_args_is_help=True)
@click.argument("shell", type=click.Choice(list(FILES)), metavar="bash|zsh|fish")
@json_option
def print_completion(shell: str, as_json: bool) -> None:
    """Print what lets bash, zsh or fish complete commands, options, placements and fields.

    One line in the start file of the shell loads it; on a terminal it is told which.
    """
    script = SHELLS[shell](click.Group(), {}, "rlflow", "_RLFLOW_COMPLETE").source()
    file, line = FILES[shell]
    if as_json:
        print_json({"shell": shell, "file": file, "line": line, "script": script})
        return
    click.echo(script)
    if sys.stdout.isatty():
        click.echo(f"in {file}: {line}", err=True)
