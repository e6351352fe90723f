"""Distributions by chunks of tokens: the numbers and gradients of whole logits, without them."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlflow.batch import flat
from rlflow.engines.hf.checking import checked_head, plain_outputs
from rlflow.engines.hf.forward.chunks import ChunkedScores
from rlflow.engines.hf.forward.head import logit_scale, take_head_apart
from rlflow.engines.hf.forward.shares import Projection, WantedNumbers
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.train import TrainEngine
from rlflow.errors import RunError
from rlflow.modelfiles.chunks import (
    CHUNK_BYTES,
    MOST,
    PLAIN,
    SHAPED,
    chunk_bytes,
    chunk_tokens,
    number_bytes,
)
from tests.engines import sharded_checks as checks
from tests.engines.conftest import SIZES
from tests.engines.examples import Spec, engine, gradients, one_step, plain_model, rows, worst
from tests.engines.test_sharded_math import STEADY, path_of
from tests.engines.test_vocabulary import varied, with_ids

pytestmark = pytest.mark.torch

TOKENS, SIZE, VOCABULARY = 10, 6, 13
NAMES = ("log_probs", "entropy", "squared", "at", "rest", "top", "top_ids", "top_rest")


def limit_of(tokens, vocabulary=VOCABULARY, size=8):
    """Bytes that take so many tokens at a time."""
    return tokens * vocabulary * number_bytes(size)


def problem(dtype=torch.float64, *, bias=True, tokens=TOKENS, vocabulary=VOCABULARY):
    torch.manual_seed(5)
    hidden = torch.randn(tokens, SIZE, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, SIZE, dtype=dtype, requires_grad=True)
    added = torch.randn(vocabulary, dtype=dtype, requires_grad=True) if bias else None
    chosen = torch.randint(vocabulary, (tokens,))
    ids = torch.stack([torch.randperm(vocabulary)[:3] for _ in range(tokens)])
    return hidden, weight, added, chosen, ids


def reference(hidden, weight, bias, tokens, ids, temperatures, form):
    """The same by plain operations on whole logits, with torch's own gradients."""
    raw = torch.nn.functional.linear(hidden, weight, bias) * form.scale
    logits = raw if form.cap is None else form.cap * torch.tanh(raw / form.cap)
    scores = [(logits / t).log_softmax(-1) for t in temperatures]
    first = scores[0]
    log_probs = torch.stack([s.gather(1, tokens[:, None])[:, 0] for s in scores], -1)
    entropy = torch.stack([-(s.exp() * s.clamp(min=-1e30)).sum(-1) for s in scores], -1)
    rest = first.scatter(1, ids, -math.inf).logsumexp(-1)
    top = first.topk(4, -1)
    left = first.scatter(1, top.indices, -math.inf).logsumexp(-1)
    squared = first.exp().square().sum(-1)
    made = (log_probs, entropy, squared, first.gather(1, ids), rest)
    return dict(zip(NAMES, (*made, top.values, top.indices, left), strict=True))


def chunked(hidden, weight, bias, tokens, ids, temperatures, form, limit):
    asked = WantedNumbers(
        temperatures=temperatures, limit=limit, entropy=True, squared=True, rest=True, top_k=4
    )
    made = ChunkedScores.apply(hidden, weight, bias, tokens, ids, asked, form)
    return dict(zip(NAMES, made, strict=True))


def pulled(made, inputs, names=NAMES[:5]):
    """Gradients of a sum in which every number of every output weighs differently."""
    total = 0.0
    for place, name in enumerate(names):
        values = made[name]
        weight = torch.cos(torch.arange(values.numel(), dtype=torch.float64) * (place + 2))
        total = total + (values * weight.view(values.shape).to(values.dtype)).sum()
    return torch.autograd.grad(total, [x for x in inputs if x is not None])


