"""What benchmarks that compare plans with an exact solver share: their options and their page."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from common import (
    RESULTS,
    machine,
    markdown_report,
    markdown_table,
    text_table,
    write_results,
)

Row = tuple[str, ...]


def asked(about: str, *, instances: int, seconds: float) -> argparse.Namespace:
    """The options of the command line, with the machine as it is at the start."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--instances", type=int, default=instances, help="of each kind")
    parser.add_argument("--seconds", type=float, default=seconds, help="of the solver on each")
    parser.add_argument("--no-write", action="store_true")
    parser.set_defaults(machine=machine())
    return parser.parse_args()


def rows_of(
    solved: Sequence[Any], kind: Callable[[Any], str], row: Callable[[str, Sequence[Any]], Row]
) -> list[Row]:
    """A row for each kind of instances, and one for all."""
    groups: dict[str, list[Any]] = {}
    for one in solved:
        groups.setdefault(kind(one), []).append(one)
    return [row(name, group) for name, group in {**groups, "all": list(solved)}.items()]


def told(
    options: argparse.Namespace,
    name: str,
    title: str,
    solved: Sequence[Any],
    *,
    header: Row,
    rows: Sequence[Row],
    verdict: str,
    notes: Sequence[str],
) -> None:
    """Print the table and the verdict, and write both unless that is not wanted."""
    print(text_table(header, rows))
    print(verdict)
    if not options.no_write:
        parts = [verdict, markdown_table(header, rows)]
        page = markdown_report(title, options.machine, parts, notes)
        data = {"machine": options.machine, "instances": [asdict(one) for one in solved]}
        write_results(RESULTS, name, data, page)
