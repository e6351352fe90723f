"""Decoding on a pool of blocks, on the CPU: the same tokens as the reference, and what it holds.

The reference keeps every row in columns of its own and looks at every token.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlflow.batch import flat, lengths, ragged_rows
from rlflow.contract.values import Reach, SampleKey, Sampling
from rlflow.engines.hf.forward.attention import Traits
from rlflow.engines.hf.forward.fused import replace_forwards, restore_forwards
from rlflow.engines.hf.generate import decoding as begun
from rlflow.engines.hf.generate.decoding import Responses
from rlflow.engines.hf.generate.paged import PagedAttention, PagedCache, RowBlocks
from rlflow.engines.hf.generate.paged_decoding import PagedDecoding
from rlflow.engines.hf.generate.waits import HostWaits
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.modelfiles.paging import BLOCK, LOOK, blocks_for, pool_blocks
from rlflow.scheduler.costs.lengths import Load, ResponseLengths
from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.devices.hardware import KINDS
from rlflow.scheduler.models.shapes import read_shape
from tests.engines.conftest import make_config

pytestmark = pytest.mark.torch

KEY = SampleKey(seed=1, iteration=2, stream="rollout")
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
LONG = [[1 + (7 * i + k) % 30 for i in range(size)] for k, size in enumerate((300, 128, 5, 131))]
STOPS = tuple(range(4))
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gptoss", "gpt2"]


@pytest.fixture(scope="module")
def long_dir(tmp_path_factory):
    """A tiny model whose rows may be longer than a few blocks."""
    import transformers

    path = tmp_path_factory.mktemp("models") / "long"
    torch.manual_seed(5)
    config = make_config("qwen2")
    config.max_position_embeddings = 1024
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def load(path):
    return load_model(path, dtype=torch.float32, device="cpu")


def generated(engine, sampling, prompts=PROMPTS, reach=None, ids=None):
    ids = torch.arange(len(prompts) * sampling.n) if ids is None else torch.tensor(ids)
    return engine.generate(ragged_rows(prompts, torch.int64), sampling, KEY, ids, reach or Reach())


def rows_of(made):
    return [row.tolist() for row in made.response_tokens.unbind()]


def require_same(expected, found, bound=1e-5):
    assert rows_of(expected) == rows_of(found)
    assert torch.equal(expected.finished, found.finished)
    apart = (flat(expected.log_probs) - flat(found.log_probs)).abs().max()
    assert float(apart) <= bound


def decoding(model, prompts, sampling, blocks=None, record=None):
    """A generation with a pool of a given size, not yet begun."""
    asked = ragged_rows(prompts, torch.int64)
    rows = Responses(
        sampling, KEY, torch.arange(len(prompts) * sampling.n), Reach(), torch.device("cpu")
    )
    return PagedDecoding(model, asked, lengths(asked), rows, lambda: False, record, blocks)


WAYS = {
    "sampled": Sampling(max_new_tokens=24, n=4, stop_tokens=STOPS),
    "nucleus": Sampling(max_new_tokens=40, n=2, temperature=0.7, top_p=0.9, top_k=20),
    "greedy": Sampling(max_new_tokens=17, temperature=0.0, stop_tokens=(3, 17)),
}


@pytest.mark.rows(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", [*WAYS][:1])
def test_tokens_are_the_references(family, way, model_dir):
    model = load(model_dir(family))
    require_same(
        generated(TorchRollout(model), WAYS[way]),
        generated(TorchRollout(model, paged=True), WAYS[way]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", [*WAYS][1:])
def test_tokens_of_other_ways_are_the_references(family, way, model_dir):
    test_tokens_are_the_references(family, way, model_dir)


@pytest.mark.slow
def test_prompts_of_whole_blocks_and_rows_of_several(long_dir):
    """Prompts of 300, 128, 5 and 131 tokens; responses run over the ends of blocks."""
    model = load(long_dir)
    sampling = Sampling(max_new_tokens=2 * BLOCK + 3, n=2, stop_tokens=(0,))
    expected = generated(TorchRollout(model), sampling, LONG)
    assert lengths(expected.response_tokens).max() > BLOCK
    require_same(expected, generated(TorchRollout(model, paged=True), sampling, LONG))


@pytest.mark.parametrize("most", [1, 5])
def test_a_pool_for_fewer_rows_draws_the_same_tokens(most, long_dir):
    """Two rows of each of four prompts in two slots, or in four; the pool is what the plan says."""
    model = load(long_dir)
    sampling = Sampling(max_new_tokens=20, n=2, stop_tokens=(0,))
    rollout = TorchRollout(model, paged=True, rows_at_once=most)
    require_same(generated(TorchRollout(model), sampling, LONG), generated(rollout, sampling, LONG))
    asked = ragged_rows([LONG[0][:140]] * 4, torch.int64)
    rows = Responses(sampling, KEY, torch.arange(8), Reach(), torch.device("cpu"))
    made = rollout.paged_decoding(asked, lengths(asked), rows)
    with torch.inference_mode():
        made.step()
    assert max(most // 2, 1) * 2 == len(made.running)
    shape = read_shape(Path(long_dir))
    plan = Roofline(kind=KINDS["h100"], shape=shape, size=4, paged=True, rows_at_once=most)
    load_of = Load(rows=8, prompts=4, prompt=140, lengths=ResponseLengths(20, 10.0))
    assert dict(plan.rollout_holds(load_of))["KV cache"] == made.cache.num_bytes()


def test_prompts_are_read_without_masks_as_on_a_device(long_dir, monkeypatch):
    """As spans, which is how an accelerator packs: whole blocks, parts of them, and both."""
    model = load(long_dir)
    sampling = Sampling(max_new_tokens=12, n=2, temperature=0.8)
    expected = generated(TorchRollout(model), sampling, LONG)
    packed = partial(begun.pack_prompts, dense=False)
    monkeypatch.setattr(begun, "pack_prompts", packed)
    require_same(expected, generated(TorchRollout(model, paged=True), sampling, LONG))


def test_a_row_depends_on_itself_alone_to_the_bit(model_dir):
    engine = TorchRollout(load(model_dir("qwen2")), paged=True)
    sampling = Sampling(max_new_tokens=24, n=4, stop_tokens=(0,))
    whole = generated(engine, sampling)
    turned = generated(engine, sampling, PROMPTS[::-1], ids=[8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3])
    alone = Sampling(max_new_tokens=24, n=1, stop_tokens=(0,))
    one = generated(engine, alone, PROMPTS[1:2], ids=[5])
    tokens, log_probs = rows_of(whole), [row.tolist() for row in whole.log_probs.unbind()]
    assert tokens[8:] + tokens[4:8] + tokens[:4] == rows_of(turned)
    assert tokens[5] == rows_of(one)[0]
    assert log_probs[5] == one.log_probs.unbind()[0].tolist()
    found = [row.tolist() for row in turned.log_probs.unbind()]
    assert log_probs[8:] + log_probs[4:8] + log_probs[:4] == found


@pytest.mark.parametrize("count", [2, 3, 12])
def test_pieces_are_the_whole_and_come_as_rows_end(count, model_dir):
    engine = TorchRollout(load(model_dir("qwen2")), paged=True)
    sampling = Sampling(max_new_tokens=24, n=4, stop_tokens=tuple(range(8)))
    whole = generated(engine, sampling)
    pieces = [generated(engine, sampling, reach=Reach(piece=i, pieces=count)) for i in range(count)]
    pieces = [made for made in pieces if len(made.finished)]
    rows = torch.cat([made.rows for made in pieces]).tolist()
    tokens = [row for made in pieces for row in rows_of(made)]
    assert list(range(12)) == sorted(rows)
    assert [rows_of(whole)[row] for row in rows] == tokens
    sizes = [max(lengths(made.response_tokens).tolist()) for made in pieces]
    least = [min(lengths(made.response_tokens).tolist()) for made in pieces]
    assert all(a <= b for a, b in zip(sizes, least[1:], strict=False))
    assert len(set(sizes)) > 1


def test_a_pause_changes_no_token(model_dir):
    model = load(model_dir("qwen2"))
    sampling = Sampling(max_new_tokens=24, temperature=0.8, n=1)
    whole = rows_of(generated(TorchRollout(model), sampling))
    engine = TorchRollout(model, paged=True)
    begun = rows_of(generated(engine, sampling, reach=Reach(until=10)))
    seen = [prompt + row for prompt, row in zip(PROMPTS, begun, strict=True)]
    rest = rows_of(generated(engine, sampling, seen, reach=Reach(first=10)))
    assert whole == [a + b for a, b in zip(begun, rest, strict=True)]


def test_an_abort_ends_rows_after_the_window(model_dir):
    engine = TorchRollout(load(model_dir("qwen2")), paged=True)
    forward = engine.model.logits
    passes = []

    def counted(*args):
        passes.append(1)
        if len(passes) == 4:
            engine.abort()
        return forward(*args)

    engine.model.logits = counted
    made = generated(engine, Sampling(max_new_tokens=50))
    assert [1 + LOOK] * 3 == lengths(made.response_tokens).tolist()
    assert not made.finished.any()


class Trace(PagedDecoding):
    """Notes who was set aside, who began when, and the most bytes and blocks in use."""

    def __init__(self, *args):
        super().__init__(*args)
        self.set_aside, self.begun, self.used = [], [], 0

    def _make_room(self):
        before = set(self.aside)
        moved = super()._make_room()
        self.set_aside += sorted(set(self.aside) - before)
        return moved

    def _begin(self, state, prompts):
        self.begun.append(list(prompts))
        super()._begin(state, prompts)

    def _window(self, state, times):
        super()._window(state, times)
        free = self.held.free
        assert len(set(free)) == len(free)
        self.used = max(self.used, self.cache.blocks - 1 - len(free))
        for row in self.running:
            mine = self.held.table[row, : self.held.held[row]]
            assert not set(mine.tolist()) & {*free, 0}


def traced(model, prompts, sampling, blocks=None):
    asked = ragged_rows(prompts, torch.int64)
    ids = torch.arange(len(prompts) * sampling.n)
    responses = Responses(sampling, KEY, ids, Reach(), torch.device("cpu"))
    made = Trace(model, asked, lengths(asked), responses, lambda: False, None, blocks)
    with torch.inference_mode():
        made.run()
    return made, responses.result()


@pytest.mark.slow
def test_a_small_pool_sets_rows_aside_and_lets_prompts_wait(long_dir):
    """Every row comes to need three blocks of its own, and the pool has seven for six rows."""
    model = load(long_dir)
    sampling = Sampling(max_new_tokens=2 * BLOCK + 1, n=2)
    prompts = [LONG[1], LONG[2], LONG[3]]
    made, found = traced(model, prompts, sampling, blocks=8)
    require_same(generated(TorchRollout(model), sampling, prompts), found)
    assert made.set_aside
    assert len(made.begun) > 1
    assert made.used <= 7


@pytest.mark.slow
def test_the_pool_is_less_than_rows_at_their_longest(long_dir):
    """Rows end all along; the pool that the rule gives has room for half of the longest."""
    model = load(long_dir)
    sampling = Sampling(max_new_tokens=4 * BLOCK, n=8, stop_tokens=(0, 1))
    made, found = traced(model, [LONG[2], LONG[1]], sampling)
    require_same(generated(TorchRollout(model), sampling, [LONG[2], LONG[1]]), found)
    longest = sum(8 * blocks_for(len(row) + 4 * BLOCK) for row in (LONG[2], LONG[1]))
    assert made.cache.blocks < 0.7 * longest
    assert [] == made.set_aside


def test_the_pools_bytes_are_what_the_rule_says(long_dir):
    model = load(long_dir)
    sampling = Sampling(max_new_tokens=20, n=4)
    made = decoding(model, LONG, sampling)
    with torch.inference_mode():
        made.step()
    layers, kv_heads, size = 2, 2, 8
    token = 2 * layers * kv_heads * size * 4
    assert pool_blocks([len(p) for p in LONG], 4, 20) * BLOCK * token == made.cache.num_bytes()
    with torch.inference_mode():
        made.run()
    assert 0 == made.cache.num_bytes()


@pytest.mark.parametrize(("prompt", "n", "new"), [(5, 4, 20), (300, 2, 140), (128, 1, 1)])
def test_a_plan_counts_the_pool_to_the_byte(prompt, n, new, long_dir):
    shape = read_shape(Path(long_dir))
    plan = Roofline(kind=KINDS["h100"], shape=shape, size=4, paged=True)
    rows = Load(rows=3 * n, prompts=3, prompt=prompt, lengths=ResponseLengths(new, new / 2))
    made = decoding(load(long_dir), [LONG[0][:prompt]] * 3, Sampling(max_new_tokens=new, n=n))
    with torch.inference_mode():
        made.step()
    assert dict(plan.rollout_holds(rows))["KV cache"] == made.cache.num_bytes()
    assert rows.in_blocks().slots == len(made.state.row)


def test_whole_blocks_of_a_prompt_are_there_once():
    held = RowBlocks(20, 8, 4, 6)
    held.begin(0, 2)
    for row in range(4):
        held.extend(row, 2 * BLOCK + 1)
    assert 19 - 2 - 4 == len(held.free)
    assert [held.table[0, :2].tolist()] * 4 == held.table[:4, :2].tolist()
    assert 4 == len({int(block) for block in held.table[:4, 2]})
    for row in range(3):
        held.end(row)
    assert 19 - 3 == len(held.free)
    held.end(3)
    assert list(range(1, 20)) == sorted(held.free)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen2", {}),
        ("gpt2", {"temperature": 0.0}),
        pytest.param("mistral", {"top_p": 0.9}, marks=pytest.mark.slow),
        pytest.param("gemma2", {"top_k": 9}, marks=pytest.mark.slow),
    ],
)
def test_the_host_waits_for_nothing_within_a_window(family, more, model_dir):
    """Nor is there a copy of what lies on the host; the reference waits at every token."""
    model = load(model_dir(family))
    sampling = Sampling(max_new_tokens=2 * LOOK, n=2, stop_tokens=(0,), **more)
    made = decoding(model, PROMPTS, sampling)
    counted, window = [], made._window

    def counting(state, times):
        with HostWaits() as waits:
            window(state, times)
        counted.append((times, waits.count))

    made._window = counting
    with torch.inference_mode():
        made.run()
    assert LOOK in {times for times, _ in counted}
    assert {0} == {waits for _, waits in counted}
    with HostWaits() as waits:
        generated(TorchRollout(model), sampling)
    assert waits.count >= 2 * LOOK - 1


class Devices(TorchDispatchMode):
    """The types of devices of all tensors that operators read and make."""

    def __init__(self):
        super().__init__()
        self.types = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if torch.is_tensor(x)]
        self.types |= {tensor.device.type for tensor in tensors}
        return result


def moved_to_meta(made, kernel):
    """The rows of a generation that has begun, all tensors on the meta device."""
    state, cache = made.state, made.cache
    for name, value in vars(state).items():
        if isinstance(value, torch.Tensor):
            setattr(state, name, value.to("meta"))
    cache.takes_runs = kernel
    cache.table = cache.table.to("meta")
    cache.pools = {
        layer: tuple(part.to("meta") for part in pair) for layer, pair in cache.pools.items()
    }
    cache.states = {
        layer: {name: each.to("meta") for name, each in held.items()}
        for layer, held in cache.states.items()
    }
    restore_forwards(made.model.module)
    made.model.module.to("meta")
    replace_forwards(made.model.module)
    return state


def test_a_plan_counts_the_kernels_of_a_step(long_dir, monkeypatch):
    """Versions of torch and transformers differ by a few."""
    monkeypatch.setattr("rlflow.engines.hf.generate.paged.flash_fits", lambda *_: True)
    model = load_model(long_dir, dtype=torch.bfloat16, device="cpu")
    made = decoding(model, PROMPTS, Sampling(max_new_tokens=24, n=2, stop_tokens=(0,)))
    plan = Roofline(kind=KINDS["h100"], shape=read_shape(Path(long_dir)), size=2, paged=True)
    with torch.inference_mode():
        made.step()
        state = moved_to_meta(made, kernel=True)
        with HostWaits() as counted:
            state.step(8, 1)
    assert abs(counted.operations - plan.step_kernels) < 0.1 * plan.step_kernels


@pytest.mark.rows(2)
@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
@torch.no_grad()
def test_a_step_has_no_values_to_ask_for(family, kernel, model_dir, monkeypatch):
    """On the meta device whoever reads a number fails. Nothing comes from the host either.

    Not even a number of no dimension, which would be copied, and waited for, to be recorded.
    """
    monkeypatch.setattr("rlflow.engines.hf.generate.paged.flash_fits", lambda *_: kernel)
    model = load(model_dir(family))
    made = decoding(model, PROMPTS, Sampling(max_new_tokens=24, n=2, top_p=0.9, stop_tokens=(0,)))
    with torch.inference_mode():
        made.step()
    state = moved_to_meta(made, kernel)
    with Devices() as seen:
        state.step(8, 1)
    assert {"meta"} == seen.types
    assert "meta" == state.last.device.type


def by_run(q, keys, values, runs, scale):
    """What a kernel makes of runs: each query on the used keys from its start on."""
    output = torch.zeros_like(q)
    sums = torch.full((q.shape[1], len(q)), float("inf"))
    repeats = q.shape[1] // keys.shape[1]
    for run, used in enumerate(runs.used.tolist()):
        begin = int(runs.starts[run])
        key, value = (
            pool[begin : begin + used].repeat_interleave(repeats, 1) for pool in (keys, values)
        )
        if used:
            scores = torch.einsum("hd,khd->hk", q[run], key) * scale
            output[run] = torch.einsum("hk,khd->hd", scores.softmax(-1), value)
            sums[:, run] = scores.logsumexp(-1)
    return output, sums


@pytest.mark.parametrize("window", [None, 1, 5, BLOCK + 3])
@pytest.mark.parametrize("sinks", [False, True])
def test_runs_of_blocks_merge_to_the_whole(window, sinks, monkeypatch):
    monkeypatch.setattr("rlflow.engines.hf.generate.paged.run_kernel", by_run)
    made = torch.Generator().manual_seed(1)
    cache = PagedCache(7, 4, 3, torch.device("cpu"))
    cache.pools[0] = tuple(torch.randn(7 * BLOCK, 2, 8, generator=made) for _ in range(2))
    table = torch.tensor([[5, 2, 4], [3, 1, 0], [6, 0, 0], [2, 2, 2]])
    positions = torch.tensor([2 * BLOCK + 17, BLOCK - 1, 0, 40])
    live = torch.tensor([True, True, True, False])
    traits = Traits(
        scaling=0.3, window=window, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]) if sinks else None
    )
    q = torch.randn(4, 4, 8, generator=made)
    state = PagedAttention(cache, table, positions, live)
    expected = state.attend_gathered(q, cache.pools[0], q.shape[-1], traits)
    found = state.attend_runs(q, *cache.pools[0], traits)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_rows_that_begin_after_longer_ones_have_ended(long_dir):
    """Those that have ended are longer than the blocks of a step of those that begin."""
    model = load(long_dir)
    sampling, prompts = Sampling(max_new_tokens=BLOCK, n=1), [[1 + k] * 8 for k in range(8)]
    few = blocks_for(8 + BLOCK) * 5 + 1
    with torch.inference_mode():
        run = decoding(model, prompts, sampling, blocks=few)
        run.run()
    require_same(
        generated(TorchRollout(model, paged=False), sampling, prompts), run.responses.result()
    )