@pytest.mark.parametrize("count", [1, 3, 5, 100])
@pytest.mark.parametrize(
    ("temperatures", "form"),
    [
        ((1.0,), {}),
        ((0.7,), {"cap": 3.0}),
        ((1.3,), {"scale": 0.25, "cap": 2.0}),
        ((1.0, 0.5, 2.0), {}),
        ((0.5, 1.0), {"scale": 3.0, "cap": 5.0}),
    ],
)
def test_numbers_and_gradients_are_those_of_whole_logits(count, temperatures, form):
    hidden, weight, bias, tokens, ids = problem()
    form = Projection(size=VOCABULARY, **form)

    expected = reference(hidden, weight, bias, tokens, ids, temperatures, form)
    found = chunked(hidden, weight, bias, tokens, ids, temperatures, form, limit_of(count))

    for name in NAMES:
        assert torch.allclose(expected[name], found[name], atol=1e-12, rtol=1e-12), name
    inputs = (hidden, weight, bias)
    for mine, theirs in zip(pulled(found, inputs), pulled(expected, inputs), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-11, rtol=1e-11)


def test_gradients_agree_with_finite_differences():
    hidden, weight, bias, tokens, ids = problem(tokens=4)
    form = Projection(size=VOCABULARY, cap=4.0, scale=0.5)

    def numbers(*inputs):
        made = chunked(*inputs, tokens, ids, (0.7,), form, limit_of(3))
        return tuple(made[name] for name in NAMES[:5])

    assert torch.autograd.gradcheck(numbers, (hidden, weight, bias))


@pytest.mark.parametrize("name", NAMES[:5])
def test_an_output_alone_has_its_gradient(name):
    """What no loss reads has no gradient, which the backward must not look for."""
    inputs = problem()
    form = Projection(size=VOCABULARY)
    found = chunked(*inputs, (0.7,), form, limit_of(3))
    expected = reference(*inputs, (0.7,), form)

    for mine, theirs in zip(
        pulled(found, inputs[:3], (name,)), pulled(expected, inputs[:3], (name,)), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-11)


def test_a_token_that_cannot_be_has_no_part_in_the_entropy():
    hidden, weight, bias, tokens, ids = problem()
    with torch.no_grad():
        bias[4] = -math.inf
    tokens[tokens == 4] = 0
    asked = WantedNumbers(temperatures=(1.0,), limit=limit_of(3), entropy=True)
    form = Projection(size=VOCABULARY)

    made = ChunkedScores.apply(hidden, weight, bias, tokens, None, asked, form)
    grads = torch.autograd.grad(made[0].sum() + made[1].sum(), (hidden, weight))

    expected = reference(hidden, weight, bias, tokens, ids, (1.0,), form)
    assert torch.allclose(made[1], expected["entropy"], atol=1e-12)
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert not grads[1][4].any()


def test_bfloat16_agrees_to_its_precision():
    """Products are rounded to bfloat16 as whole logits are; sums over chunks are not."""
    low = problem(torch.bfloat16, tokens=64, vocabulary=48)
    exact = [x.detach().double().requires_grad_() for x in low[:3]]
    form = Projection(size=48)
    found = chunked(*low, (1.0,), form, limit_of(3, 48, 2))
    expected = reference(*exact, *low[3:], (1.0,), form)

    assert found["log_probs"].dtype == torch.float32
    for name in ("log_probs", "entropy", "squared", "at"):
        assert torch.allclose(found[name].double(), expected[name], atol=0.05), name
    names = ("log_probs", "entropy")
    pairs = zip(pulled(found, low[:3], names), pulled(expected, exact, names), strict=True)
    for mine, theirs in pairs:
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - theirs).abs().max() <= 0.02 * theirs.abs().max()


class Largest(TorchDispatchMode):
    """The numbers of the largest tensor that was made, and the most bytes alive at a time."""

    def __init__(self):
        super().__init__()
        self.numbers, self.alive, self.most = 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if tensor(t)}
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if tensor(made) and made.untyped_storage()._cdata not in before:
                self.numbers = max(self.numbers, made.numel())
                self.keep(made.untyped_storage())
        return result

    def keep(self, storage):
        size = storage.nbytes()
        self.alive += size
        self.most = max(self.most, self.alive)
        weakref.finalize(storage, self.drop, size)

    def drop(self, size):
        self.alive -= size


def tensor(value):
    return isinstance(value, torch.Tensor)


