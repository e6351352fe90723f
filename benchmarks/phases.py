"""Each phase of vs_trl.py's GRPO iteration beside the floor of its matrix products.

    python benchmarks/phases.py --size 2x128

A run of rlflow gives the time of every action. The same phases are repeated here to count their
products and operators; the products are then timed alone, and at the rate of a large one. Writes
benchmarks/results/phases_CPU.json and .md.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from common import (
    RESULTS,
    machine,
    machine_kind,
    markdown_report,
    markdown_table,
    read_jsonl,
    text_table,
    write_results,
)
from engine_micro import Spec
from models import SIZES, Size, endless_directory, warm_directory
from sides import GROUP, NEW_TOKENS, PROMPTS, problems, run_rlflow
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from vs_trl import LR, PIPELINE

from rlflow.batch import flat, make_batch, ragged_rows
from rlflow.contract.values import SampleKey, Sampling
from rlflow.engines.hf.forward import kernels
from rlflow.engines.hf.loading import load_model, load_tokenizer
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.engines.hf.train import TrainEngine

ITERATIONS, WARMUP, TURNS = 25, 3, 40
LARGE = (1504, 256, 1024)
ACTIONS = {"rollout": "actor.rollout", "reference": "ref.log_probs", "update": "actor.update"}
HEADER = ("phase", "ms", "GFLOP", "of attention", "floor ms", "alone ms", "over floor", "operators")
NOTES = (
    "float32, one thread, 16 prompts x 8 samples x 12 new tokens, with a reference; warm start of "
    "vs_trl.py.",
    "ms: median duration of the action in a run of rlflow, on the wall clock.",
    "GFLOP: two for each multiplication of the phase's products of weights; those of attention, "
    "batched, stand beside it.",
    "floor ms: both at the rate of the large product below, with nothing else done. alone ms: the "
    "products of weights by themselves, each in its own shape, and attention's at the large rate.",
    "operators: calls into torch's kernels. Reward and advantage multiply nothing.",
)


@dataclass(slots=True)
class Work:
    """What a phase computes: products by (rows, in, out), multiplications of attention, calls."""

    products: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    attention: float = 0.0
    operators: int = 0

    @property
    def flops(self) -> float:
        """Of the products of weights."""
        return sum(2.0 * a * b * c * count for (a, b, c), count in self.products.items())


class Calls(TorchDispatchMode):
    """Counts calls of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(work: Work) -> Iterator[None]:
    """Fill `work` with what the block computes."""
    plain = kernels.product

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        work.products[(len(x), x.shape[1], len(weight))] += 1
        return plain(x, weight, bias)

    kernels.product = product
    try:
        with FlopCounterMode(display=False) as flops:
            yield
        own = flops.get_flop_counts()["Global"]
        batched = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)
        work.attention = float(sum(own.get(name, 0) for name in batched))
    finally:
        kernels.product = plain


def phases(path: str) -> dict[str, Callable[[], object]]:
    """The three phases that have products, on a warm model and one batch of samples."""
    model, frozen = (load_model(path, dtype=torch.float32, device="cpu") for _ in range(2))
    encode = load_tokenizer(path)
    rows = [encode(row["prompt"])["input_ids"] for row in problems(PROMPTS, 1, 0)]
    prompts = ragged_rows(rows, torch.int64)
    repeated = ragged_rows([row for row in rows for _ in range(GROUP)], torch.int64)
    sampling = Sampling(max_new_tokens=NEW_TOKENS, n=GROUP, stop_tokens=())
    key, ids = SampleKey(seed=0, iteration=0, stream="rollout"), torch.arange(PROMPTS * GROUP)
    rollout = TorchRollout(model)
    trainer = TrainEngine(model, Spec(lr=0.0), micro_tokens=None)
    reference = TrainEngine(frozen, None, micro_tokens=None)
    made = rollout.generate(prompts, sampling, key, ids)
    batch = make_batch(
        {"prompt_tokens": repeated, "response_tokens": made.response_tokens}, len(ids)
    )
    old = flat(made.log_probs)

    def loss(outputs: dict[str, Tensor], micro: object) -> tuple[Tensor, dict[str, Tensor]]:
        return (outputs["log_probs"] - old).exp().mean(), {}

    wanted = {"outputs": ("log_probs",), "temperature": 1.0}
    return {
        "rollout": lambda: rollout.generate(prompts, sampling, key, ids),
        "reference": lambda: reference.forward(batch, **wanted),
        "update": lambda: trainer.step(batch, loss, max_grad_norm=1.0, **wanted),
    }


