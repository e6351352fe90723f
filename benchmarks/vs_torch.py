"""An update beside plain torch: packed rows, varlen attention, a chunked loss, AdamW.

    python benchmarks/vs_torch.py                       a tiny model on the CPU
    python benchmarks/vs_torch.py --device cuda:0       1.5B on a GPU, recomputed layers

Both sides take the same steps on the same rows with the same weights, in turns, in one process; the
losses have to agree. Rows of one prompt each are the bar, where both compute the same tokens; in
groups of 8 rlflow computes each prompt once.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from plain_torch import PlainTrainer
from turns import MODEL_SIZES, Turns, filled, in_turns, model_directory, options_of, report

import rlflow as rf
from rlflow.batch import make_batch, ragged_rows
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.train import TrainEngine
from rlflow.runtime.record.devices.rows import row_work
from rlflow.scheduler.devices.machine import machine_gpus
from rlflow.scheduler.models.flops import TRAINED_FORWARDS, ProductSizes

LR = 1e-6
TARGET = 1.0
NOTES = (
    "Medians over the turns, A B B A; the ratio is the median over the pairs, `of pairs` the "
    "lowest and the highest. A turn is one optimizer step from rows on the host to new weights.",
    "bfloat16 with float32 master weights and moments on a GPU, float32 on a CPU. Layers are "
    "recomputed on both sides on a GPU. Gradients are clipped to norm 1 on both sides.",
    "MFU counts causal attention and equal prompts once (rlflow/scheduler/models/flops.py), over "
    "the device's peak; on a CPU, which has no such peak, Gflop/s are told. Of groups of 8 both "
    "sides are held against that work, so that what the other one computes twice is lost.",
)


def rows_of(vocabulary: int, groups: int, n: int, prompt: int, response: int) -> Any:
    """Prompts and responses of groups, as lists of int64 tensors; lengths up to the given ones."""
    made = torch.Generator().manual_seed(1)

    def draw(size: int) -> torch.Tensor:
        return torch.randint(vocabulary, (size,), generator=made)

    prompts, responses = [], []
    for group in range(groups):
        tokens = draw(prompt - group % 5)
        for row in range(n):
            prompts.append(tokens)
            responses.append(draw(max(1, response - (group * n + row) * 7 % (response // 2))))
    return prompts, responses


def case(name: str, options: Any, groups: int, n: int, target: float | None) -> Turns:
    """Turns of one kind of rows. Raises SystemExit where the first losses do not agree."""
    size, gpu, device = MODEL_SIZES[options.size], options.gpu, options.device
    dtype = torch.bfloat16 if gpu else torch.float32
    prompt, response = (512, 1536) if gpu else (12, 24)
    micro_tokens = 16384 if gpu else 256
    prompts, responses = rows_of(size.vocabulary, groups, n, prompt, response)
    fields = {
        "prompt_tokens": ragged_rows(prompts, torch.int64),
        "response_tokens": ragged_rows(responses, torch.int64),
    }
    batch, total = make_batch(fields, len(prompts)), sum(map(len, responses))
    path = str(model_directory(size, prompt + response + 8))
    model = load_model(path, dtype=dtype, device=device, init="random", seed=3, recompute=gpu)
    weights = {name: shard.tensor.clone() for name, shard in model.shards().items()}
    plain = PlainTrainer(
        path,
        weights,
        device=device,
        dtype=dtype,
        micro_tokens=micro_tokens,
        recompute=gpu,
        lr=LR,
    )
    engine = TrainEngine(model, rf.AdamW(lr=LR, weight_decay=0.0), micro_tokens=micro_tokens)
    losses: dict[str, list[float]] = {"ours": [], "theirs": []}

    def ours() -> None:
        done = engine.step(
            batch,
            lambda outputs, _: (-outputs["log_probs"].sum() / total, {}),
            outputs=("log_probs",),
            temperature=1.0,
            max_grad_norm=1.0,
        )
        losses["ours"].append(done.metrics["loss"])

    seconds = in_turns(
        ours,
        lambda: losses["theirs"].append(plain.step(prompts, responses)),
        pairs=options.pairs,
        device=device,
    )
    first = [found[0] for found in losses.values()]
    if abs(first[0] - first[1]) > (2e-2 if gpu else 1e-4) * abs(first[0]):
        raise SystemExit(f"{name}: the first losses are {first[0]:.6g} and {first[1]:.6g}")
    return Turns(
        case=name, ours=seconds[0], theirs=seconds[1], target=target,
        beside=reached(size, row_work(fields), seconds, gpu=gpu),
    )  # fmt: skip


def reached(size: Any, work: dict[str, float], seconds: Any, *, gpu: bool) -> dict[str, str]:
    """MFU of both sides, or what they compute a second."""
    head = size.hidden // size.heads
    attention = size.hidden * head * (2 * size.heads + 2 * size.kv_heads)
    products = ProductSizes(
        body=size.layers * (attention + 3 * size.hidden * size.intermediate),
        head=size.vocabulary * size.hidden,
        layers=size.layers,
        heads=size.heads,
        head_dim=head,
    )
    flops = TRAINED_FORWARDS * products.forward(work["passed"], work["predicted"], work["pairs"])
    gpus = machine_gpus() if gpu else ()
    peak = gpus[0].kind.flops if gpus and gpus[0].kind is not None else None
    rates = [flops / statistics.median(taken) for taken in seconds]
    if peak is None:
        return {"Gflop/s": " and ".join(f"{rate / 1e9:.2f}" for rate in rates)}
    return {"MFU": " and ".join(f"{rate / peak:.1%}" for rate in rates)}


def main() -> None:
    """Measure, print the table, write it."""
    options = filled(options_of(__doc__).parse_args())
    if not options.gpu:
        torch.set_num_threads(1)
    rows = 32 if options.gpu else 8
    found = [
        case(f"update, {rows} rows of as many prompts", options, rows, 1, TARGET),
        case(f"update, {rows // 8} groups of 8 rows", options, rows // 8, 8, None),
    ]
    report("vs_torch", "An update beside plain torch", found, NOTES, options)


if __name__ == "__main__":
    main()
