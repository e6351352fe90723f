"""Times the engines alone: generation, reference log-probs and an update, by part.

    OMP_NUM_THREADS=1 python benchmarks/engine_micro.py --layers 2 --hidden 128 --fixed

Minimum and median milliseconds over the repeats, and the same of processor time, which other
programs on the machine disturb less. The model is random and its vocabulary that
of a character-level task; with --eos about 3.5 tokens are drawn per response.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.batch import flat, make_batch, ragged_rows
from rlflow.contract.values import SampleKey, Sampling
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.engines.hf.train import TrainEngine

VOCABULARY = 20
STOPS = (0, 1, 2, 3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """An optimizer of constant rate."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    min_lr_ratio: float = 0.0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--micro-tokens", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--profile", action="store_true", help="print the costliest operators")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--fixed", dest="stops", action="store_const", const=(), default=())
    length.add_argument("--eos", dest="stops", action="store_const", const=STOPS)
    return parser.parse_args()


def config_directory(options: argparse.Namespace) -> str:
    """A directory with the config of a Qwen2 of the sizes asked for."""
    from transformers import Qwen2Config

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    path = tempfile.mkdtemp(prefix="rlflow-bench-")
    config.save_pretrained(path)
    return path


def main() -> None:
    """Run the parts in turn and print one line for each."""
    options = arguments()
    torch.set_num_threads(options.threads)
    path = config_directory(options)
    dtype = getattr(torch, options.dtype)
    model = load_model(path, dtype=dtype, device="cpu", init="random")
    reference = load_model(path, dtype=dtype, device="cpu", init="random", seed=1)
    trainer = TrainEngine(model, Spec(), micro_tokens=options.micro_tokens)
    frozen = TrainEngine(reference, None, micro_tokens=options.micro_tokens)
    rollout = TorchRollout(model)
    made = torch.randint(5, VOCABULARY, (options.prompts, options.prompt_tokens))
    prompts = ragged_rows(list(made), torch.int64)
    sampling = Sampling(
        max_new_tokens=options.new_tokens, n=options.samples, stop_tokens=options.stops
    )
    ids = torch.arange(options.prompts * options.samples)
    repeated = ragged_rows([row for row in made for _ in range(options.samples)], torch.int64)
    times: dict[str, list[float]] = {}
    processor: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], object]) -> object:
        start, used = time.perf_counter(), time.process_time()
        result = action()
        times.setdefault(name, []).append((time.perf_counter() - start) * 1e3)
        processor.setdefault(name, []).append((time.process_time() - used) * 1e3)
        return result

    def iteration(number: int) -> None:
        key = SampleKey(seed=0, iteration=number, stream="rollout")
        made = timed("generate", lambda: rollout.generate(prompts, sampling, key, ids))
        batch = make_batch(
            {"prompt_tokens": repeated, "response_tokens": made.response_tokens},  # type: ignore[attr-defined]
            len(ids),
        )
        old = flat(made.log_probs)  # type: ignore[attr-defined]
        advantage = torch.randn(len(old))

        def loss(outputs: dict[str, Tensor], micro: object) -> tuple[Tensor, dict[str, Tensor]]:
            if len(outputs["log_probs"]) != len(old):
                return -outputs["log_probs"].sum() / len(old), {}
            ratio = (outputs["log_probs"] - old).exp()
            clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            return -clipped.sum() / len(old), {}

        timed(
            "ref_log_probs",
            lambda: frozen.forward(batch, outputs=("log_probs",), temperature=1.0),
        )
        timed(
            "update",
            lambda: trainer.step(
                batch, loss, outputs=("log_probs",), temperature=1.0, max_grad_norm=1.0
            ),
        )

    for number in range(3):
        iteration(number)
    times.clear()
    processor.clear()
    if options.profile:
        with torch.profiler.profile() as profile:
            iteration(3)
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))
        times.clear()
        processor.clear()
    for number in range(4, 4 + options.repeats):
        iteration(number)
    for label, clock in (("wall", times), ("processor", processor)):
        report(label, clock)


def report(label: str, times: dict[str, list[float]]) -> None:
    """Print the parts, and the iteration without and with the reference."""
    whole = [sum(turn) for turn in zip(*times.values(), strict=True)]
    without = [a - b for a, b in zip(whole, times["ref_log_probs"], strict=True)]
    for name, values in (*times.items(), ("iteration", without), ("with reference", whole)):
        least, middle = min(values), statistics.median(values)
        print(f"{label:10} {name:16} min {least:8.2f} ms   median {middle:8.2f} ms")


if __name__ == "__main__":
    main()
