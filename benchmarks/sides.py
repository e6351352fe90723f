"""One run of either side: rlflow's command, or a script in TRL's environment.

Both get the same prompts in the same order: the rows are drawn by rlflow's data source and
handed to TRL in a file. An iteration lasts from the end of the one before it to its own end
on the wall clock, so everything between counts: controller, data loading, and on rlflow's
side the writing of spans and metrics, which cannot be switched off.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import CACHE, HERE, Environment, Side, between, read_jsonl, rlflow, run

TRL = Environment(
    name="trl",
    constraints="constraints-trl.txt",
    packages=("trl", "transformers", "accelerate", "datasets", "psutil"),
)
TRL_PPO = Environment(
    name="trl-ppo",
    constraints="constraints-trl-ppo.txt",
    packages=("trl", "transformers", "accelerate", "datasets", "psutil"),
)
NEVER = 10**9
PROMPTS, GROUP, NEW_TOKENS = 16, 8, 12


def problems(prompts: int, iterations: int, seed: int) -> list[dict[str, str]]:
    """The prompts of all iterations in the order in which rlflow draws them."""
    import rlflow as rf

    source = rf.data.arithmetic(digits=2)
    drawn = (row for number in range(iterations) for row in source.batch(number, prompts, seed))
    return [{"prompt": row["prompt"], "answer": row["answer"]} for row in drawn]


def held_out() -> list[dict[str, str]]:
    """The held-out problems that rlflow evaluates on."""
    import rlflow as rf

    rows = rf.data.arithmetic(digits=2, split="test").rows()
    return [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]


def run_rlflow(
    name: str, pipeline: Path, settings: Mapping[str, Any], iterations: int
) -> tuple[Path, float]:
    """Run a pipeline on one thread without checkpoints; its run directory and peak MB."""
    directory = CACHE / "runs" / name
    shutil.rmtree(directory, ignore_errors=True)
    command: list[str | Path] = [rlflow(), "run", pipeline, "--threads", "1"]
    command += ["--iterations", str(iterations)]
    command += ["--save-every", str(NEVER), "--run-dir", directory, "--json"]
    for key, value in settings.items():
        command += ["--set", f"{key}={json.dumps(value) if not isinstance(value, str) else value}"]
    peak = run(command, CACHE / "logs" / f"{name}.log")
    return directory, peak


def run_trl(
    name: str, environment: Environment, script: str, spec: Mapping[str, Any]
) -> tuple[dict[str, Any], float]:
    """Run a script in TRL's environment; what it wrote, and its peak MB."""
    folder = CACHE / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    given, made = folder / "spec.json", folder / "result.json"
    given.write_text(json.dumps({**spec, "output_dir": str(folder / "out")}), encoding="utf-8")
    peak = run([environment.ensure(), HERE / script, given, made], CACHE / "logs" / f"{name}.log")
    result: dict[str, Any] = json.loads(made.read_text(encoding="utf-8"))
    return result, peak


def rlflow_side(directory: Path, peak: float, warmup: int, rows: int) -> Side:
    """The measured iterations of a run directory; `rows` samples an iteration."""
    ends = iteration_ends(read_jsonl(directory / "spans" / "main.jsonl"))
    metrics = read_jsonl(directory / "metrics.jsonl")
    tokens = tuple(rows * float(line["metrics"]["actor.rollout/length"]) for line in metrics)
    return Side(seconds=between(ends, warmup), tokens=tokens[warmup:], peak_mb=peak)


def trl_side(result: Mapping[str, Any], peak: float, warmup: int) -> Side:
    """The measured iterations of a TRL run."""
    seconds = between(result["ends"][1:], warmup)
    return Side(seconds=seconds, tokens=tuple(result["tokens"][warmup:]), peak_mb=peak)


def iteration_ends(spans: list[dict[str, Any]]) -> list[float]:
    """When the last action of every iteration ended."""
    ends: dict[int, float] = {}
    for span in spans:
        if "iteration" in span:
            number = span["iteration"]
            ends[number] = max(span["end"], ends.get(number, 0.0))
    return [ends[number] for number in sorted(ends)]


def grpo_spec(
    model: Path, iterations: int, *, seed: int, lr: float, kl_coef: float
) -> dict[str, Any]:
    """What trl_grpo.py reads; no evaluation."""
    return {
        "model": str(model),
        "rows": problems(PROMPTS, iterations, seed),
        "iterations": iterations,
        "prompts": PROMPTS,
        "group_size": GROUP,
        "new_tokens": NEW_TOKENS,
        "kl_coef": kl_coef,
        "lr": lr,
        "seed": seed,
        "fixed": False,
        "device": "cpu",
        "dtype": "float32",
        "eval_every": 0,
        "held_out": [],
    }
