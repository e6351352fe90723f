from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from rlflow.batch import flat, lengths, make_batch, ragged_rows, row_index, select_rows
from rlflow.engines.hf.forward import packed
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.microbatches import cut_by_tokens
from rlflow.engines.hf.optim.norms import AT_ONCE, square_sum
from rlflow.engines.hf.optim.rates import learning_rate
from rlflow.engines.hf.train import TrainEngine
from rlflow.errors import RunError, UsageError
from tests.engines.examples import (
    Spec,
    copies,
    engine,
    gradients,
    one_step,
    plain_log_probs,
    plain_model,
    resume,
    rows,
    weighted,
    worst,
)

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("exact_softmax")]

KINDS = ("prompt", "response")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LARGE = """
import rlflow.engines, torch
kept = torch.ones(1 << 25)
pages = open("/proc/self/smaps_rollup").read().partition("AnonHugePages:")[2].split()[0]
print(int(pages) * 1024)
"""

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2"]


@pytest.mark.slow
@pytest.mark.skipif(
    not HUGE_PAGES.is_file() or "[madvise]" not in HUGE_PAGES.read_text(),
    reason="the system does not leave huge pages to programs",
)
def test_large_tensors_lie_in_huge_pages():
    """128 MB: most of them, as not every page has room beside others."""
    clean = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run(
        [sys.executable, "-c", LARGE], capture_output=True, text=True, check=True, env=clean
    )

    assert int(done.stdout) > 1 << 26


def test_logits_of_whole_rows_are_not_copied_in_the_backward(model_dir, monkeypatch):
    """Rows of 16 inputs are not filled up; an index would copy the gradient of all logits."""
    from rlflow.engines.hf import train

    made = []
    scores = train.token_scores
    monkeypatch.setattr(
        train, "token_scores", lambda logits, *rest: made.append(logits) or scores(logits, *rest)
    )
    batch = rows(prompt_sizes=(9, 9), n=1, response_sizes=(8,))
    engine(model_dir("qwen2")).compute(batch, ("log_probs",), 1.0)

    assert "Squeeze" in made[0].grad_fn.name()


