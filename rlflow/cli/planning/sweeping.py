"""`rlflow tune --sweep`: the sizes that it says, the searches, and what is written of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from rlflow.cli.commands import Target
from rlflow.cli.shell.numbers import is_count
from rlflow.cli.shell.printed import hint, print_json
from rlflow.cli.tuning import tune_target
from rlflow.errors import Finding, UsageError, near_names
from rlflow.scheduler.search.sweep import Sweep, sweep_sizes
from rlflow.scheduler.search.sweep_text import crossover_texts, sweep_text
from rlflow.scheduler.search.tune import Tuned

SPAN = re.compile(r"([1-9]\d*)\.\.([1-9]\d*)")
KIND = re.compile(r"([^:,@]+):\d+(@[^,]+)?")
PICTURES = (".png", ".svg", ".pdf")
MOST_SIZES = 16
MOST_DEVICES = 4096


def swept_sizes(said: str) -> list[int]:
    """The numbers of devices that `devices=8..512` or `devices=8,16,96` says, ascending.

    A span is doubled from its start to its end, which is the last. UsageError E359 for others.
    """
    name, equals, rest = (part.strip() for part in said.partition("="))
    if not equals or name != "devices":
        raise UsageError(_not_a_sweep(f"--sweep {said}", near=near_names(name, ("devices",))))
    span = SPAN.fullmatch(rest)
    if span is not None:
        first, last = int(span[1]), int(span[2])
        sizes = []
        while first < last:
            sizes.append(first)
            first *= 2
        sizes.append(last)
        if int(span[1]) > last:
            raise UsageError(_not_a_sweep(f"--sweep {said}: {span[1]} is more than {last}"))
    else:
        words = [word.strip() for word in rest.split(",")]
        if not all(map(is_count, words)):
            raise UsageError(_not_a_sweep(f"--sweep {said}"))
        sizes = sorted({int(word) for word in words})
    if len(sizes) > MOST_SIZES or sizes[-1] > MOST_DEVICES:
        what = f"--sweep {said}: {len(sizes)} sizes, of up to {sizes[-1]} devices"
        limits = f"at most {MOST_SIZES} sizes, of at most {MOST_DEVICES} devices"
        raise UsageError(_not_a_sweep(what, limits))
    return sizes


def swept_kind(devices: str | None) -> tuple[str, str]:
    """The kind of devices that is swept, and what is said of its memory. UsageError E359."""
    match = None if devices is None else KIND.fullmatch(devices)
    if match is None:
        raise UsageError(
            Finding(
                code="E359",
                what="a sweep is of one kind of devices",
                got="no --devices" if devices is None else f"--devices {devices}",
                expected="a kind with any number of devices, which the sweep replaces",
                fix="--devices h100:8",
            )
        )
    return match[1], match[2] or ""


def sweep_target(
    target: Target,
    said: str,
    told: Callable[[str], None],
    *,
    max_staleness: int | None = None,
    top: int = 10,
    engine: str | None = None,
) -> Sweep:
    """Search placements of a pipeline on each number of devices; `told` hears of each.

    Raises UsageError E359 for what is no sweep, and what `tune_target` raises where nothing fits.
    """
    sizes = swept_sizes(said)
    kind, memory = swept_kind(target.devices)

    def tuned(count: int) -> Tuned:
        return tune_target(
            replace(target, devices=f"{kind}:{count}{memory}"),
            max_staleness=max_staleness,
            top=top,
            engine=engine,
            families=True,
        )

    return sweep_sizes(sizes, tuned, kind, told)


def sweep_format(path: Path) -> str:
    """The format of a picture of a sweep, by its file's suffix. UsageError E359 for others."""
    suffix = path.suffix.lower()
    if suffix not in PICTURES:
        raise UsageError(
            Finding(
                code="E359",
                what=f"-o {path} is no picture of a sweep",
                expected=", ".join(PICTURES),
                near=near_names(suffix, PICTURES),
                fix=f"-o {path.with_suffix('.png')}",
            )
        )
    return suffix.removeprefix(".")


def write_sweep(found: Sweep, title: str, path: Path, price: float | None) -> None:
    """Write the picture. UsageError E359 where it cannot be written."""
    from rlflow.report.charts.sweep import sweep_picture

    made = sweep_picture(found, title, sweep_format(path), price)
    try:
        path.write_bytes(made)
    except OSError as error:
        what = f"cannot write {path}: {error.strerror}"
        raise UsageError(Finding(code="E359", what=what, fix="-o sweep.png")) from error


def print_sweep(
    said: str,
    price: float | None,
    output: str | None,
    options: Mapping[str, Any],
    *,
    as_json: bool,
    limits: Mapping[str, Any],
) -> None:
    """Sweep, write the picture that is asked for, and print the table, or JSON."""
    if output is not None:
        sweep_format(Path(output))
    target = Target(**{**options, "engine": None})
    found = sweep_target(target, said, hint, engine=options["engine"], **limits)
    sizes = [size.tuned for size in found.sizes if size.tuned is not None]
    name = sizes[0].graph.name
    if output is not None:
        title = f"{name} on {found.kind}: {'; '.join(crossover_texts(found))}"
        write_sweep(found, title, Path(output), price)
        hint(f"wrote {output}")
    if as_json:
        print_json({"pipeline": name, **found.as_json(price)})
    else:
        click.echo(sweep_text(found, name, price))


def _not_a_sweep(
    what: str,
    expected: str = "devices=FIRST..LAST, doubled, or devices=A,B,C",
    near: tuple[str, ...] = (),
) -> Finding:
    return Finding(
        code="E359", what=what, expected=expected, near=near, fix="--sweep devices=8..512"
    )
