"""`--json` of every command: one document on standard output, nothing else there."""

from __future__ import annotations

import json

import click

from rlflow.errors import OBEYED, printable

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON only.")


def json_text(value: object) -> str:
    """A document as it is printed: keys sorted, indented by one, other letters than ASCII as is."""
    return escaped(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False))


def escaped(document: str) -> str:
    """The same JSON, in which a terminal finds nothing to obey."""
    return OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def hint(text: str) -> None:
    """A line for a person, on standard error."""
    click.echo(printable(text), err=True)


def print_json(value: object) -> None:
    """Print a document on standard output."""
    click.echo(json_text(value))
