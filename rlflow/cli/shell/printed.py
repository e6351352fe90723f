"""`--json` of every command: one document on standard output, nothing else there."""

from __future__ import annotations

import json

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON only.")


def json_text(value: object) -> str:
    """A document as it is printed: keys sorted, indented by one, other letters than ASCII as is."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False)


def hint(text: str) -> None:
    """A line for a person, on standard error."""
    click.echo(text, err=True)


def print_json(value: object) -> None:
    """Print a document on standard output."""
    click.echo(json_text(value))
