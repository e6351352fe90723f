"""What `--lengths` says: words, a file of lengths, or a run whose responses were measured.

And what `--acceptance` says.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean

from rlflow.errors import Finding, UsageError, near_names
from rlflow.graph.user.length_files import lengths_file
from rlflow.graph.user.lengths import EXAMPLE, Length, Lengths, read_lengths, says_lengths

METRICS = "metrics.jsonl"
SUFFIXES = ("/length", "/length_max")


def asked_lengths(said: str | Lengths) -> Lengths:
    """The lengths that an option's words, a file or a run directory say.

    Raises UsageError E355, E356 and E357.
    """
    if isinstance(said, Lengths):
        return said
    if says_lengths(said):
        return read_lengths(said, UsageError)
    path = Path(said)
    if path.is_dir():
        return run_lengths(path)
    if not path.exists() and not path.suffix and "/" not in said:
        raise UsageError(
            Finding(
                code="E355",
                what=f"--lengths {said} says no lengths, and no such file is there",
                expected=f"{EXAMPLE}, a file, or a run directory",
                near=near_names(said, [each.name for each in Path().iterdir()]),
                fix=f"--lengths {EXAMPLE}",
            )
        )
    return lengths_file(path, UsageError)


def asked_acceptance(said: float) -> float:
    """How often a drafted token is accepted. Raises UsageError E371 for what is no probability."""
    if 0 <= said <= 1:
        return float(said)
    raise UsageError(
        Finding(
            code="E371",
            what="a drafted token is accepted with a probability",
            got=f"--acceptance {said:g}",
            expected="a number from 0, where none is accepted, to 1, where all are",
            fix=f"--acceptance {said / 100:g}" if 5 <= said <= 100 else "--acceptance 0.7",
        )
    )


def run_lengths(run: Path) -> Lengths:
    """The lengths of the responses that a run made: their mean, and the longest of an iteration.

    In the mean over its iterations and rollouts, the first left out where there are others.
    """
    means, longest = [], []
    rows = _metrics(run)
    for values in rows[1:] or rows:
        names = [name.removesuffix(SUFFIXES[1]) for name in values if name.endswith(SUFFIXES[1])]
        for name in names:
            mean, most = (values.get(f"{name}{suffix}") for suffix in SUFFIXES)
            if isinstance(mean, int | float) and isinstance(most, int | float) and mean > 0:
                means.append(float(mean))
                longest.append(float(most))
    if not means:
        raise UsageError(
            Finding(
                code="E357",
                what=f"{run} has no lengths of responses",
                got=f"no figure in {METRICS} whose name ends in {SUFFIXES[1]}",
                expected="a run directory that a rollout has measured: runs/NAME-TIME",
                fix=f"--lengths {EXAMPLE}",
            )
        )
    mean, most = fmean(means), max(fmean(longest), fmean(means))
    count = len(means)
    source = f"run {run.name}, {count} iteration{'s' * (count != 1)}"
    return Lengths(response=Length(mean, max=math.ceil(most), seen=True), source=source)


def _metrics(run: Path) -> list[dict[str, object]]:
    """The figures of each iteration of a run; lines that are not whole are left out."""
    try:
        lines = (run / METRICS).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(
            Finding(
                code="E357",
                what=f"no lengths can be read of {run}",
                got=f"{METRICS}: {error.strerror}",
                expected="the directory of a run, or a file of lengths",
                fix="--lengths runs/NAME-TIME",
            )
        ) from None
    found = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("metrics"), dict):
            found.append(row["metrics"])
    return found