@pytest.mark.parametrize("kind", ["Qwen2", "Gemma2"])
def test_no_tensor_of_predictions_times_vocabulary_is_made(kind, tmp_path):
    """Whole logits do make one, so the count can fail."""
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "vocab_size": 4096}, head_dim=8)
    config.save_pretrained(tmp_path)
    batch = rows(n=12)
    predictions = len(flat(batch["response_tokens"]))
    made = {}
    for chunk in (None, limit_of(8, 4096)):
        trained = engine(str(tmp_path), options={"init": "random"})
        trained.chunk_bytes = chunk
        with Largest() as counted:
            found = trained.compute(batch, ("log_probs", "entropy"), 0.7)
            (found["log_probs"].sum() + found["entropy"].sum()).backward()
        made[chunk] = counted.numbers
    whole, cut = made.values()
    assert whole >= predictions * 4096 > cut


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float32, 4)])
@pytest.mark.parametrize(
    ("numbers", "temperatures", "cap"),
    [
        pytest.param(PLAIN, (0.8,), None, id="plain"),
        pytest.param(SHAPED, (0.8,), 5, id="capped"),
        pytest.param(MOST, (0.7, 1.0), None, id="temperatures"),
        pytest.param(MOST, (1.0,), None, id="everything"),
        pytest.param(MOST, (1.0,), 5, id="everything-capped"),
    ],
)
def test_a_chunk_holds_its_bytes(dtype, size, numbers, temperatures, cap):
    """What is alive at once beside inputs, outputs and gradients, which are small here.

    The search for the likeliest, and sums of exponentials, hold more within one operator.
    """
    hidden, weight, _, tokens, ids = problem(dtype, bias=False, tokens=48, vocabulary=4096)
    everything = numbers == MOST and len(temperatures) == 1
    limit = chunk_bytes(12, 4096, size, numbers)
    assert chunk_tokens(4096, size, limit, numbers) == 12
    asked = WantedNumbers(
        temperatures=temperatures, limit=limit, entropy=True, squared=everything, rest=everything
    )
    form = Projection(size=4096, cap=cap)
    beside = 4096 * SIZE * (4 + 2 * size) + 48 * 4096
    with Largest() as counted:
        ids = ids if everything else None
        made = ChunkedScores.apply(hidden, weight, None, tokens, ids, asked, form)
        sum(each.sum() for each in made if each is not None).backward()
    least = (3 if everything else numbers) / numbers * limit
    assert least <= counted.most < limit + beside


@pytest.mark.rows(1)
@pytest.mark.usefixtures("exact_softmax")
@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma2", "cohere", "granite"])
def test_an_engine_in_chunks_computes_what_it_does_at_once(family, model_dir):
    """Tied and untied heads, soft-capped and scaled logits, an empty response among the rows."""
    batch, limit = rows(), limit_of(5, 32)
    whole, cut = engine(model_dir(family), 20), engine(model_dir(family), 20)
    cut.chunk_bytes = limit
    names = ("log_probs", "entropy", "sum_pi_squared", "top_log_probs", "top_ids", "top_rest")
    hows = ({"outputs": names, "temperature": 0.7, "top_k": 3},
            {"outputs": names[:2], "temperature": (0.5, 1.0)})  # fmt: skip
    for how in hows:
        expected, found = whole.forward(batch, **how), cut.forward(batch, **how)
        for name in how["outputs"]:
            assert expected[name].shape == found[name].shape
            assert torch.allclose(expected[name], found[name], atol=1e-11), name
    kinds = ("log_probs", "entropy")
    assert worst(gradients(whole, batch, kinds, 0.7), gradients(cut, batch, kinds, 0.7)) < 1e-9


def test_log_probs_at_ids_have_the_gradients_of_whole_logits(model_dir):
    batch = with_ids(rows(), 3)
    made = []
    for chunk in (None, limit_of(5, 32)):
        trained = engine(model_dir("qwen2"), 20)
        trained.chunk_bytes = chunk
        trained.optimizer.step = lambda scale: None
        outputs = ("log_probs_at", "rest_at")
        trained.step(batch, varied, outputs=outputs, temperature=0.7, max_grad_norm=None)
        made.append({n: p.grad.clone() for n, p in trained.model.module.named_parameters()})
    assert worst(*made) < 1e-9


