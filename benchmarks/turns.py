"""Two ways to the same thing in one process, in turns: what the benchmarks of a GPU share.

Sizes of models with random weights, the clock of a device, pairs of turns and their table. The
device is a parameter: the same code runs a tiny model on a CPU. Times are seconds.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import CACHE, RESULTS, machine, markdown_report, markdown_table, text_table
from common import write_results as write_pages

HEADER = ("case", "rlflow ms", "other ms", "ratio", "of pairs", "target", "met", "beside")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The widths of a Qwen2 with random weights."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = True


MODEL_SIZES = {
    "tiny": ModelSize(layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, vocabulary=96),
    "100m": ModelSize(
        layers=12, hidden=768, intermediate=2048, heads=12, kv_heads=4, vocabulary=32000
    ),
    "0.5b": ModelSize(
        layers=24, hidden=896, intermediate=4864, heads=14, kv_heads=2, vocabulary=151936
    ),
    "1.5b": ModelSize(
        layers=28, hidden=1536, intermediate=8960, heads=12, kv_heads=2, vocabulary=151936
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Seconds of the turns of both sides; `target` is the largest ratio that passes, if any."""

    case: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    target: float | None = None
    beside: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratios(self) -> list[float]:
        """Ours over theirs, one for each pair."""
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios."""
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool | None:
        """Whether the ratio meets the target; None without one."""
        return None if self.target is None else self.ratio <= self.target

    def row(self) -> tuple[str, ...]:
        """A line of the table, times in milliseconds."""
        told = ", ".join(f"{name} {value}" for name, value in self.beside.items())
        return (
            self.case,
            f"{statistics.median(self.ours) * 1e3:.1f}",
            f"{statistics.median(self.theirs) * 1e3:.1f}",
            f"{self.ratio:.3f}",
            f"{min(self.ratios):.2f}..{max(self.ratios):.2f}",
            "none" if self.target is None else f"<= {self.target:.2f}",
            {None: "", True: "yes", False: "NO"}[self.met],
            told,
        )

    def as_json(self) -> dict[str, Any]:
        """Everything measured, and the ratio."""
        return {
            "case": self.case,
            "rlflow_seconds": self.ours,
            "other_seconds": self.theirs,
            "ratio": self.ratio,
            "target": self.target,
            "beside": dict(self.beside),
        }


def options_of(text: str | None) -> argparse.ArgumentParser:
    """The options that all of these benchmarks have."""
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    parser.add_argument("--size", choices=[*MODEL_SIZES], help="tiny on a CPU, else 1.5b")
    parser.add_argument("--pairs", type=int, help="turns of each side; 3 on a CPU, else 5")
    parser.add_argument("--quick", action="store_true", help="2 turns, results/ left alone")
    return parser


def filled(options: argparse.Namespace) -> argparse.Namespace:
    """The options with what is not said. Raises SystemExit where the device is not there."""
    options.gpu = torch.device(options.device).type == "cuda"
    if options.gpu and not torch.cuda.is_available():
        raise SystemExit(f"--device {options.device}: torch {torch.__version__} sees no GPU")
    options.size = options.size or ("1.5b" if options.gpu else "tiny")
    options.pairs = options.pairs or (5 if options.gpu else 3)
    if options.quick:
        options.pairs = 2
    return options


def model_directory(size: ModelSize, context: int) -> Path:
    """A directory with the config of a model, and nothing else."""
    from transformers import Qwen2Config

    path = CACHE / "configs" / f"qwen2-{size.layers}x{size.hidden}-{context}"
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=context,
        tie_word_embeddings=size.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config.save_pretrained(path)
    return path


def timed(call: Callable[[], Any], device: str) -> float:
    """Seconds of a call, until the device has done it."""
    settle(device)
    began = time.perf_counter()
    call()
    settle(device)
    return time.perf_counter() - began


def settle(device: str) -> None:
    """Wait until the device has done all it was told."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def in_turns(
    ours: Callable[[], Any], theirs: Callable[[], Any], *, pairs: int, device: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of both, A B B A, after a turn of each that does not count."""
    timed(ours, device)
    timed(theirs, device)
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    sides = {"ours": ours, "theirs": theirs}
    for number in range(pairs):
        gc.collect()
        for name in sides if number % 2 == 0 else reversed(sides):
            seconds[name].append(timed(sides[name], device))
    return tuple(seconds["ours"]), tuple(seconds["theirs"])


def report(
    name: str, title: str, found: Sequence[Turns], notes: Sequence[str], options: argparse.Namespace
) -> None:
    """Print the table, and write it: to results/ what a GPU took, else beside the environments."""
    facts = machine()
    rows = [turns.row() for turns in found]
    print(text_table(HEADER, rows))
    on = torch.cuda.get_device_name(options.device) if options.gpu else "the CPU, one thread"
    told = f"On {on}, torch {torch.__version__}, a Qwen2 of {options.size} with random weights."
    page = markdown_report(title, facts, [told, markdown_table(HEADER, rows)], notes)
    data = {
        "machine": facts,
        "device": on,
        "options": {k: str(v) for k, v in vars(options).items()},
        "cases": [turns.as_json() for turns in found],
    }
    chip = on.lower().replace(" ", "-") if options.gpu else "cpu"
    kept = options.gpu and not options.quick
    write_pages(RESULTS if kept else CACHE / "quick", f"{name}_{chip}", data, page)