@pytest.mark.rows(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tree", [True, False])
def test_gradients_equal_those_of_padded_rows(family, tree, model_dir, monkeypatch):
    if not tree:
        monkeypatch.setitem(packed.pack.__kwdefaults__ or {}, "tree_width", 0)
        monkeypatch.setattr(packed.pack, "__defaults__", (0,))
    plain = plain_model(model_dir(family))
    batch = rows()
    expected = plain_log_probs(plain, batch, 0.7)
    weighted(batch)({"log_probs": expected}, batch)[0].backward()
    ours = engine(model_dir(family))
    found = ours.forward(batch, outputs=("log_probs",), temperature=0.7)["log_probs"]
    assert torch.allclose(expected, found, rtol=1e-10, atol=1e-10)
    grads = gradients(ours, batch, temperature=0.7)
    assert worst({name: p.grad for name, p in plain.named_parameters()}, grads) < 1e-10


def test_equal_rows_of_equal_length_need_no_gather(model_dir):
    batch = rows(prompt_sizes=(4, 4), n=2, response_sizes=(8,))
    layout = packed.pack(batch["prompt_tokens"], batch["response_tokens"], torch.device("cpu"))
    assert layout.slots is None
    assert 2 * 4 + 4 * 7 == len(layout.tokens)
    plain = plain_model(model_dir("qwen2"))
    expected = plain_log_probs(plain, batch)
    weighted(batch)({"log_probs": expected}, batch)[0].backward()
    grads = gradients(engine(model_dir("qwen2")), batch)
    assert worst({name: p.grad for name, p in plain.named_parameters()}, grads) < 1e-10


@pytest.mark.parametrize("micro_tokens", [1, 12, 25, 1000])
def test_any_cut_into_micro_batches_gives_the_same(micro_tokens, model_dir):
    batch = rows()
    whole = engine(model_dir("qwen2"))
    cut = engine(model_dir("qwen2"), micro_tokens)
    kinds = ("log_probs", "entropy")
    expected = whole.forward(batch, outputs=kinds, temperature=0.8)
    found = cut.forward(batch, outputs=kinds, temperature=0.8)
    assert all(torch.allclose(expected[k], found[k], rtol=1e-12, atol=1e-12) for k in kinds)
    grads = gradients(whole, batch, kinds)
    assert worst(grads, gradients(cut, batch, kinds)) < 1e-10


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_without_memory_micro_batches_are_cut_finer_and_gradients_stay(
    where, model_dir, monkeypatch
):
    """There is room for 20 tokens: what was half added up before it ran out is not in the sum."""
    batch, room = rows(), 20
    expected = gradients(engine(model_dir("qwen2")), batch)
    cramped = engine(model_dir("qwen2"), 60)
    seen, compute, backward = [], cramped.compute, torch.Tensor.backward

    def too_large():
        if seen[-1] > room:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def computed(micro, *words):
        seen.append(int(sum(lengths(micro[f"{kind}_tokens"]).sum() for kind in KINDS)))
        if where == "forward":
            too_large()
        return compute(micro, *words)

    def backward_then_none(loss):
        backward(loss)
        too_large()

    monkeypatch.setattr(cramped, "compute", computed)
    if where == "backward":
        monkeypatch.setattr(torch.Tensor, "backward", backward_then_none)
    with pytest.warns(UserWarning, match="out of memory; micro-batches have"):
        found = gradients(cramped, batch)
    assert max(seen) > room >= seen[-1]
    assert worst(expected, found) < 1e-10
    again = engine(model_dir("qwen2"), cramped.micro_tokens)
    assert all(torch.equal(g, found[name]) for name, g in gradients(again, batch).items())


def test_a_row_that_has_no_room_is_the_error_that_it_was(model_dir, monkeypatch):
    trained = engine(model_dir("qwen2"))
    monkeypatch.setattr(trained, "compute", Mock(side_effect=torch.OutOfMemoryError("none")))
    with pytest.raises(torch.OutOfMemoryError), pytest.warns(UserWarning, match="out of memory"):
        trained.forward(rows(), outputs=("log_probs",), temperature=1.0)
    assert trained.finer_cut(rows()) is None


def test_entropy_and_its_gradient_equal_autograds(model_dir):
    from rlflow.engines.hf.forward.token_scores import TokenScores

    torch.manual_seed(0)
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([0, 6, 3, 3])
    check = torch.autograd.gradcheck
    assert check(lambda x: TokenScores.apply(x, tokens, 0.7, True), (logits,))
    scores = (logits / 0.7).log_softmax(-1)
    entropy = TokenScores.apply(logits, tokens, 0.7, True)[1]
    assert torch.allclose(-(scores.exp() * scores).sum(-1), entropy)


def test_metrics_add_up_and_maxima_do_not(model_dir):
    batch = rows()
    result = engine(model_dir("qwen2"), 20).step(
        batch, weighted(batch), outputs=("log_probs",), temperature=1.0, max_grad_norm=None
    )
    assert result.applied
    assert len(batch) == result.metrics["rows"]
    table = torch.sin(torch.arange(32, dtype=torch.float64) * 7)
    largest = float(table[flat(batch["response_tokens"])].max())
    assert pytest.approx(largest) == result.metrics["largest_max"]


def test_split_keeps_groups_together_and_within_budget():
    import numpy as np

    groups = np.array([0, 1, 0, 1, 4])
    cuts = cut_by_tokens(groups, np.full(5, 10), np.array([5, 5, 5, 5, 90]), 25)
    assert [[0, 2], [1, 3], [4]] == [cut.tolist() for cut in cuts]
    assert [] == cut_by_tokens(groups[:0], groups[:0], groups[:0], 10)


@pytest.mark.parametrize("head", ["lm", "value"])
def test_rows_without_tokens_and_batches_without_rows(head, model_dir):
    trained = engine(model_dir("qwen2"), head=head)
    output = "log_probs" if head == "lm" else "values"
    for batch in (rows(response_sizes=(0,)), select_rows(rows(), [])):
        found = trained.forward(batch, outputs=(output,), temperature=1.0)
        assert 0 == len(found[output])

        def nothing(outputs, micro, name=output):
            return outputs[name].sum(), {}

        result = trained.step(batch, nothing, outputs=(output,), temperature=1.0, max_grad_norm=1.0)
        assert 0 == result.grad_norm


def test_an_empty_prompt_is_refused(model_dir):
    batch = make_batch(
        {
            "prompt_tokens": ragged_rows([[1], []], torch.int64),
            "response_tokens": ragged_rows([[1], [2]], torch.int64),
        },
        2,
    )
    with pytest.raises(RunError, match=r"E508.*row 1"):
        engine(model_dir("qwen2")).forward(batch, outputs=("log_probs",), temperature=1.0)


def test_a_row_beyond_the_context_is_refused(model_dir):
    batch = rows(prompt_sizes=(95,), n=1, response_sizes=(9,))
    with pytest.raises(RunError, match="E505"):
        engine(model_dir("gpt2")).forward(batch, outputs=("log_probs",), temperature=1.0)


def test_values_follow_the_hidden_states(model_dir):
    trained = engine(model_dir("llama"), head="value")
    batch = rows()
    zeros = trained.forward(batch, outputs=("values",), temperature=1.0)["values"]
    assert 0 == zeros.abs().max()
    assert len(flat(batch["response_tokens"])) == len(zeros)
    with torch.no_grad():
        trained.model.module.value_head.weight.normal_()
    found = trained.forward(batch, outputs=("values",), temperature=1.0)["values"]
    body = plain_model(model_dir("llama")).model
    head = trained.model.module.value_head
    row = 3
    tokens = torch.cat([batch["prompt_tokens"][row], batch["response_tokens"][row]])
    hidden = body(input_ids=tokens[None]).last_hidden_state[0]
    size = len(batch["prompt_tokens"][row])
    mine = found[row_index(lengths(batch["response_tokens"])) == row]
    assert torch.allclose(head(hidden[size - 1 : -1])[:, 0], mine, atol=1e-10)
    with pytest.raises(RunError, match="E510"):
        trained.forward(batch, outputs=("log_probs",), temperature=1.0)


def test_values_are_learned(model_dir):
    trained = engine(model_dir("llama"), head="value", dtype=torch.float32, weight_decay=0.0)
    batch = rows()

    def loss(outputs, micro):
        return ((outputs["values"] - 1) ** 2).mean(), {}

    losses = [
        trained.step(batch, loss, outputs=("values",), temperature=1.0, max_grad_norm=1.0)
        for _ in range(15)
    ]
    assert losses[-1].metrics["loss"] < 0.2 * losses[0].metrics["loss"]


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_number_that_is_not_finite_changes_nothing(bad, model_dir):
    trained, batch = engine(model_dir("qwen2"), dtype=torch.float32), rows()
    one_step(trained, batch)
    before, meta, version = copies(trained), trained.optimizer_meta(), trained.model.version

    def loss(outputs, micro):
        total = -outputs["log_probs"].sum()
        if bad == "loss":
            return total * 0 + float("inf"), {}
        return (total - total.detach()).abs().sqrt(), {}

    result = one_step(trained, batch, loss)
    assert not result.applied
    after = copies(trained)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (meta, version) == (trained.optimizer_meta(), trained.model.version)
    assert one_step(trained, batch).applied


def test_steps_equal_those_of_torch_adamw_with_clipping(model_dir):
    trained, batch = engine(model_dir("qwen2"), lr=1e-3), rows()
    plain = plain_model(model_dir("qwen2"))
    matrices = [p for p in plain.parameters() if p.ndim >= 2]
    vectors = [p for p in plain.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(3):
        loss = -plain_log_probs(plain, batch).sum() / 50
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        adamw.step()
        adamw.zero_grad()
        result = one_step(trained, batch, max_grad_norm=0.1)
        assert pytest.approx(float(loss.detach()), rel=1e-9) == result.metrics["loss"]
        assert pytest.approx(float(norm), rel=1e-9) == result.grad_norm
    mine = trained.model.named_tensors()
    for name, expected in plain.named_parameters():
        assert torch.allclose(expected, mine[name], rtol=1e-7, atol=1e-9), name
    assert 3 == trained.model.version


def test_the_norm_of_many_numbers_is_that_of_a_wider_sum():
    """torch on one thread says 4e-4 less of ten million, 1 % less of a hundred million."""
    torch.manual_seed(0)
    for count in (0, 3, AT_ONCE, 10_000_019):
        values = torch.randn(count)
        exact = values.double().square().sum()
        assert float(square_sum(values)) == pytest.approx(float(exact), rel=1e-6)
    assert torch.float64 == square_sum(torch.ones(2, 3, dtype=torch.bfloat16)).dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_engine_continues_bit_for_bit(dtype, model_dir):
    trained, batch = engine(model_dir("qwen2"), dtype=dtype), rows()
    for _ in range(2):
        one_step(trained, batch)
    saved, meta = copies(trained), trained.optimizer_meta()
    one_step(trained, batch)
    other = engine(model_dir("qwen2"), dtype=dtype)
    weights = {name: saved[name] for name in other.model.named_tensors()}
    other.model.load_tensors(weights, 2)
    resume(other, {name: saved[name] for name in saved if name not in weights}, meta)
    one_step(other, batch)
    expected, found = copies(trained), copies(other)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert 3 == other.model.version


def test_a_sleeping_optimizer_refuses_and_wakes_whole(model_dir):
    trained, batch = engine(model_dir("qwen2"), dtype=torch.float32), rows()
    one_step(trained, batch)
    before = copies(trained)
    trained.sleep_optimizer()
    trained.model.sleep()
    with pytest.raises(RunError, match="E506"):
        one_step(trained, batch)
    trained.model.wake()
    with pytest.raises(RunError, match=r"optimizer.*asleep"):
        one_step(trained, batch)
    trained.wake_optimizer()
    after = copies(trained)
    assert all(torch.equal(before[name], after[name]) for name in before)
    twin = engine(model_dir("qwen2"), dtype=torch.float32)
    one_step(twin, batch)
    assert one_step(twin, batch) == one_step(trained, batch)
    expected, found = copies(twin), copies(trained)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_that_come_in_parts_make_the_step_of_all(dtype, model_dir):
    """With twice the loss, half the scale, and the optimizer asleep between two parts."""
    whole, parts = (engine(model_dir("qwen2"), micro_tokens=20, dtype=dtype) for _ in range(2))
    batch, asked = rows(), {"outputs": ("log_probs",), "temperature": 1.0}
    expected, total = one_step(whole, batch), 0.0

    def twice(outputs, micro):
        return -outputs["log_probs"].sum() / 25, {}

    for goes_on, chosen in enumerate(([4, 0, 7], [8, 1, 2], [3, 5, 6])):
        if goes_on:
            parts.sleep_optimizer()
            parts.wake_optimizer()
        part = select_rows(batch, torch.tensor(chosen))
        total += parts.accumulate(part, twice, **asked, goes_on=bool(goes_on))["loss"] / 2
        assert parts.model.version == 0
    found = parts.finish({"loss": total}, 1.0, 0.5)

    close = {"rel": 1e-12 if dtype == torch.float64 else 2e-2}
    assert pytest.approx(expected.grad_norm, **close) == found.grad_norm
    assert pytest.approx(expected.metrics["loss"], **close) == found.metrics["loss"]
    assert found.applied
    assert parts.model.version == 1
    bound = {"rtol": 0, "atol": 1e-8 if dtype == torch.float64 else 2e-2}
    for name, tensor in whole.model.named_tensors().items():
        torch.testing.assert_close(parts.model.named_tensors()[name], tensor, **bound)
    with pytest.raises(AssertionError, match="are gone"):
        parts.accumulate(batch, twice, **asked, goes_on=True)


def test_without_an_optimizer_there_is_no_step(model_dir):
    model = load_model(model_dir("qwen2"), dtype=torch.float32, device="cpu")
    with pytest.raises(RunError, match="E514"):
        one_step(TrainEngine(model, None, micro_tokens=None), rows())


def test_bfloat16_learns_by_steps_too_small_for_it(model_dir):
    trained = engine(model_dir("qwen2"), dtype=torch.bfloat16, lr=1e-4, weight_decay=0.0)
    batch = rows()
    results = [one_step(trained, batch) for _ in range(20)]
    assert results[-1].metrics["loss"] < results[0].metrics["loss"]


def test_learning_rates():
    spec = Spec(lr=1.0, schedule="cosine", warmup_steps=2, total_steps=6, min_lr_ratio=0.1)
    found = [learning_rate(spec, k) for k in range(8)]
    middle = 0.1 + 0.9 / 2
    assert [0.5, 1.0, 1.0] == found[:3]
    assert pytest.approx([middle, 0.1, 0.1]) == [found[4], found[6], found[7]]
    linear = Spec(lr=1.0, schedule="linear", total_steps=4)
    assert [1.0, 0.75, 0.5, 0.25, 0.0] == [learning_rate(linear, k) for k in range(5)]
    assert 1.0 == learning_rate(Spec(lr=1.0), 10**6)
    with pytest.raises(UsageError, match="E513"):
        learning_rate(Spec(schedule="linear"), 0)
    with pytest.raises(UsageError, match="'cosine'"):
        learning_rate(Spec(schedule="cosin", total_steps=5), 0)


def test_a_token_that_cannot_be_leaves_entropy_and_gradients_finite():
    """p log p is 0 at p = 0."""
    from rlflow.engines.hf.forward.token_scores import TokenScores

    logits = torch.tensor([[0.5, -torch.inf, 1.5]], dtype=torch.float64, requires_grad=True)
    found = TokenScores.apply(logits, torch.tensor([2]), 1.0, True)
    (gradient,) = torch.autograd.grad(found[0].sum() + found[1].sum(), logits)
    left = logits.detach()[:, [0, 2]].requires_grad_()
    scores = left.log_softmax(-1)
    entropy = -(scores.exp() * scores).sum()
    (expected,) = torch.autograd.grad(scores[0, 1] + entropy, left)

    assert torch.allclose(entropy, found[1])
    assert torch.allclose(expected, gradient[:, [0, 2]])
    assert 0.0 == gradient[0, 1]
