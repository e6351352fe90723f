"""Parts A, B and G of decoding: the eager path's tokens, replayed steps, their memory and speed.

The eager path keeps a row in columns of its own and looks at every token; it is what the CPU has.
Tokens are those of a distribution function at a number, so a row may go another way where rounding
moves a bound: on a GPU most rows are compared, not all.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch

from rlflow.batch import flat, lengths, ragged_rows
from rlflow.contract.values import Reach, SampleKey, Sampling
from rlflow.engines.hf.generate.decoding import Responses
from rlflow.engines.hf.generate.graphs import cuda_graphs
from rlflow.engines.hf.generate.paged import kernel_takes_runs
from rlflow.engines.hf.generate.paged_decoding import PagedDecoding
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.modelfiles.paging import BLOCK, LOOK, pool_blocks
from tests.gpu.conftest import HALF_BILLION, ONE_AND_A_HALF, TINY
from tests.gpu.test_throughput import record, wait

pytestmark = pytest.mark.torch

KEY = SampleKey(seed=1, iteration=2, stream="rollout")
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9], [7] * 40]
# Bytes beside what is counted: workspaces of libraries, segments that are not full.
SLACK = 512 << 20


def load(model_of: Any, size: Any, device: Any, dtype: Any) -> Any:
    return load_model(model_of(size), dtype=dtype, device=device, init="random", seed=3)


def generated(engine: Any, sampling: Sampling, prompts: Any = None) -> Any:
    asked = ragged_rows(prompts or PROMPTS, torch.int64)
    return engine.generate(asked, sampling, KEY, torch.arange(len(asked.unbind()) * sampling.n))


def begun(model: Any, sampling: Sampling, *, recorded: bool) -> Any:
    """A generation before its first window."""
    asked = ragged_rows(PROMPTS, torch.int64)
    ids = torch.arange(len(PROMPTS) * sampling.n)
    responses = Responses(sampling, KEY, ids, Reach(), model.device)
    graphs = cuda_graphs() if recorded and model.device.type == "cuda" else None
    return PagedDecoding(model, asked, lengths(asked), responses, lambda: False, graphs)


def tokens_of(made: Any) -> list[list[int]]:
    return [row.tolist() for row in made.response_tokens.unbind()]


@pytest.mark.rows(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("more", [{}, {"top_p": 0.9, "temperature": 0.7}, {"top_k": 20}], ids=str)
def test_tokens_are_those_of_the_eager_path(
    model_of: Any, device: Any, dtype: Any, more: Any
) -> None:
    """Rows agree until rounding parts them; log-probs of what both drew are close."""
    model = load(model_of, TINY, device, dtype)
    sampling = Sampling(max_new_tokens=48, n=8, stop_tokens=(0,), **more)
    eager = generated(TorchRollout(model, paged=False), sampling)
    paged = generated(TorchRollout(model, paged=True), sampling)
    first, second = tokens_of(eager), tokens_of(paged)
    same = [a == b for a, b in zip(first, second, strict=True)]
    least = {"cpu": 1.0, "cuda": 0.9}[device.type] if dtype == torch.float32 else 0.3
    assert statistics.mean(same) >= least
    bound = 1e-3 if dtype == torch.float32 else 0.15
    pairs = zip(eager.log_probs.unbind(), paged.log_probs.unbind(), same, strict=True)
    for a, b, alike in pairs:
        if alike:
            assert float((a - b).abs().max()) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replayed_steps_draw_what_steps_draw(model_of: Any, device: Any, dtype: Any) -> None:
    model = load(model_of, TINY, device, dtype)
    sampling = Sampling(max_new_tokens=8 * LOOK, n=4, stop_tokens=(0,))
    found = []
    for recorded in (False, True):
        made = begun(model, sampling, recorded=recorded)
        with torch.inference_mode():
            for _ in range(4):
                made.step()
            assert bool(made.replays.recorded) == (recorded and device.type == "cuda")
            made.run()
        found.append(made.responses.result())
    assert tokens_of(found[0]) == tokens_of(found[1])
    assert torch.allclose(*(flat(one.log_probs) for one in found), atol=1e-5)


def test_replays_read_weights_that_were_written_in_place(model_of: Any, device: Any) -> None:
    """New weights in the middle of a generation: replayed or not, what follows is of those."""
    found = []
    for recorded in (False, True):
        model = load(model_of, TINY, device, torch.float32)
        made = begun(model, Sampling(max_new_tokens=8 * LOOK), recorded=recorded)
        with torch.inference_mode():
            for _ in range(4):
                made.step()
            before = made.addresses()
            changed = {name: value + 0.1 for name, value in model.named_tensors().items()}
            model.load_tensors(changed, 1)
            assert before == made.addresses()
            made.run()
        found.append(tokens_of(made.responses.result()))
    assert found[0] == found[1]


def test_steps_are_recorded_anew_where_weights_have_moved(model_of: Any, device: Any) -> None:
    """A sleep in the middle of a generation, and weights that come back elsewhere."""
    found = []
    for moved in (False, True):
        model = load(model_of, TINY, device, torch.float32)
        made = begun(model, Sampling(max_new_tokens=8 * LOOK), recorded=True)
        with torch.inference_mode():
            for _ in range(4):
                made.step()
            before = made.addresses()
            if moved:
                model.sleep("offload")
                between = [torch.empty_like(x) for x in model.buffers() for _ in range(4)]
                model.wake()
                assert device.type == "cpu" or before != made.addresses()
                del between
            made.run()
        found.append(tokens_of(made.responses.result()))
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_pool_for_fewer_rows_draws_the_same_tokens_in_less_memory(
    model_of: Any, device: Any
) -> None:
    """Tokens are those of the rows; how many of them share a step changes none of them."""
    model = load(model_of, TINY, device, torch.float32)
    sampling = Sampling(max_new_tokens=4 * LOOK, n=2)
    prompts = [*PROMPTS] * 4
    found, held = [], []
    for most in (512, 2):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        engine = TorchRollout(model, paged=True, rows_at_once=most)
        found.append(tokens_of(generated(engine, sampling, prompts)))
        if device.type == "cuda":
            held.append(torch.cuda.max_memory_allocated(device))
    assert found[0] == found[1]
    assert held == sorted(set(held), reverse=True)


def test_generations_after_a_sleep_and_new_weights(model_of: Any, device: Any) -> None:
    model = load(model_of, TINY, device, torch.float32)
    engine = TorchRollout(model, paged=True)
    sampling = Sampling(max_new_tokens=6 * LOOK, n=2)
    first = tokens_of(generated(engine, sampling))
    engine.sleep("offload")
    engine.wake()
    assert first == tokens_of(generated(engine, sampling))
    changed = {name: value + 0.1 for name, value in model.named_tensors().items()}
    engine.update_weights(changed, 1)
    fresh = tokens_of(generated(TorchRollout(model, paged=True), sampling))
    assert first != fresh
    assert fresh == tokens_of(generated(engine, sampling))


@pytest.mark.parametrize("recorded", [False, True])
def test_no_window_waits_for_the_device(model_of: Any, gpu: Any, recorded: bool) -> None:
    """From the second of its shape on; what is recorded waits while it is."""
    model = load(model_of, TINY, gpu, torch.bfloat16)
    made = begun(model, Sampling(max_new_tokens=8 * LOOK, n=4, top_p=0.9), recorded=recorded)
    with torch.inference_mode():
        for _ in range(3):
            made.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                made._window(made.state, LOOK)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_kernel_reads_blocks_as_runs(gpu: Any) -> None:
    assert kernel_takes_runs(gpu, torch.bfloat16)


def test_the_pool_and_the_steps_hold_what_is_counted(model_of: Any, device: Any, big: bool) -> None:
    """The pool to the byte; on a GPU the peak, and that all is given back."""
    size = HALF_BILLION if big else TINY
    model = load(model_of, size, device, torch.bfloat16)
    made = begun(model, Sampling(max_new_tokens=64, n=8), recorded=True)
    start = torch.cuda.memory_allocated(device) if big else 0
    if big:
        torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        made.step()
        token = 2 * size.layers * size.kv_heads * (size.hidden // size.heads) * 2
        pool = pool_blocks([len(p) for p in PROMPTS], 8, 64) * BLOCK * token
        assert pool == made.cache.num_bytes()
        made.run()
    if big:
        distributions = 2 * 32 * size.vocabulary * (2 + 8)
        peak = torch.cuda.max_memory_allocated(device) - start
        assert peak < pool + distributions + SLACK
        del made
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated(device) - start < SLACK


@pytest.mark.parametrize("paged", [False, True])
def test_a_rollout(model_of: Any, device: Any, big: bool, paged: bool) -> None:
    """Tokens a second, written to the results, not judged."""
    size = ONE_AND_A_HALF if big else TINY
    prompt, new, groups = (512, 512, 32) if big else (8, 24, 2)
    model = load(model_of, size, device, torch.bfloat16)
    prompts = [[1 + (i * 7 + g) % 90 for i in range(prompt)] for g in range(groups)]
    engine = TorchRollout(model, paged=paged)
    sampling = Sampling(max_new_tokens=new, n=8)
    seconds = []
    for _ in range(2):
        wait(device)
        began = time.perf_counter()
        made = generated(engine, sampling, prompts)
        wait(device)
        seconds.append(time.perf_counter() - began)
    drawn = int(lengths(made.response_tokens).sum())
    assert groups * 8 * new == drawn
    name = f"rollout {'1.5B' if big else 'tiny'} {'paged' if paged else 'eager'} on {device.type}"
    record(name, {"seconds": round(seconds[-1], 3), "tokens/s": round(drawn / seconds[-1])})
