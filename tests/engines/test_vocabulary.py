"""Sums over the vocabulary, likeliest tokens and log-probs at ids, against plain logits."""

from __future__ import annotations

import math

import pytest
import torch

from rlflow.batch import (
    column_index,
    concat_rows,
    flat,
    lengths,
    make_batch,
    pad,
    ragged_like,
    row_index,
    select_rows,
    unpad,
)
from rlflow.engines.hf.forward import vocabulary
from rlflow.engines.hf.forward.vocabulary import Chosen, distributions, likeliest, sum_pi_squared
from rlflow.engines.hf.microbatches import flat_places
from rlflow.errors import RunError
from rlflow.runtime.ray.packing import packed_rows, unpacked_rows
from tests.engines import sharded_checks as checks
from tests.engines.examples import Spec, engine, plain_model, rows, worst

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("exact_softmax")]

TOP = ("top_log_probs", "top_ids", "top_rest")
VOCABULARY = 32


def with_ids(batch, k):
    """The batch with k distinct ids a token, which depend on the token and its place alone."""
    tokens = batch["response_tokens"]
    rng = torch.Generator().manual_seed(3)
    table = torch.stack([torch.randperm(VOCABULARY, generator=rng)[:k] for _ in range(64)])
    ids = table[(flat(tokens) * 7 + column_index(lengths(tokens))) % 64]
    fields = {name: batch[name] for name in batch.keys()}  # noqa: SIM118  a TensorDict
    return make_batch({**fields, "top_ids": ragged_like(ids, tokens)}, len(batch))


def plain_scores(module, batch, temperature):
    """Log-softmaxes of every response token, `[total, vocabulary]`, by transformers alone."""
    found = []
    for prompt, response in zip(
        batch["prompt_tokens"].unbind(), batch["response_tokens"].unbind(), strict=True
    ):
        if len(response):
            logits = module(input_ids=torch.cat([prompt, response])[None]).logits[0]
            found.append(logits[len(prompt) - 1 : -1] / temperature)
    return torch.cat(found).log_softmax(-1)


def test_a_forward_gives_what_plain_logits_say(model_dir):
    batch, path = rows(), model_dir("qwen2")
    scores = plain_scores(plain_model(path), batch, 0.7)
    names = ("log_probs", "sum_pi_squared", *TOP)
    found = engine(path, 20).forward(batch, outputs=names, temperature=0.7, top_k=5)

    top, ids = scores.topk(5, -1)
    assert torch.equal(ids, found["top_ids"])
    assert torch.allclose(top, found["top_log_probs"], atol=1e-12)
    assert torch.allclose((1 - top.exp().sum(-1)).log(), found["top_rest"], atol=1e-9)
    assert torch.allclose(scores.exp().square().sum(-1), found["sum_pi_squared"], atol=1e-12)
    own = scores.gather(1, flat(batch["response_tokens"])[:, None])[:, 0]
    assert torch.allclose(own, found["log_probs"], atol=1e-12)


def varied(outputs, micro):
    """A loss of log-probs at ids, and of the rest, that no cut of the batch changes."""
    at, rest = outputs["log_probs_at"], outputs["rest_at"]
    weight = torch.sin(flat(micro["top_ids"]).double() * 5 + torch.arange(at.shape[1]))
    return (weight * at).sum() + (at.exp() * at).sum() + rest.cos().sum(), {}


@pytest.mark.parametrize("micro_tokens", [None, 20])
def test_gradients_at_ids_are_autograds(micro_tokens, model_dir):
    batch, path = with_ids(rows(), 4), model_dir("qwen2")
    plain = plain_model(path)
    scores = plain_scores(plain, batch, 0.8)
    ids = flat(batch["top_ids"])
    others = torch.ones_like(scores, dtype=torch.bool).scatter(1, ids, value=False)
    expected = {
        "log_probs_at": scores.gather(1, ids),
        "rest_at": scores.masked_fill(~others, -math.inf).logsumexp(-1),
    }
    varied(expected, batch)[0].backward()

    trained = engine(path, micro_tokens)
    trained.optimizer.step = lambda scale: None
    kinds = ("log_probs_at", "rest_at")
    trained.step(batch, varied, outputs=kinds, temperature=0.8, max_grad_norm=None)
    found = {name: p.grad.clone() for name, p in trained.model.module.named_parameters()}
    assert worst({name: p.grad for name, p in plain.named_parameters()}, found) < 1e-10


@pytest.mark.parametrize("at_once", [1, 20, 1 << 24])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_chunks_of_any_size_have_the_same_values_and_gradients(k, at_once, monkeypatch):
    monkeypatch.setattr(vocabulary, "AT_ONCE", at_once)
    torch.manual_seed(0)
    logits = (3 * torch.randn(5, 7, dtype=torch.float64)).requires_grad_()
    scores = (logits.detach() / 0.7).log_softmax(-1)
    ids = scores.topk(k, largest=False).indices
    others = torch.ones_like(scores, dtype=torch.bool).scatter(1, ids, value=False)

    at, rest = Chosen.apply(logits, ids, 0.7, True)
    assert torch.allclose(scores.gather(1, ids), at)
    assert torch.allclose((scores.exp() * others).sum(-1).log(), rest)
    assert torch.allclose(scores.exp().square().sum(-1), sum_pi_squared(logits, 0.7))
    check = torch.autograd.gradcheck
    finite = (lambda x: Chosen.apply(x, ids, 0.7, True)) if k < 7 else None
    assert finite is None or check(finite, (logits,))
    assert check(lambda x: Chosen.apply(x, ids, 0.7, False)[0], (logits,))
    assert check(lambda x: sum_pi_squared(x, 0.7), (logits,))
    for found, expected in zip(likeliest(logits, 0.7, k), (*scores.topk(k, -1),), strict=False):
        assert torch.allclose(expected, found)


