"""PPO: the time of an iteration beside TRL 1.12.0, the last TRL that had PPO.

    python benchmarks/vs_trl_ppo.py
    python benchmarks/vs_trl_ppo.py --quick      a check of the whole path; no results written

Writes benchmarks/results/vs_trl_ppo_CPU.json and .md, CPU being the kind of processor.
benchmarks/README.md says how to read them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import (
    CACHE,
    HEADER,
    HERE,
    RESULTS,
    Compared,
    Side,
    machine,
    machine_kind,
    markdown_report,
    markdown_table,
    paired,
    text_table,
    write_results,
)
from models import SIZES, Size, endless_directory, warm_directory
from sides import TRL_PPO, problems, rlflow_side, run_rlflow, run_trl, trl_side

PIPELINE = HERE / "pipelines" / "ppo_speed.py"
PROMPTS, NEW_TOKENS = 128, 12
KL_COEF, LR = 0.05, 1e-6
TARGET = 0.5
NOTES = (
    "float32, one thread each (OMP_NUM_THREADS=1), 128 prompts x exactly 12 new tokens, one "
    "mini-batch; policy, value, reference and reward model of the same size and start.",
    "TRL scores with a reward model, so rlflow runs a frozen value model of the same size too "
    "and its value is the reward: the same number of forward passes on both sides.",
    "TRL draws no stop token; rlflow's EOS lies outside the vocabulary of the same weights.",
    "An iteration lasts from the end of the one before it to its own end on the wall clock. "
    "Checkpoints, sample generations and TRL's logging are off (its own sums of metrics and "
    "garbage collections belong to its iteration); rlflow's spans and metrics are counted.",
    "ratio: the median over the pairs of (median of rlflow / median of TRL).",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table."""

    size: Size
    epochs: int

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.size.name} {self.epochs} epoch{'s' if self.epochs > 1 else ''}"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="PPO beside TRL.")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help="small counts, nothing written")
    return parser.parse_args()


def main() -> None:
    """Measure, print the table, write the results."""
    options = arguments()
    TRL_PPO.ensure()
    if options.quick:
        options.pairs, options.warmup, options.iterations = 1, 1, 2
    sizes = [replace(size, sft_iterations=20) for size in SIZES] if options.quick else list(SIZES)
    facts = machine()
    cases = [Case(size=size, epochs=epochs) for size in sizes for epochs in (1, 4)]
    found = [compare(case, options) for case in cases if options.only in case.name]
    rows = [case.row() for case in found]
    print(text_table(HEADER, rows))
    folder = CACHE / "quick" if options.quick else RESULTS
    title = "PPO: an iteration beside TRL 1.12.0"
    page = markdown_report(title, facts, [markdown_table(HEADER, rows)], NOTES)
    data = {"machine": facts, "cases": [case.as_json() for case in found]}
    names = ("pairs", "warmup", "iterations")
    data["counts"] = {name: getattr(options, name) for name in names}
    write_results(folder, f"vs_trl_ppo_{machine_kind()}", data, page)


def compare(case: Case, options: argparse.Namespace) -> Compared:
    """One case, both sides in turn."""
    warm = warm_directory(case.size)
    endless = endless_directory(warm)
    total = options.warmup + options.iterations
    return paired(
        case.name,
        lambda: ours(case, warm, options.warmup, total),
        lambda: theirs(case, endless, options.warmup, total),
        pairs=options.pairs,
        target=TARGET,
    )


def ours(case: Case, model: Path, warmup: int, total: int) -> Side:
    """One run of rlflow."""
    settings: dict[str, Any] = {
        "model": str(model),
        "prompts_per_iteration": PROMPTS,
        "new_tokens": NEW_TOKENS,
        "epochs": case.epochs,
        "kl_coef": KL_COEF,
        "lr": LR,
    }
    directory, peak = run_rlflow("ppo", PIPELINE, settings, total)
    return rlflow_side(directory, peak, warmup, PROMPTS)


def theirs(case: Case, model: Path, warmup: int, total: int) -> Side:
    """One run of TRL."""
    spec: dict[str, Any] = {
        "model": str(model),
        "rows": problems(PROMPTS, total, 0),
        "iterations": total,
        "prompts": PROMPTS,
        "new_tokens": NEW_TOKENS,
        "epochs": case.epochs,
        "kl_coef": KL_COEF,
        "lr": LR,
        "seed": 0,
    }
    result, peak = run_trl("trl-ppo", TRL_PPO, "trl_ppo.py", spec)
    return trl_side(result, peak, warmup)


if __name__ == "__main__":
    main()
