"""Predicted against measured iteration time, and what staleness and streaming gain.

Each case runs once to calibrate, into a file of costs of its own; then it is planned from what
that run measured, and run again. The plan's period is compared with the median iteration of
the second run. The gains are ratios of measured throughput on the same two pools of one core,
beside those that the plans promised.

python benchmarks/prediction.py
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import (
    CACHE,
    HERE,
    RESULTS,
    ROOT,
    between,
    machine,
    markdown_report,
    markdown_table,
    read_jsonl,
    rlflow,
    run,
    say,
    text_table,
    write_results,
)
from sides import iteration_ends

PIPELINE = HERE / "pipelines" / "balanced.py"
TINY = ROOT / "pipelines" / "assets" / "arith-tiny"
WIDTHS = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
PLACEMENTS = ("colocate", "split", "stale", "steps", "stream", "chain", "chunks")
BACKENDS = ("local", "ray")
STEPS = ("mini_batches=4",)
LONGER = ("lora=8", "new_tokens=48", "prompts_per_iteration=32")
SETTINGS = {"steps": STEPS, "stream": STEPS, "chain": LONGER, "chunks": LONGER}
NEVER = 10**9
WARMUP = 3
TARGET = 0.10
GAINS = {"stale": ("split", 1.6), "stream": ("steps", 1.15), "chunks": ("chain", None)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One planned and one measured period, seconds an iteration."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """How far the prediction is off, as a part of what was measured."""
        return abs(self.predicted - self.measured) / self.measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A placement on a backend, measured a few times."""

    placement: str
    backend: str
    by_table: float
    turns: tuple[Turn, ...]

    @property
    def measured(self) -> float:
        """The median measured period."""
        return statistics.median(turn.measured for turn in self.turns)

    @property
    def predicted(self) -> float:
        """The median predicted period."""
        return statistics.median(turn.predicted for turn in self.turns)

    @property
    def error(self) -> float:
        """The median error."""
        return statistics.median(turn.error for turn in self.turns)

    def row(self) -> tuple[str, ...]:
        """A line of the table."""
        return (
            f"{self.placement}, {self.backend}",
            f"{self.by_table * 1e3:.0f}",
            f"{self.predicted * 1e3:.0f}",
            f"{self.measured * 1e3:.0f}",
            f"{100 * self.error:.1f} %",
            " ".join(f"{100 * turn.error:.1f}" for turn in self.turns),
        )


HEADER = ("case", "table ms", "predicted ms", "measured ms", "off by", "each time, %")
GAIN_HEADER = ("throughput of", "promised", "measured", "target", "met")


def model_directory(widths: Mapping[str, int] = WIDTHS, name: str = "4x256-random") -> Path:
    """A directory with the tiny model's tokenizer and another config, a wider model's; no weights.

    With 2x128 the interpreter's own time would decide what two devices cost each other.
    """
    path = CACHE / "models" / name
    path.mkdir(parents=True, exist_ok=True)
    for file in TINY.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, path / file.name)
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps({**config, **widths}), encoding="utf-8")
    return path


def command(word: str, placement: str, backend: str, settings: Sequence[str]) -> list[str | Path]:
    """An rlflow command on this benchmark's pipeline."""
    devices = "cpu:1" if placement == "colocate" else "cpu:2"
    found: list[str | Path] = [rlflow(), word, PIPELINE, "--placement", placement]
    found += ["--devices", devices, "--threads", "1", "--backend", backend]
    for setting in (f"model={model_directory()}", *settings):
        found += ["--set", setting]
    return found


def planned(placement: str, backend: str, settings: Sequence[str], costs: Path | None) -> float:
    """The period of a plan, from measured costs or from the table."""
    environment = {**os.environ, "RLFLOW_COSTS": str(costs) if costs else "off"}
    words = [str(word) for word in command("plan", placement, backend, settings)]
    made = subprocess.run(
        [*words, "--json"], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )
    period: float = json.loads(made.stdout)["timing"]["period"]
    return period


def measured(name: str, case: tuple[str, str], settings: Sequence[str], count: int) -> float:
    """The median iteration of a run of a case, which adds to the file of costs."""
    directory = CACHE / "runs" / name
    shutil.rmtree(directory, ignore_errors=True)
    words = command("run", *case, settings)
    words += ["--iterations", str(count), "--save-every", str(NEVER), "--run-dir", directory, "-q"]
    run(words, CACHE / "logs" / f"{name}.log")
    rows = [row for row in read_jsonl(directory / "spans" / "main.jsonl") if "action" in row]
    ends = iteration_ends(rows)[:count]
    return statistics.median(between(ends, WARMUP))


