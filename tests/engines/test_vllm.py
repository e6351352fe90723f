"""The real vLLM engine, against the embedded one on the same weights."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from rlflow.batch import flat, lengths, make_batch, ragged_rows
from rlflow.contract.values import Reach, SampleKey, Sampling
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.engines.hf.train import TrainEngine
from rlflow.engines.process.client.process_memory import members
from rlflow.errors import RunError
from rlflow.graph.rules.completion_order import ended_rows
from rlflow.graph.user.engines import VLLM
from tests.conftest import TINY
from tests.engines.sglang.conftest import Pair

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.vllm]

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("RLFLOW_VLLM_PYTHON") or str(ROOT / ".venv-vllm" / "bin" / "python")
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10], [11, 3], [9, 12, 4, 13, 5, 14]]
GREEDY = Sampling(max_new_tokens=24, temperature=0.0, stop_tokens=(1,))
KEY = SampleKey(seed=1, iteration=0, stream="gen")


def start(**more):
    options = VLLM(python=PYTHON, **{"max_total_tokens": 8192, **more})
    return options.load(str(TINY), name="gen", dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def _pair():
    if not Path(PYTHON).exists():
        pytest.skip("no environment with vLLM: make test-vllm builds it")
    model, rollout = start()
    plain = TorchRollout(load_model(str(TINY), dtype=torch.float32, device="cpu"))
    yield Pair(model, rollout, plain)
    left = model.replica._process.pid
    model.close()
    assert [] == members(left)


@pytest.fixture
def pair(_pair):
    """Both engines with the first weights, awake."""
    _pair.rollout.wake()
    if _pair.model.version or _pair.model.state != "ready":
        _pair.update(0, None)
    return _pair


def tokens(generation):
    return [row.tolist() for row in generation.response_tokens.unbind()]


def apart(real, plain):
    return float((flat(real.log_probs) - flat(plain.log_probs)).abs().max())


def same(pair, sampling=GREEDY, prompts=PROMPTS):
    """Whether both engines make the same of prompts, with log-probs as near as they have to be."""
    real, plain = pair.generate(prompts, sampling)
    ends = torch.equal(plain.finished, real.finished)
    return tokens(plain) == tokens(real) and ends and apart(real, plain) < 1e-4


@pytest.mark.parametrize("stops", [(), (1,), (8,), (7, 9)])
def test_greedy_equals_the_embedded_engine(pair, stops):
    assert same(pair, Sampling(max_new_tokens=24, temperature=0.0, stop_tokens=stops))


@pytest.mark.parametrize(
    "narrow",
    [{}, {"temperature": 0.7}, {"top_k": 3}, {"temperature": 1.3, "top_p": 0.6}],
    ids=["one", "cold", "top_k", "top_p"],
)
def test_log_probs_are_those_of_the_trainer(pair, narrow):
    """Of the whole distribution at the temperature, whatever top-k and top-p have kept."""
    sampling = Sampling(max_new_tokens=20, n=4, stop_tokens=(1,), **narrow)
    real, _ = pair.generate(PROMPTS, sampling)
    prompts = ragged_rows([row for row in PROMPTS for _ in range(4)], torch.int64)
    batch = make_batch({"prompt_tokens": prompts, "response_tokens": real.response_tokens}, 16)
    trainer = TrainEngine(pair.plain.model, None, micro_tokens=None)
    found = trainer.forward(batch, outputs=("log_probs",), temperature=sampling.temperature)
    assert 1e-4 > float((found["log_probs"] - flat(real.log_probs)).abs().max())
    assert len({tuple(row) for row in tokens(real)}) > 4


def test_the_likeliest_token_alone(pair):
    assert same(pair, Sampling(max_new_tokens=16, temperature=0.7, top_k=1))


def test_a_sample_depends_on_its_seed_alone(pair):
    sampling = Sampling(max_new_tokens=20, temperature=1.2, n=3)
    first, again, other = (
        tokens(pair.rollout.generate(ragged_rows(PROMPTS, torch.int64), sampling, key, ids))
        for key, ids in (
            (KEY, torch.arange(12)),
            (KEY, torch.arange(12)),
            (SampleKey(seed=2, iteration=0, stream="gen"), torch.arange(12)),
        )
    )
    assert first == again
    assert first != other
    alone = pair.rollout.generate(
        ragged_rows([PROMPTS[2]], torch.int64), sampling, KEY, torch.tensor([6, 7, 8])
    )
    assert first[6:9] == tokens(alone)


def test_a_part_of_the_responses(pair):
    whole, _ = pair.generate(PROMPTS, GREEDY)
    first, _ = pair.generate(PROMPTS, GREEDY, reach=Reach(until=7))
    assert [row[:7] for row in tokens(whole)] == tokens(first)
    going = [row for row, done in enumerate(first.finished.tolist()) if not done]
    longer = [PROMPTS[row] + tokens(first)[row] for row in going]
    rest, _ = pair.generate(longer, GREEDY, reach=Reach(first=7))
    assert [tokens(whole)[row][7:] for row in going] == tokens(rest)


@pytest.mark.parametrize("pieces", [2, 3])
def test_pieces_make_every_row_once_the_shortest_first(pair, pieces):
    sampling = Sampling(max_new_tokens=40, temperature=1.2, n=6, stop_tokens=(1, 8))
    prompts, ids = ragged_rows(PROMPTS, torch.int64), torch.arange(24)
    made = [
        pair.rollout.generate(prompts, sampling, KEY, ids, Reach(piece=piece, pieces=pieces))
        for piece in range(pieces)
    ]
    order = []
    for number, piece in enumerate(made):
        rows = piece.rows.tolist()
        assert ended_rows(24, number + 1, pieces) - ended_rows(24, number, pieces) == len(rows)
        order += sorted(zip(lengths(piece.response_tokens).tolist(), rows, strict=True))
    assert sorted(order) == order
    assert list(range(24)) == sorted(row for _, row in order)


def test_new_weights_reach_the_engine_and_its_cache_of_prefixes_is_emptied(pair):
    prompt = [3 + place % 40 for place in range(100)]
    sampling = Sampling(max_new_tokens=8, temperature=0.0)
    old, _ = pair.generate([prompt], sampling)
    again, _ = pair.generate([prompt], sampling)
    assert pair.rollout.stats()["cached_prompt_tokens"] > 0
    pair.update(3, seed=5)
    assert {} == pair.model.check()
    assert same(pair, sampling, [prompt])
    assert same(pair)
    fresh, _ = pair.generate([prompt], sampling)
    assert tokens(old) == tokens(again) != tokens(fresh)


def test_weights_that_differ_are_found(pair):
    pair.model.staging.tensors["model.norm.weight"][0] += 1
    assert ["model.norm.weight"] == list(pair.model.check())
    pair.model.staging.tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] += 1
    assert "model.layers.1.self_attn.qkv_proj.weight" in pair.model.check()
    pair.update(0, None)
    assert {} == pair.model.check()


@pytest.mark.parametrize("mode", ["offload", "discard"])
def test_sleep_and_wake(pair, mode):
    pair.update(2, seed=7)
    pair.rollout.sleep(mode)
    with pytest.raises(RunError, match="E506"):
        pair.generate(PROMPTS, GREEDY)
    pair.model.wake()
    if mode == "discard":
        pair.update(3, seed=8)
    with pytest.raises(RunError, match="E585"):
        pair.generate(PROMPTS, GREEDY)
    pair.model.wake_pool()
    assert same(pair)
    assert pair.model.measured()["residual_bytes"] > 0


def test_an_engine_that_sleeps_generates_nothing_for_anybody(pair):
    pair.model.replica.link().ask("sleep", {"tags": ["kv_cache"]}).result()
    with pytest.raises(RunError, match=r"E587.*generate"):
        pair.generate(PROMPTS, GREEDY)
    pair.model.replica.link().ask("wake", {"tags": ["kv_cache"]}).result()
    assert same(pair)


def test_an_abort_from_another_thread(pair):
    sampling = Sampling(max_new_tokens=120, temperature=1.0, n=64)
    made = []
    worker = threading.Thread(
        target=lambda: made.append(
            pair.rollout.generate(
                ragged_rows(PROMPTS, torch.int64), sampling, KEY, torch.arange(256)
            )
        )
    )
    before = pair.model.replica.link().moved
    worker.start()
    while pair.model.replica.link().moved == before:
        time.sleep(0.001)
    pair.rollout.abort()
    worker.join(60)
    (real,) = made
    assert not real.finished.any()
    assert 120 * 256 > int(lengths(real.response_tokens).sum())
    assert same(pair)


def test_a_row_that_fills_the_context(pair):
    prompt = [3 + place % 40 for place in range(100)]
    assert same(pair, Sampling(max_new_tokens=28, temperature=0.0), [prompt])
    with pytest.raises(RunError, match=r"E505.*\n.*100 prompt tokens \+ 29"):
        pair.generate([prompt], Sampling(max_new_tokens=29, temperature=0.0))


def test_an_engine_that_dies_is_replaced_with_the_weights_of_its_version(pair):
    pair.update(4, seed=9)
    starts = pair.model.measured()["starts"]
    guardian, *rest = members(pair.model.replica._process.pid)
    assert len(rest) > 1
    os.kill(rest[-1], 9)
    assert same(pair)
    assert starts + 1 == pair.model.measured()["starts"]
    assert [] == members(guardian)


def test_a_start_that_fails_says_what_vllm_printed():
    if not Path(PYTHON).exists():
        pytest.skip("no environment with vLLM: make test-vllm builds it")
    with pytest.raises(RunError, match=r"E580(.|\n)*no_such_argument"):
        start(args={"no_such_argument": 1})
