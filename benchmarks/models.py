"""The model directories that both sides of a comparison load: sizes, warm start, no end.

Weights come of a supervised run of rlflow, made once and kept beside the environments. The
`endless` twin of a directory has the same weights and a tokenizer whose EOS token lies
outside the model's vocabulary, so it can never be drawn: every response has the full
length on both sides, and neither does anything for it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import CACHE, ROOT, read_jsonl, rlflow, run, say

TRAINING = ROOT / "pipelines" / "sft_arithmetic.py"
NEVER = "<never>"
DONE = "made.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model's size and its warm start; `target` is the ratio to TRL's iteration it must meet."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    sft_iterations: int
    target: float

    def wanted(self) -> dict[str, int | str]:
        """What the cached directory was made with."""
        return {
            "layers": self.layers,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "sft_iterations": self.sft_iterations,
            "pipeline": hashlib.sha256(TRAINING.read_bytes()).hexdigest(),
        }


SIZES = (
    Size(name="2x128", layers=2, hidden=128, intermediate=512, sft_iterations=1000, target=0.5),
    Size(name="4x256", layers=4, hidden=256, intermediate=1024, sft_iterations=675, target=0.5),
)


def warm_directory(size: Size) -> Path:
    """A model that stops by itself: trained once with pipelines/sft_arithmetic.py."""
    path = CACHE / "models" / f"{size.name}-sft{size.sft_iterations}"
    mark = path / DONE
    if mark.is_file() and json.loads(mark.read_text(encoding="utf-8"))["of"] == size.wanted():
        return path
    say(f"training {path.name} (once; seconds for 2x128, minutes for 4x256)")
    shutil.rmtree(path, ignore_errors=True)
    numbers = ["--layers", str(size.layers), "--hidden", str(size.hidden)]
    numbers += ["--intermediate", str(size.intermediate), "--out", str(path)]
    logs = CACHE / "logs"
    builder = ROOT / "pipelines" / "assets" / "build_arith_tiny.py"
    run([sys.executable, builder, *numbers], logs / f"build-{size.name}.log")
    accuracy = train(size, path, logs / f"sft-{size.name}.log")
    made = {"of": size.wanted(), "greedy_accuracy": accuracy}
    mark.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return path


def train(size: Size, path: Path, log: Path) -> float:
    """Fill `path` with trained weights; returns their greedy accuracy on held-out problems."""
    directory = CACHE / "runs" / f"sft-{size.name}"
    shutil.rmtree(directory, ignore_errors=True)
    count = size.sft_iterations
    command: list[str | Path] = [
        rlflow(),
        "run",
        TRAINING,
        "--threads",
        "1",
        "--set",
        f"model={path}",
    ]
    command += ["--set", f"iterations={count}", "--set", f"eval_every={count}"]
    run([*command, "--save-every", str(count), "--run-dir", directory, "--json"], log)
    (saved,) = (directory / "checkpoints").glob("*/student.safetensors")
    shutil.copyfile(saved, path / "model.safetensors")
    return float(read_jsonl(directory / "metrics.jsonl")[-1]["metrics"]["eval/reward"])


def endless_directory(base: Path) -> Path:
    """The same model with an EOS token that it cannot draw; `base` is left as it is."""
    path = base.with_name(f"{base.name}-endless")
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(base, path)
    config = read(path / "config.json")
    beyond = config["vocab_size"]
    write(path / "config.json", {**config, "eos_token_id": beyond})
    tokenizer = read(path / "tokenizer.json")
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"].append({**like, "id": beyond, "content": NEVER})
    write(path / "tokenizer.json", tokenizer)
    settings = read(path / "tokenizer_config.json")
    write(path / "tokenizer_config.json", {**settings, "eos_token": NEVER})
    return path


def longer_directory(base: Path, context: int) -> Path:
    """The same model for rows of so many tokens; `base` is left as it is."""
    path = base.with_name(f"{base.name}-{context}")
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(base, path)
    config = read(path / "config.json")
    write(path / "config.json", {**config, "max_position_embeddings": context})
    return path


def read(path: Path) -> dict[str, Any]:
    """A JSON file."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def write(path: Path, data: object) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