def test_what_is_beyond_the_vocabulary_is_refused_in_chunks_too(model_dir):
    trained = engine(model_dir("qwen2"))
    trained.chunk_bytes = 1
    with pytest.raises(RunError, match="E635"):
        trained.forward(rows(), outputs=("top_ids",), temperature=1.0, top_k=33)


def test_a_cpu_takes_whole_logits_unless_told(model_dir):
    model = load_model(model_dir("qwen2"), dtype=torch.float32, device="cpu")

    assert TrainEngine(model, None, micro_tokens=None).chunk_bytes is None
    model.module.to("meta")
    assert TrainEngine(model, None, micro_tokens=None).chunk_bytes == CHUNK_BYTES


def test_an_adapter_on_the_head_leaves_it_whole(model_dir):
    import rlflow as rf

    lora = rf.LoRA(rank=3, alpha=6, targets=("lm_head",))
    options = {"lora": lora}
    trained = engine(model_dir("llama"), options=options)
    trained.chunk_bytes = 1

    assert trained.model.predictor is None
    assert one_step(trained, rows()).applied


def test_a_head_that_computes_something_else_is_not_taken(model_dir, monkeypatch):
    """Nobody said how its logits are scaled: the check of a loaded model finds that."""
    path = model_dir("granite")
    model = load_model(path, dtype=torch.float64, device="cpu")
    plain = plain_outputs(plain_model(path), model.config, "lm")
    assert logit_scale(model.config) == 0.25
    assert checked_head(model, plain, model.predictor, always=True) is model.predictor

    monkeypatch.setattr("rlflow.engines.hf.forward.head.DIVISORS", {})
    other = take_head_apart(model.module, model.config)
    assert checked_head(model, plain, other, always=True) is None


@pytest.mark.slow
@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("shape", "family"),
    [
        pytest.param((1, 1, 2), "qwen2", id="tp2-tied"),
        pytest.param((1, 1, 2), "tiny", id="tp2-uneven-vocabulary"),
        pytest.param((1, 2, 1), "llama", id="fsdp2"),
    ],
)
def test_ranks_that_share_a_head_compute_what_one_does(shape, family, world, model_dir):
    options = {"chunk_bytes": limit_of(3, 32), "micro_tokens": 20}
    path = path_of(family, model_dir)
    assert all(world(2).run(checks.with_options, path, shape, options))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 1, 2), (1, 2, 2)])
def test_ranks_agree_in_bfloat16_to_its_precision(shape, world, model_dir):
    """Weights whole in bfloat16 for a pass, float32 masters; the head's part on each rank."""
    options = {
        "dtype": "bfloat16", "limit": 0.1, "spec": STEADY, "micro_tokens": 20,
        "chunk_bytes": limit_of(3, 32, 2),
    }  # fmt: skip
    ranks = shape[1] * shape[2]
    assert all(world(ranks).run(checks.with_options, model_dir("qwen2"), shape, options))


def everything(rank, path, shape):
    """Numbers beside log-probs on the ranks of a mesh, whose head is cut, against one rank."""
    one, sharded = checks.pair(path, shape, chunk_bytes=limit_of(3, 32), spec=Spec())
    whole = TrainEngine(one.model, None, micro_tokens=None)
    batch = with_ids(rows(), 3)
    names = ("sum_pi_squared", "top_log_probs", "top_ids", "top_rest", "log_probs_at", "rest_at")
    how = {"outputs": names, "temperature": 0.7, "top_k": 4}
    expected, found = whole.forward(batch, **how), sharded.forward(batch, **how)
    for name in names:
        assert torch.allclose(expected[name], found[name], atol=1e-10), name
    made = []
    for each in (one, sharded):
        caught = {}
        real = each.optimizer.step
        each.optimizer.step = lambda scale, each=each, caught=caught: caught.update(
            checks.held(each)
        )
        each.step(batch, varied, outputs=names[-2:], temperature=0.7, max_grad_norm=None)
        each.optimizer.step = real
        made.append(caught)
    return not checks.differ(*made, sharded.model.shards(), 1e-9)


@pytest.mark.slow
def test_ranks_that_share_a_head_agree_on_all_other_numbers(world, model_dir):
    assert all(world(2).run(everything, model_dir("qwen2"), (1, 1, 2)))
