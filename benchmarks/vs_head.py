"""Log-probs, entropies and their gradients straight from hidden states, by who computes them.

    python benchmarks/vs_head.py                       a tiny head on the CPU
    python benchmarks/vs_head.py --device cuda:0       the head of 1.5B, 16,384 tokens

The chunked head as it is chosen on the device beside the same by torch's operators alone, and
beside `torch.nn.functional.linear_cross_entropy` in chunks, where this torch has that (2.13, not
2.11): it has neither entropies nor temperatures nor soft caps nor parts of a vocabulary, so the
pair takes log-probs at temperature 1. All of them have to agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from turns import MODEL_SIZES, Turns, filled, in_turns, options_of, report

from rlflow.engines.hf.forward import chunks
from rlflow.engines.hf.forward.chunks import ChunkedScores
from rlflow.engines.hf.forward.shares import Projection, WantedNumbers
from rlflow.modelfiles.chunks import CHUNK_BYTES

NOTES = (
    "Medians over the turns, A B B A; a turn is a forward and a backward from given gradients of "
    "each token's log-prob (and entropy), to gradients of hidden states and weight.",
    "`kernels` says whether Triton's two kernels computed our side. `GB` is the most that each "
    "side held beside what it was given, on a GPU.",
)


def given(options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, tokens, and what a loss weighs each token with."""
    size = MODEL_SIZES[options.size]
    count, dtype = (16_384, torch.bfloat16) if options.gpu else (64, torch.float32)
    torch.manual_seed(1)
    hidden = torch.randn(count, size.hidden, dtype=dtype, device=options.device)
    weight = torch.randn(size.vocabulary, size.hidden, dtype=dtype, device=options.device)
    tokens = torch.randint(size.vocabulary, (count,), device=options.device)
    weighed = torch.linspace(-1, 1, count, device=options.device)
    return hidden.requires_grad_(), (weight / size.hidden**0.5).requires_grad_(), tokens, weighed


def by_chunks(parts: Any, wanted: WantedNumbers) -> Callable[[], list[Tensor]]:
    """Our head: the loss, and gradients of hidden states and weight."""
    hidden, weight, tokens, weighed = parts
    form = Projection(size=len(weight))

    def run() -> list[Tensor]:
        made: Any = ChunkedScores.apply
        log_probs, entropy, *_ = made(hidden, weight, None, tokens, None, wanted, form)
        loss = (log_probs[:, 0] * weighed).sum()
        if entropy is not None:
            loss = loss + 0.01 * entropy.sum()
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    return run


@contextmanager
def plain_operators() -> Iterator[None]:
    """Without Triton's kernels, whatever the device."""
    with patch.object(chunks, "kernels_fit", lambda *_, **__: False):
        yield


def by_torch(parts: Any) -> Callable[[], list[Tensor]] | None:
    """Torch's own, each token weighed by itself; None where this torch has none."""
    call = getattr(torch.nn.functional, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if call is None or options is None:
        return None
    hidden, weight, tokens, weighed = parts

    def run() -> list[Tensor]:
        each = call(hidden, weight, tokens, reduction="none", options=options())
        loss = -(each.float() * weighed).sum()
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    return run


def most_bytes(call: Callable[[], Any], options: Any) -> str:
    """The most that a call holds beside what there was, on a GPU."""
    if not options.gpu:
        return "not counted"
    torch.cuda.reset_peak_memory_stats(options.device)
    before = torch.cuda.memory_allocated(options.device)
    call()
    return f"{(torch.cuda.max_memory_allocated(options.device) - before) / 1e9:.2f}"


def beside(name: str, ours: Callable[[], Any], theirs: Callable[[], Any], options: Any) -> Turns:
    """Turns of both. Raises SystemExit where they do not agree."""
    bound = 3e-2 if options.gpu else 1e-4
    for one, other in zip(ours(), theirs(), strict=True):
        apart = float((one.float() - other.float()).norm() / other.float().norm())
        if not apart < bound:
            raise SystemExit(f"{name}: results are {apart:.2g} apart, more than {bound}")
    held = " and ".join(most_bytes(call, options) for call in (ours, theirs))
    mine, other = in_turns(ours, theirs, pairs=options.pairs, device=options.device)
    return Turns(case=name, ours=mine, theirs=other, beside={"GB": held})


def main() -> None:
    """Measure, print the table, write it."""
    options = filled(options_of(__doc__).parse_args())
    if not options.gpu:
        torch.set_num_threads(1)
    parts = given(options)
    wanted = WantedNumbers(temperatures=(1.0,), limit=CHUNK_BYTES, entropy=True)
    alone = WantedNumbers(temperatures=(1.0,), limit=CHUNK_BYTES)
    fits = chunks.kernels_fit(parts[0], wanted, chosen=False, biased=False)
    ours = by_chunks(parts, wanted)

    def plain() -> list[Tensor]:
        with plain_operators():
            return ours()

    found = [beside("log-probs and entropies, by torch's operators", ours, plain, options)]
    theirs = by_torch(parts)
    if theirs is not None:
        name = "log-probs, by linear_cross_entropy"
        found.append(beside(name, by_chunks(parts, alone), theirs, options))
    notes = (*NOTES, f"kernels: {'yes' if fits else 'no'}; torch {torch.__version__}.")
    report("vs_head", "The head of a model by who computes it", found, notes, options)


if __name__ == "__main__":
    main()
