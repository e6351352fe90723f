"""GRPO: the time of an iteration beside TRL 1.16.0, and with --learning the accuracy too.

    python benchmarks/vs_trl.py
    python benchmarks/vs_trl.py --learning
    python benchmarks/vs_trl.py --quick          a check of the whole path; no results written
    python benchmarks/vs_trl.py --device cuda:0  0.5 B on a GPU, both with engines of their own

Writes benchmarks/results/vs_trl_CPU.json and .md, CPU being the kind of processor.
benchmarks/README.md says how to read them.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import (
    CACHE,
    HEADER,
    HERE,
    MARK,
    RESULTS,
    Compared,
    Side,
    machine,
    machine_kind,
    markdown_report,
    markdown_table,
    paired,
    say,
    text_table,
    write_results,
)
from learning import compare_learning
from models import SIZES, Size, endless_directory, longer_directory, warm_directory
from sides import (
    GROUP,
    NEW_TOKENS,
    PROMPTS,
    TRL,
    grpo_spec,
    rlflow_side,
    run_rlflow,
    run_trl,
    trl_side,
)

PIPELINE = HERE / "pipelines" / "grpo_speed.py"
LR = 1e-6
# Responses on a GPU, and the widths of the model there; its vocabulary is that of arith-tiny.
GPU_TOKENS = 256
ON_GPUS = Size(
    name="24x896", layers=24, hidden=896, intermediate=4864, sft_iterations=20, target=0.67
)
NOTES = (
    "float32, one thread each (OMP_NUM_THREADS=1), 16 prompts x 8 samples x at most 12 new "
    "tokens, the same weights and the same prompts in the same order on both sides.",
    "An iteration lasts from the end of the one before it to its own end on the wall clock. "
    "Evaluation, checkpoints and TRL's logging are off; rlflow's spans, metrics and TensorBoard "
    "events are on, and counted.",
    "eos: responses end at EOS. fixed: rlflow's rollout ignores EOS, TRL's tokenizer has its EOS "
    "outside the vocabulary of the same weights, so every response has 12 tokens on both sides.",
    f"lr {LR:g}: the weights, and with them the lengths, stay what they were. ref: with a "
    "reference and a KL term of 0.04.",
    "ratio: the median over the pairs of (median of rlflow / median of TRL). Times are medians "
    "over all measured iterations, memory is the peak of a process (rlflow / TRL).",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table."""

    size: Size
    kl_coef: float
    fixed: bool
    device: str = "cpu"

    @property
    def name(self) -> str:
        """As in the table."""
        parts = [self.size.name, "fixed" if self.fixed else "eos"]
        return " ".join([*parts, "ref"] if self.kl_coef else parts)

    @property
    def shape(self) -> dict[str, Any]:
        """What both sides are told of a case on a GPU, beside what they are told on a CPU."""
        if self.device == "cpu":
            return {}
        return {"new_tokens": GPU_TOKENS, "dtype": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How often everything is repeated."""

    pairs: int
    warmup: int
    iterations: int

    @property
    def total(self) -> int:
        """Iterations of one process."""
        return self.warmup + self.iterations


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="GRPO beside TRL.")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--large-pairs", type=int, default=3, help="pairs of the larger model")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--learning", action="store_true", help="accuracy instead of time")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of --learning")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    parser.add_argument("--quick", action="store_true", help="small counts, nothing written")
    return parser.parse_args()


def main() -> None:
    """Measure, print the table, write the results."""
    options = arguments()
    if options.device != "cpu":
        on_a_gpu(options)
        return
    TRL.ensure()
    sizes = [replace(size, sft_iterations=20) for size in SIZES] if options.quick else list(SIZES)
    if options.learning:
        compare_learning(sizes[0], range(options.seeds), quick=options.quick)
        return
    counts = Counts(pairs=options.pairs, warmup=options.warmup, iterations=options.iterations)
    large = replace(counts, pairs=options.large_pairs)
    if options.quick:
        counts = large = Counts(pairs=1, warmup=1, iterations=3)
    repeats = dict(zip((size.name for size in sizes), (counts, large), strict=True))
    measure([case for case in cases(sizes) if options.only in case.name], repeats, options.quick)


def on_a_gpu(options: argparse.Namespace) -> None:
    """The same on a GPU, where TRL is installed: a machine with one may have no internet."""
    if not (TRL.path / MARK).is_file():
        say(f"left out: TRL is not in {TRL.path}, which `python benchmarks/vs_trl.py` makes")
        return
    size = replace(ON_GPUS, sft_iterations=5) if options.quick else ON_GPUS
    counts = Counts(pairs=min(options.pairs, 2), warmup=options.warmup, iterations=8)
    if options.quick:
        counts = Counts(pairs=1, warmup=1, iterations=3)
    found = [Case(size=size, kl_coef=0.04, fixed=True, device=options.device)]
    measure(found, {size.name: counts}, options.quick, name="vs_trl_gpu")


def cases(sizes: list[Size]) -> list[Case]:
    """Every size, with and without a reference, fixed and to EOS."""
    return [
        Case(size=size, kl_coef=kl_coef, fixed=fixed)
        for size in sizes
        for fixed in (True, False)
        for kl_coef in (0.0, 0.04)
    ]


def measure(
    wanted: list[Case], repeats: dict[str, Counts], quick: bool, name: str | None = None
) -> None:
    """Run all cases, as often as `repeats` says for their size, and write what was found."""
    facts = machine()
    folder = CACHE / "quick" if quick else RESULTS
    title = "GRPO: an iteration beside TRL 1.16.0"
    pairs = (f"{counts.pairs} at {size}" for size, counts in repeats.items())
    told = f"Pairs of runs: {', '.join(pairs)}."
    found: list[Compared] = []
    for case in wanted:
        found.append(compare(case, repeats[case.size.name]))
        rows = [done.row() for done in found]
        page = markdown_report(title, facts, [markdown_table(HEADER, rows)], (*NOTES, told))
        data = {"machine": facts, "cases": [done.as_json() for done in found]}
        data["counts"] = {size: asdict(counts) for size, counts in repeats.items()}
        write_results(folder, name or f"vs_trl_{machine_kind()}", data, page)
    print(text_table(HEADER, rows))


def compare(case: Case, counts: Counts) -> Compared:
    """One case, both sides in turn."""
    warm = warm_directory(case.size)
    if case.device != "cpu":
        warm = longer_directory(warm, 2 * GPU_TOKENS)
    endless = endless_directory(warm) if case.fixed else warm
    return paired(
        case.name,
        lambda: ours(case, warm, counts),
        lambda: theirs(case, endless, counts),
        pairs=counts.pairs,
        target=case.size.target,
    )


def ours(case: Case, model: Path, counts: Counts) -> Side:
    """One run of rlflow."""
    settings: dict[str, Any] = {
        "model": str(model),
        "prompts_per_iteration": PROMPTS,
        "group_size": GROUP,
        "new_tokens": NEW_TOKENS,
        "kl_coef": case.kl_coef,
        "lr": LR,
        "fixed": case.fixed,
        **case.shape,
    }
    directory, peak = run_rlflow("grpo", PIPELINE, settings, counts.total)
    return rlflow_side(directory, peak, counts.warmup, PROMPTS * GROUP)


def theirs(case: Case, model: Path, counts: Counts) -> Side:
    """One run of TRL."""
    spec = grpo_spec(model, counts.total, seed=0, lr=LR, kl_coef=case.kl_coef)
    told = {"fixed": case.fixed, "device": case.device, **case.shape}
    result, peak = run_trl("trl-grpo", TRL, "trl_grpo.py", {**spec, **told})
    return trl_side(result, peak, counts.warmup)


if __name__ == "__main__":
    main()
