"""Estimators and losses beside verl 0.9.1 and TRL 1.16.0: the same inputs, the numbers of both.

    python benchmarks/vs_numerics.py
    python benchmarks/vs_numerics.py --only grpo       cases whose name contains grpo
    python benchmarks/vs_numerics.py --quick           one seed; no results written

Fails where a difference has no reason, or where the option that is said to explain it does not
remove it. Writes benchmarks/results/vs_numerics.json and .md.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import (
    CACHE,
    HERE,
    RESULTS,
    ROOT,
    Environment,
    machine,
    markdown_report,
    markdown_table,
    run,
    say,
    text_table,
    write_results,
)
from numerics.compare import TOLERANCE, Case, Line, compare, summary, tables
from numerics.inputs import batches
from sides import TRL
from vs_verl_dispatch import VERL

MODEL = ROOT / "pipelines" / "assets" / "arith-tiny"
NOTES = (
    "Both sides get the same float64 inputs, drawn from each seed: rows of unequal length with "
    "holes in the mask, groups unequal and interleaved, and among them an empty row, groups of "
    "one, level groups, ties and ratios of 1; on 'far' log-ratios beyond +-20, on 'small' rewards "
    "of about 1e-4.",
    "value, gradient: the largest difference over all seeds, batches and variants (ways of "
    "averaging, advantages of rows and of tokens), relative to the largest entry of the other's "
    f"result. Up to {TOLERANCE:g} it counts as rounding (more only where the other computes in "
    "float32, or adds 1e-8 to a length). The gradient is that in the log-probs, or in the values.",
    "same: equal at equal options. explained: the option named last leaves the difference under "
    "'with the option'. choice: a difference on purpose that no option removes.",
    "verl: its registered functions are called as its trainer does. TRL: its trainers are built "
    "on a tiny model in float64, and their own methods are called on a prepared batch; ours gets "
    "the log-probs that the trainer computed.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """A library to compare with: its environment, its script, what it needs, the cases."""

    name: str
    environment: Environment
    script: str
    cases: tuple[Case, ...]


def others() -> tuple[Other, ...]:
    """Both libraries. Imports rlflow's functions, and so torch."""
    from numerics.trl_samples import trl_cases
    from numerics.verl_corrections import correction_cases
    from numerics.verl_estimators import estimator_cases
    from numerics.verl_losses import loss_cases
    from numerics.verl_terms import term_cases

    verl = (*estimator_cases(), *term_cases(), *loss_cases(), *correction_cases())
    return (
        Other(name="verl", environment=VERL, script="numerics/verl_side.py", cases=verl),
        Other(name="TRL", environment=TRL, script="numerics/trl_side.py", cases=tuple(trl_cases())),
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Numbers beside verl and TRL.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--other", default="", help="only this library")
    parser.add_argument("--quick", action="store_true", help="one seed, nothing written")
    return parser.parse_args()


def main() -> None:
    """Compare, print the table, write the results; fails on an unexplained difference."""
    options = arguments()
    torch.set_num_threads(1)
    seeds = 1 if options.quick else options.seeds
    inputs = [batches(seed) for seed in range(seeds)]
    facts, found = machine(), []
    for other in others():
        wanted = [case for case in other.cases if options.only in case.name]
        if wanted and options.other in other.name:
            found += measured(other, wanted, inputs)
    report(found, facts, seeds, whole=not (options.only or options.other or options.quick))
    wrong = [line for line in found if not line.passed]
    if wrong:
        names = ", ".join(f"{line.case.name} ({line.verdict})" for line in wrong)
        raise SystemExit(f"differences that nothing explains: {names}")


def measured(
    other: Other, cases: Sequence[Case], inputs: Sequence[Mapping[str, Any]]
) -> list[Line]:
    """The lines of one library: one process of its own for all calls."""
    say(f"{other.name}: {len(cases)} cases, {len(inputs)} seeds")
    results = theirs(other, [call for case in cases for call in case.calls()], inputs)
    return [compare(case, other.name, inputs, results) for case in cases]


def theirs(
    other: Other, calls: Sequence[Mapping[str, Any]], inputs: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What the other side makes of the inputs, by seed, call and batch."""
    folder = CACHE / "runs" / f"numerics-{other.name.lower()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    given, drawn, made = folder / "calls.json", folder / "inputs.pt", folder / "results.pt"
    spec = {"calls": list(calls), "model": str(MODEL), "output_dir": str(folder / "out")}
    given.write_text(json.dumps(spec), encoding="utf-8")
    torch.save(list(inputs), drawn)
    python = other.environment.ensure()
    command: list[str | Path] = [python, HERE / other.script, given, drawn, made]
    run(command, CACHE / "logs" / f"numerics-{other.name.lower()}.log")
    results: list[dict[str, Any]] = torch.load(made)
    return results


def report(lines: Sequence[Line], facts: Mapping[str, Any], seeds: int, *, whole: bool) -> None:
    """Print the tables and, of a whole run, write the results."""
    print("\n\n".join(text_table(*table) for table in tables(lines)))
    print(summary(lines))
    if not whole:
        return
    parts = [f"{summary(lines)}; {seeds} seeds."]
    parts += [markdown_table(*table) for table in tables(lines)]
    page = markdown_report("Numbers beside verl 0.9.1 and TRL 1.16.0", facts, parts, NOTES)
    data = {"machine": facts, "seeds": seeds, "cases": [line.as_json() for line in lines]}
    write_results(RESULTS, "vs_numerics", data, page)


if __name__ == "__main__":
    main()
