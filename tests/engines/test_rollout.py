from __future__ import annotations

import threading

import pytest
import torch

from rlflow.batch import flat, lengths, make_batch, ragged_rows
from rlflow.contract.values import SampleKey, Sampling
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.engines.hf.train import TrainEngine
from rlflow.errors import RunError

pytestmark = pytest.mark.torch

KEY = SampleKey(seed=1, iteration=2, stream="rollout")
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2"]


def load(path, dtype=torch.float32):
    return load_model(path, dtype=dtype, device="cpu")


def generate(model, prompts, sampling, ids=None, key=KEY):
    rows = len(prompts) * sampling.n
    ids = torch.arange(rows) if ids is None else torch.tensor(ids)
    return TorchRollout(model).generate(ragged_rows(prompts, torch.int64), sampling, key, ids)


def tokens(generation):
    return [row.tolist() for row in generation.response_tokens.unbind()]


@pytest.mark.rows(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_the_models_own(family, model_dir):
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model_dir(family), dtype=torch.float64).eval()
    sampling = Sampling(max_new_tokens=20, temperature=0.0)
    found = tokens(generate(load(model_dir(family), torch.float64), PROMPTS, sampling))
    for prompt, row in zip(PROMPTS, found, strict=True):
        seen = list(prompt)
        with torch.no_grad():
            for _ in range(20):
                logits = plain(input_ids=torch.tensor([seen]), use_cache=False).logits
                seen.append(int(logits[0, -1].argmax()))
        assert seen[len(prompt) :] == row


@pytest.mark.rows(3)
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gptoss", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_those_of_the_forward(family, temperature, model_dir):
    model = load(model_dir(family))
    sampling = Sampling(
        max_new_tokens=15, n=4, temperature=temperature, stop_tokens=tuple(range(8))
    )
    made = generate(model, PROMPTS, sampling)
    prompts = ragged_rows([p for p in PROMPTS for _ in range(4)], torch.int64)
    batch = make_batch({"prompt_tokens": prompts, "response_tokens": made.response_tokens}, 12)
    engine = TrainEngine(model, None, micro_tokens=None)
    again = engine.forward(batch, outputs=("log_probs",), temperature=temperature)["log_probs"]
    assert torch.float32 == flat(made.log_probs).dtype
    assert torch.allclose(again, flat(made.log_probs), atol=1e-5)
    assert len(set(lengths(made.response_tokens).tolist())) > 1


def test_tokens_depend_on_the_sample_alone(model_dir):
    model = load(model_dir("qwen2"))
    sampling = Sampling(max_new_tokens=24, n=4, stop_tokens=(0,))
    whole = tokens(generate(model, PROMPTS, sampling))
    assert len({tuple(row) for row in whole}) == 12
    backwards = tokens(
        generate(model, PROMPTS[::-1], sampling, [8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3])
    )
    assert whole[8:] + whole[4:8] + whole[:4] == backwards
    alone = Sampling(max_new_tokens=24, n=1, stop_tokens=(0,))
    assert whole[5] == tokens(generate(model, PROMPTS[1:2], alone, [5]))[0]
    assert whole[3:5] == tokens(generate(model, PROMPTS[:2], alone, [3, 4]))
    shorter = Sampling(max_new_tokens=6, n=4, stop_tokens=(0,))
    assert [row[:6] for row in whole] == tokens(generate(model, PROMPTS, shorter))


def test_the_same_call_gives_the_same_bits_in_any_thread(model_dir):
    model, other = load(model_dir("qwen2")), load(model_dir("llama"))
    sampling = Sampling(max_new_tokens=24, n=4, stop_tokens=(0,))
    expected = {m.name: generate(m, PROMPTS, sampling) for m in (model, other)}
    found = []

    def work(m):
        for _ in range(3):
            made = generate(m, PROMPTS, sampling)
            same = torch.equal(flat(expected[m.name].log_probs), flat(made.log_probs))
            found.append(same and tokens(expected[m.name]) == tokens(made))

    threads = [threading.Thread(target=work, args=(m,)) for m in (model, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [True] * 6 == found


def test_rows_end_at_a_stop_token_which_they_keep(model_dir):
    model = load(model_dir("llama"))
    made = generate(model, PROMPTS, Sampling(max_new_tokens=30, n=8, stop_tokens=(2, 11)))
    ended = 0
    for row, finished in zip(tokens(made), made.finished.tolist(), strict=True):
        assert finished == (row[-1] in {2, 11})
        assert not {2, 11} & set(row[:-1])
        assert finished or len(row) == 30
        ended += finished
    assert 0 < ended
    free = tokens(generate(model, PROMPTS, Sampling(max_new_tokens=30, n=8)))
    for row, longer in zip(tokens(made), free, strict=True):
        assert longer[: len(row)] == row


def test_more_tokens_than_the_first_columns(model_dir):
    model = load(model_dir("qwen2"))
    made = generate(model, [[1, 2, 3], [4]], Sampling(max_new_tokens=80, n=2))
    assert [80] * 4 == lengths(made.response_tokens).tolist()
    assert not made.finished.any()
    prompts = ragged_rows([[1, 2, 3]] * 2 + [[4]] * 2, torch.int64)
    batch = make_batch({"prompt_tokens": prompts, "response_tokens": made.response_tokens}, 4)
    engine = TrainEngine(model, None, micro_tokens=None)
    again = engine.forward(batch, outputs=("log_probs",), temperature=1.0)["log_probs"]
    assert torch.allclose(again, flat(made.log_probs), atol=1e-5)


def test_no_prompts_give_no_rows(model_dir):
    made = generate(load(model_dir("qwen2")), [], Sampling(max_new_tokens=5, n=2))
    assert [] == tokens(made)


def test_a_prompt_without_room_is_named(model_dir):
    with pytest.raises(RunError, match="prompt 1 is too long") as caught:
        generate(load(model_dir("qwen2")), [[1], [2] * 90], Sampling(max_new_tokens=10))
    assert "90 prompt tokens + 10 new tokens" in str(caught.value)
    assert "max_new_tokens=6" in str(caught.value)


def test_an_abort_leaves_rows_unfinished(model_dir):
    engine = TorchRollout(load(model_dir("qwen2")))
    forward = engine.model.logits
    passes = []

    def counted(*args):
        passes.append(1)
        if len(passes) == 4:
            engine.abort()
        return forward(*args)

    engine.model.logits = counted
    prompts = ragged_rows(PROMPTS, torch.int64)
    made = engine.generate(prompts, Sampling(max_new_tokens=50), KEY, torch.arange(3))
    assert [4] * 3 == lengths(made.response_tokens).tolist()
    assert not made.finished.any()
    assert 12 == engine.stats()["new_tokens"]


def test_new_weights_change_the_tokens(model_dir):
    engine = TorchRollout(load(model_dir("qwen2")))
    sampling = Sampling(max_new_tokens=10)
    before = tokens(generate(engine.model, PROMPTS, sampling))
    changed = {name: t + 0.5 for name, t in engine.model.named_tensors().items()}
    engine.update_weights(changed, 7)
    assert before != tokens(generate(engine.model, PROMPTS, sampling))
    assert 7 == engine.model.version


def test_bfloat16_generates(model_dir):
    made = generate(load(model_dir("qwen2"), torch.bfloat16), PROMPTS, Sampling(max_new_tokens=5))
    assert [5] * 3 == lengths(made.response_tokens).tolist()
    assert torch.isfinite(flat(made.log_probs)).all()