def measure(
    placement: str, backend: str, settings: Sequence[str], *, turns: int, count: int
) -> Case:
    """Calibrate, predict and measure, `turns` times over, each with a file of costs of its own."""
    found = []
    for number in range(turns):
        name = f"prediction-{placement}-{backend}-{number}"
        costs = CACHE / "costs" / f"{name}.json"
        costs.unlink(missing_ok=True)
        os.environ["RLFLOW_COSTS"] = str(costs)
        say(f"{placement} on {backend}: {number + 1} of {turns}")
        measured(f"{name}-calibrating", (placement, backend), settings, count)
        predicted = planned(placement, backend, settings, costs)
        seen = measured(name, (placement, backend), settings, count)
        found.append(Turn(predicted=predicted, measured=seen))
    return Case(
        placement=placement,
        backend=backend,
        by_table=planned(placement, backend, settings, None),
        turns=tuple(found),
    )


def measured_before(folder: Path) -> dict[tuple[str, str], Case]:
    """The cases of the last results, which those that are measured anew take the place of."""
    path = folder / "prediction.json"
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))["cases"]
    cases = [
        Case(**{**row, "turns": tuple(Turn(**turn) for turn in row["turns"])}) for row in found
    ]
    return {(case.placement, case.backend): case for case in cases}


def gains(cases: Mapping[tuple[str, str], Case], backend: str) -> list[tuple[str, ...]]:
    """Throughput with staleness or streaming over that of the same placement without."""
    rows = []
    for placement, (without, target) in GAINS.items():
        case, base = cases.get((placement, backend)), cases.get((without, backend))
        if base is None or case is None:
            continue
        gain = base.measured / case.measured
        met = "yes" if target is None or gain >= target else "NO"
        rows.append(
            (
                f"{placement} over {without}, {backend}",
                f"{base.predicted / case.predicted:.2f}",
                f"{gain:.2f}",
                "" if target is None else f">= {target:.2f}",
                "" if target is None else met,
            )
        )
    return rows


def report(cases: Mapping[tuple[str, str], Case], facts: dict[str, Any], folder: Path) -> None:
    """Print the tables and write them."""
    rows = [case.row() for case in cases.values()]
    off = statistics.median(case.error for case in cases.values())
    verdict = "met" if off <= TARGET else "NOT met"
    line = f"median over the cases: off by {100 * off:.1f} % (target 10 %, {verdict})"
    gained = [row for backend in BACKENDS for row in gains(cases, backend)]
    print(text_table(HEADER, rows), line, sep="\n")
    parts = [markdown_table(HEADER, rows), line]
    if gained:
        print(text_table(GAIN_HEADER, gained))
        parts.append(markdown_table(GAIN_HEADER, gained))
    page = markdown_report("Predicted and measured iterations", facts, parts, NOTES)
    document = {"machine": facts, "median_error": off, "cases": [asdict(c) for c in cases.values()]}
    write_results(folder, "prediction", document, page)


NOTES = (
    "`table` is the estimate from model shapes alone, before anything was measured.",
    "`predicted` is the plan's period after one calibrating run of the same case; `measured` the "
    "median iteration of the next run, the first three left out.",
    "`gain` compares medians of runs on two pools of one core each; `promised` is what the plans "
    "said before.",
    "`steps` and `stream` are `split` with four optimizer steps an iteration in the order of the "
    "rows, the first without chunks, the second with as many as the compiler chooses: a step is "
    "made while the next rows are sampled.",
    "`chain` and `chunks` make one step, and their frozen models are with the training: chunks of "
    "rollouts can hide those forwards only. They train adapters of rank 8 on 32 prompts and "
    "responses of 48 tokens, the others all weights on 64 and 12.",
)


def main() -> None:
    """Measure every case, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=13)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--set", action="append", default=[], help="a field of the config")
    parser.add_argument("--quick", action="store_true", help="small counts, elsewhere")
    given = parser.parse_args()
    folder = CACHE / "quick" if given.quick else RESULTS
    facts, cases = machine(), measured_before(folder) if given.only else {}
    turns, count = (1, 6) if given.quick else (given.turns, given.iterations)
    for backend in BACKENDS:
        for placement in PLACEMENTS:
            if given.only in f"{placement}, {backend}":
                settings = (*SETTINGS.get(placement, ()), *given.set)
                cases[placement, backend] = measure(
                    placement, backend, settings, turns=turns, count=count
                )
                report(cases, facts, folder)


if __name__ == "__main__":
    main()