def test_a_rest_of_nothing_has_no_gradient_and_a_small_one_keeps_its_digits():
    logits = torch.tensor([[0.0, 0.0, -40.0]], requires_grad=True)
    everything = torch.tensor([[2, 0, 1]])
    at, rest = Chosen.apply(logits, everything, 1.0, True)
    assert -math.inf == float(rest.detach())
    (at.sum() + rest.clamp(min=-1e30).sum()).backward()
    assert logits.grad.isfinite().all()

    rest = Chosen.apply(logits, everything[:, 1:], 1.0, True)[1]
    assert -40 - math.log(2) == pytest.approx(float(rest.detach()), abs=1e-5)
    logits.grad = None
    rest.sum().backward()
    assert torch.allclose(torch.tensor([[-0.5, -0.5, 1.0]]), logits.grad)


def test_low_precision_is_summed_in_float32():
    logits = torch.randn(3, 9).bfloat16()
    found = distributions(
        logits, ("sum_pi_squared", *TOP, "log_probs_at"), 1.0, 2, torch.zeros(3, 1).long()
    )
    wide = logits.float().log_softmax(-1)
    assert torch.equal(wide.topk(2).indices, found["top_ids"])
    assert torch.allclose(wide.exp().square().sum(-1), found["sum_pi_squared"])
    assert torch.allclose(wide[:, :1], found["log_probs_at"])


@pytest.mark.parametrize(
    ("k", "ids", "code"), [(33, None, "E635"), (0, None, "E635"), (2, 32, "E636"), (2, -1, "E636")]
)
def test_beyond_the_vocabulary(k, ids, code, model_dir):
    batch = rows()
    trained = engine(model_dir("qwen2"))
    outputs = TOP
    if ids is not None:
        outputs = ("log_probs_at",)
        batch = with_ids(batch, 2)
        flat(batch["top_ids"])[3, 1] = ids
    with pytest.raises(RunError) as caught:
        trained.forward(batch, outputs=outputs, temperature=1.0, top_k=k)
    assert code == caught.value.findings[0].code


def test_rows_without_tokens(model_dir):
    batch = with_ids(rows(response_sizes=(0,)), 3)
    names = ("sum_pi_squared", *TOP, "log_probs_at", "rest_at")
    found = engine(model_dir("qwen2")).forward(batch, outputs=names, temperature=1.0, top_k=4)
    widths = {"top_log_probs": (4,), "top_ids": (4,), "log_probs_at": (3,)}
    assert {name: (0, *widths.get(name, ())) for name in names} == {
        name: tuple(values.shape) for name, values in found.items()
    }
    assert torch.int64 == found["top_ids"].dtype


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("shape", "family", "options"),
    [
        pytest.param((1, 1, 2), "qwen2", {}, id="tp2-tied"),
        pytest.param((1, 2, 1), "llama", {"uneven": True, "micro_tokens": 20}, id="fsdp2"),
    ],
)
def test_ranks_compute_what_one_does(shape, family, options, world, model_dir):
    assert all(world(2).run(check_ranks, model_dir(family), shape, options))


def check_ranks(rank, path, shape, options):
    """Outputs without gradient, and gradients at ids, are those of one rank."""
    uneven = options.pop("uneven", False)
    one, sharded = checks.pair(path, shape, spec=Spec(eps=1e-3), **options)
    batch = with_ids(rows(n=4), 5)
    chosen = checks.own_rows(sharded, len(batch), uneven)
    mine = select_rows(batch, chosen)
    places = flat_places(lengths(batch["response_tokens"]), torch.tensor(chosen, dtype=torch.int64))
    names = ("sum_pi_squared", *TOP, "log_probs_at", "rest_at")
    asked = {"outputs": names, "temperature": 0.8, "top_k": 6}
    expected, found = one.forward(batch, **asked), sharded.forward(mine, **asked)
    for name in names:
        assert torch.allclose(expected[name][places], found[name], atol=1e-9), name
    for engine_, part in ((one, batch), (sharded, mine)):
        engine_.step(part, varied, outputs=names[-2:], temperature=0.8, max_grad_norm=None)
    wrong = checks.differ(
        one.model.named_tensors(), sharded.model.named_tensors(), sharded.model.shards(), 1e-9
    )
    assert not wrong, wrong
    return True


def test_ragged_fields_keep_the_width_of_a_token():
    batch = with_ids(rows(), 3)
    sizes = lengths(batch["top_ids"])
    padded = pad(flat(batch["top_ids"]), sizes)
    assert (len(batch), int(sizes.max()), 3) == padded.shape
    assert torch.equal(flat(batch["top_ids"]), unpad(padded, sizes))
    assert torch.equal(padded[row_index(sizes), column_index(sizes)], flat(batch["top_ids"]))
    back = concat_rows([select_rows(batch, [4, 2]), select_rows(batch, [0])])
    assert torch.equal(
        torch.cat([batch["top_ids"].unbind()[row] for row in (4, 2, 0)]), flat(back["top_ids"])
    )
    sent = unpacked_rows(packed_rows({"top_ids": batch["top_ids"]}, None))
    assert torch.equal(flat(batch["top_ids"]), flat(sent["top_ids"]))
