"""An update with compiled layers beside the same update without.

    python benchmarks/vs_eager.py                       a tiny and a 100M model on the CPU
    python benchmarks/vs_eager.py --device cuda:0       1.5B on a GPU, recomputed layers

Both sides take the same steps on the same rows from the same weights, in turns, in one process; the
losses have to agree. What compiling takes is told beside, and is no part of a turn.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from turns import MODEL_SIZES, Turns, filled, in_turns, model_directory, options_of, report
from vs_torch import LR, rows_of

import rlflow as rf
from rlflow.batch import make_batch, ragged_rows
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.train import TrainEngine

NOTES = (
    "Medians over the turns, A B B A; the ratio is compiled over plain, its median over the pairs, "
    "`of pairs` the lowest and the highest. A turn is one optimizer step, warm; rows have other "
    "lengths in every turn, so that a compilation for each would be seen.",
    "float32 on a CPU, bfloat16 with float32 master weights on a GPU. `compiling` is what the "
    "first step takes beyond a warm one.",
)
# Rows and tokens of a turn: rows, longest prompt, longest response, tokens of a micro-batch.
WORK = {"tiny": (8, 12, 24, 256), "100m": (4, 32, 64, 512), "1.5b": (32, 512, 1536, 16384)}


class Side:
    """A model that takes steps, with layers compiled or not."""

    def __init__(self, name: str, options: Any, *, compiled: bool) -> None:
        gpu, size = options.gpu, MODEL_SIZES[name]
        rows, prompt, response, micro = WORK.get(name, WORK["1.5b"])
        path = str(model_directory(size, prompt + response + 8))
        dtype = torch.bfloat16 if gpu else torch.float32
        model = load_model(
            path, dtype=dtype, device=options.device, init="random", seed=3, recompute=gpu,
            compiled=compiled,
        )  # fmt: skip
        adam = rf.AdamW(lr=LR, weight_decay=0.0)
        self.engine = TrainEngine(model, adam, micro_tokens=micro)
        self.batches = [
            _batch(size.vocabulary, rows, prompt - turn % 4, response - 3 * turn % 8)
            for turn in range(8)
        ]
        self.losses: list[float] = []

    def step(self) -> None:
        """One optimizer step, on rows of other lengths than the one before."""
        batch = self.batches[len(self.losses) % len(self.batches)]
        total = int(batch["response_tokens"].values().numel())
        done = self.engine.step(
            batch,
            lambda outputs, _: (-outputs["log_probs"].sum() / total, {}),
            outputs=("log_probs",),
            temperature=1.0,
            max_grad_norm=1.0,
        )
        self.losses.append(done.metrics["loss"])


def _batch(vocabulary: int, rows: int, prompt: int, response: int) -> Any:
    prompts, responses = rows_of(vocabulary, rows, 1, prompt, response)
    fields = {
        "prompt_tokens": ragged_rows(prompts, torch.int64),
        "response_tokens": ragged_rows(responses, torch.int64),
    }
    return make_batch(fields, len(prompts))


def case(name: str, options: Any) -> Turns:
    """Turns of one size. Raises SystemExit where losses do not agree."""
    compiled, plain = (Side(name, options, compiled=on) for on in (True, False))
    took = []
    for _ in range(2):  # The second compiles nothing but what a dimension's change asks for.
        began = time.perf_counter()
        compiled.step()
        took.append(time.perf_counter() - began)
        plain.step()
    seconds = in_turns(compiled.step, plain.step, pairs=options.pairs, device=options.device)
    bound = 2e-2 if options.gpu else 1e-4
    for ours, theirs in zip(compiled.losses, plain.losses, strict=True):
        if abs(ours - theirs) > bound * abs(theirs):
            raise SystemExit(f"{name}: losses are {ours:.6g} and {theirs:.6g}")
    warm = sorted(seconds[0])[len(seconds[0]) // 2]
    beside = {"compiling": f"{took[0] - warm:.0f} s"}
    return Turns(case=f"update, {name}", ours=seconds[0], theirs=seconds[1], beside=beside)


def main() -> None:
    """Measure, print the table, write it."""
    options = options_of(__doc__).parse_args()
    sizes = [options.size] if options.size else []
    options = filled(options)
    if not options.gpu:
        torch.set_num_threads(1)
    sizes = sizes or ([options.size] if options.gpu else ["tiny", "100m"])
    found = []
    for name in sizes:
        found.append(case(name, options))
        print("  ".join(found[-1].row()), flush=True)
    report("vs_eager", "An update with compiled layers beside one without", found, NOTES, options)


if __name__ == "__main__":
    main()