def measured(size: Size, model: str) -> dict[str, float]:
    """Median seconds of every action in a run, and of the iteration as `iteration`."""
    settings = {
        "model": model,
        "prompts_per_iteration": PROMPTS,
        "group_size": GROUP,
        "new_tokens": NEW_TOKENS,
        "kl_coef": 0.04,
        "lr": LR,
        "fixed": True,
    }
    directory, _ = run_rlflow(f"phases-{size.name}", PIPELINE, settings, ITERATIONS)
    found: dict[str, list[float]] = {}
    ends: dict[int, float] = {}
    for span in read_jsonl(directory / "spans" / "main.jsonl"):
        number = span.get("iteration", -1)
        if number >= WARMUP - 1:
            ends[number] = max(span["end"], ends.get(number, 0.0))
        if number >= WARMUP:
            found.setdefault(span["action"], []).append(span["end"] - span["start"])
    turns = sorted(ends.values())
    found["iteration"] = [b - a for a, b in itertools.pairwise(turns)]
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def seconds(shape: tuple[int, int, int]) -> float:
    """Median seconds of one product."""
    rows, wide, out = shape
    x, weight = torch.randn(rows, wide), torch.randn(out, wide)
    times = []
    for _ in range(TURNS):
        start = time.perf_counter()
        kernels.product(x, weight)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def rate(threads: int) -> float:
    """Multiplications and additions a second in the large product."""
    torch.set_num_threads(threads)
    found = 2.0 * LARGE[0] * LARGE[1] * LARGE[2] / seconds(LARGE)
    torch.set_num_threads(1)
    return found


def count(action: Callable[[], object]) -> Work:
    """What a phase computes."""
    work, calls = Work(), Calls()
    with counted(work):
        action()
    with calls:
        action()
    work.operators = calls.count
    return work


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=[size.name for size in SIZES], default="2x128")
    size = next(size for size in SIZES if size.name == parser.parse_args().size)
    torch.set_num_threads(1)
    facts = machine()
    warm = warm_directory(size)
    times = measured(size, str(warm))
    one, two = rate(1), rate(2)
    rows, cases = [], []
    for name, action in phases(str(endless_directory(warm))).items():
        work, took = count(action), times.pop(ACTIONS[name])
        at_rate = work.attention / one
        floor = work.flops / one + at_rate
        alone = sum(seconds(shape) * often for shape, often in work.products.items()) + at_rate
        figures = (took * 1e3, work.flops / 1e9, work.attention / 1e9, floor * 1e3, alone * 1e3)
        over = f"{(took - floor) * 1e3:.1f}"
        rows.append((name, *(f"{value:.2f}" for value in figures), over, str(work.operators)))
        cases.append({"phase": name, "seconds": took, "floor": floor, "alone": alone})
        cases[-1] |= {"flops": work.flops, "attention": work.attention}
    rows += [(name, f"{took * 1e3:.2f}", *("",) * 6) for name, took in times.items()]
    said = f"A product of {' x '.join(map(str, LARGE))}: {one / 1e9:.0f} GFLOP/s on one thread, "
    said += f"{two / 1e9:.0f} on two."
    title = f"GRPO, {size.name}: phases of an iteration beside the floor of their products"
    page = markdown_report(title, facts, [said, markdown_table(HEADER, rows)], NOTES)
    data = {"machine": facts, "cases": cases, "others": times, "rates": [one, two]}
    name = f"phases_{size.name}_{machine_kind()}"
    write_results(RESULTS, name, data, page)
    print(text_table(HEADER, rows))
    print(said)


if __name__ == "__main__":
    main()
