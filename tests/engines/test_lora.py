"""Low-rank adapters: what they compute, what training changes, what others get to see."""

from __future__ import annotations

import pytest
import torch

import rlflow as rf
from rlflow.batch import flat, make_batch
from rlflow.contract.values import SampleKey, Sampling
from rlflow.engines.hf import lora
from rlflow.engines.hf.forward import fused
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.engines.hf.train import TrainEngine
from rlflow.engines.hf.writing import save_model
from rlflow.errors import RunError, UsageError
from tests.engines.examples import (
    copies,
    engine,
    one_step,
    plain_log_probs,
    plain_model,
    resume,
    rows,
    trained_tensors,
    weighted,
    worst,
)

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("exact_softmax")]

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL = rf.LoRA(rank=3, alpha=6, targets=EVERY)
SOME = rf.LoRA(rank=2, alpha=5, targets=("q_proj", "v_proj", "mlp.down_proj"))


def load(path, spec=None, dtype=torch.float32, **more):
    return load_model(path, dtype=dtype, device="cpu", lora=spec, **more)


def adapted(path, spec=SOME, dtype=torch.float64, **more):
    """An engine whose adapters change something."""
    made = engine(path, dtype=dtype, options={"lora": spec}, **more)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, tensor in made.model.named_tensors().items():
            if name.endswith("lora_B"):
                tensor.normal_(std=0.1)
    return made


def scores(model, batch=None):
    trained = TrainEngine(model, None, micro_tokens=None)
    return trained.forward(
        rows() if batch is None else batch, outputs=("log_probs",), temperature=1.0
    )["log_probs"]


def generated(model, temperature=1.0):
    batch = rows()
    sampling = Sampling(max_new_tokens=6, temperature=temperature)
    key = SampleKey(seed=1, iteration=2, stream="s")
    return TorchRollout(model).generate(
        batch["prompt_tokens"], sampling, key, torch.arange(len(batch))
    )


@pytest.mark.rows(1)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_change_nothing_at_first(family, dtype, model_dir):
    plain, model = load(model_dir(family), dtype=dtype), load(model_dir(family), ALL, dtype)

    assert torch.equal(scores(plain), scores(model))
    expected, found = generated(plain), generated(model)
    assert torch.equal(expected.response_tokens.values(), found.response_tokens.values())
    assert torch.equal(expected.log_probs.values(), found.log_probs.values())


@pytest.mark.rows(3)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2"])
@pytest.mark.parametrize("spec", [ALL, SOME])
def test_gradients_equal_those_through_a_merged_weight(family, spec, model_dir):
    ours, batch = adapted(model_dir(family), spec), rows()
    tensors = {name: t.clone() for name, t in ours.model.named_tensors().items()}
    halves = {n: t.requires_grad_() for n, t in tensors.items() if lora.is_adapter(n)}
    weights = {name: t for name, t in tensors.items() if name not in halves}
    for name in [n.removesuffix(".lora_A") for n in halves if n.endswith("A")]:
        change = halves[f"{name}.lora_B"] @ halves[f"{name}.lora_A"]
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + spec.alpha / spec.rank * change
    plain = plain_model(model_dir(family))

    def merged(**inputs):
        return torch.func.functional_call(plain, weights, kwargs=inputs)

    expected = plain_log_probs(merged, batch, 0.7)
    weighted(batch)({"log_probs": expected}, batch)[0].backward()

    found = ours.forward(batch, outputs=("log_probs",), temperature=0.7)["log_probs"]
    assert torch.allclose(expected, found, rtol=1e-10, atol=1e-10)
    ours.optimizer.step = lambda scale: None
    ours.step(batch, weighted(batch), outputs=("log_probs",), temperature=0.7, max_grad_norm=None)
    grads = {n: p.grad for n, p in ours.model.module.named_parameters() if p.grad is not None}
    assert halves.keys() == grads.keys()
    assert worst({name: t.grad for name, t in halves.items()}, grads) < 1e-9


def test_training_touches_adapters_only(model_dir):
    trained, batch = engine(model_dir("qwen2"), dtype=torch.float32, options={"lora": ALL}), rows()
    before = copies(trained)
    base = scores(load(model_dir("qwen2")))

    results = [one_step(trained, batch) for _ in range(3)]

    assert results[-1].metrics["loss"] < results[0].metrics["loss"]
    names = trained.model.trained_names()
    assert 2 * 7 * 2 == len(names)
    assert all(lora.is_adapter(name) for name in names)
    after = copies(trained)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert names == changed & trained.model.named_tensors().keys()
    assert {f"{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in names} == set(
        trained.optimizer.tensors()
    )
    with trained.model.adapters_off():
        assert torch.equal(base, scores(trained.model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_engine_continues_from_adapters_alone(dtype, model_dir):
    trained, batch = adapted(model_dir("qwen2"), dtype=dtype), rows()
    one_step(trained, batch)
    weights = {name: t.clone() for name, t in trained_tensors(trained.model).items()}
    state = {name: t.clone() for name, t in trained.optimizer.tensors().items()}
    meta = trained.optimizer_meta()
    one_step(trained, batch)

    other = engine(model_dir("qwen2"), dtype=dtype, options={"lora": SOME, "seed": 9})
    other.model.load_tensors(weights, 1)
    resume(other, state, meta)
    one_step(other, batch)

    expected, found = copies(trained), copies(other)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert all(lora.is_adapter(name) for name in weights)


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_merged_weights_compute_what_adapters_do(family, model_dir, tmp_path):
    model = adapted(model_dir(family), ALL, torch.float32).model
    plain = load(model_dir(family))
    start = scores(plain)
    merged = model.merged_tensors()

    assert plain.named_tensors().keys() == merged.keys()
    plain.load_tensors(merged, 1)
    assert torch.allclose(scores(model), scores(plain), atol=1e-5)
    assert not torch.allclose(scores(model), start, atol=1e-2)
    save_model(model, str(tmp_path))
    assert torch.equal(scores(plain), scores(load(str(tmp_path))))


def test_merging_adds_in_float32(model_dir):
    model = adapted(model_dir("qwen2"), ALL, torch.bfloat16).model
    tensors, name = model.named_tensors(), "model.layers.1.mlp.up_proj"
    up, down = (tensors[f"{name}.lora_{half}"].double() for half in "BA")

    exact = tensors[f"{name}.weight"].double() + 2 * up @ down

    found = model.merged_tensors()[f"{name}.weight"]
    assert torch.bfloat16 == found.dtype
    assert float(((found - exact) / exact).abs().max()) < 2**-8


def test_generation_uses_the_adapters(model_dir):
    model = adapted(model_dir("qwen3"), ALL, torch.float32).model
    batch, found = rows(), generated(model)
    fields = {
        "prompt_tokens": batch["prompt_tokens"],
        "response_tokens": found.response_tokens,
    }

    again = scores(model, make_batch(fields, len(batch)))

    assert torch.allclose(flat(found.log_probs), again, atol=1e-5)
    with model.adapters_off():
        assert not torch.equal(flat(found.log_probs), flat(generated(model).log_probs))


def test_without_adapters_the_base_model_computes(model_dir):
    plain, model = load(model_dir("llama")), adapted(model_dir("llama"), dtype=torch.float32).model
    with_adapters = scores(model)

    def fail():
        with model.adapters_off():
            with model.adapters_off():
                pass
            assert torch.equal(scores(plain), scores(model))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(with_adapters, scores(model))
    with pytest.raises(RunError, match=r"E516.*no adapters"), plain.adapters_off():
        pass


def test_the_first_halves_are_functions_of_seed_and_name(model_dir):
    first, again, other = (load(model_dir("llama"), ALL, seed=s) for s in (4, 4, 5))
    names = [n for n in first.trained_names() if n.endswith("lora_A")]
    tensors = first.named_tensors()

    assert all(torch.equal(tensors[n], again.named_tensors()[n]) for n in names)
    drawn = torch.cat([t.named_tensors()[n].flatten() for n in names for t in (first, other)])
    assert len(drawn) == len(drawn.unique())
    name = "model.layers.0.mlp.down_proj.lora_A"
    assert torch.equal(lora.initial_down(4, name, 3, 64).float(), tensors[name])


def test_the_first_halves_are_kaiming_uniform():
    drawn = lora.initial_down(0, "some.layer.lora_A", 64, 100)
    reference = torch.nn.Linear(100, 10**4, bias=False).weight

    bound = float(reference.detach().abs().max())
    assert 0.999 * bound < float(drawn.abs().max()) <= 100**-0.5
    assert pytest.approx(100**-0.5 / 3**0.5, rel=0.02) == float(drawn.std())
    assert abs(float(drawn.mean())) < 0.002


def test_a_critic_trains_its_head_beside_the_adapters(model_dir):
    trained = engine(model_dir("llama"), head="value", dtype=torch.float32, options={"lora": SOME})
    batch = rows()

    def loss(outputs, micro):
        return ((outputs["values"] - 1) ** 2).mean(), {}

    results = [
        trained.step(batch, loss, outputs=("values",), temperature=1.0, max_grad_norm=1.0)
        for _ in range(10)
    ]

    others = {name for name in trained.model.trained_names() if not lora.is_adapter(name)}
    assert {"value_head.weight", "value_head.bias"} == others
    assert results[-1].metrics["loss"] < 0.5 * results[0].metrics["loss"]


def test_attention_keeps_its_fast_forward(model_dir):
    module = load(model_dir("qwen2"), SOME).module

    replaced = {type(m).__name__ for m in module.modules() if "forward" in vars(m)}
    assert {"Qwen2Attention", "Qwen2MLP", "AdaptedLinear", "Linear"} < replaced


def test_after_a_discard_new_adapters_are_enough(model_dir):
    model = adapted(model_dir("qwen2"), dtype=torch.float32).model
    expected = scores(model)
    weights = {name: t.clone() for name, t in trained_tensors(model).items()}

    model.sleep("discard")
    assert all(p.untyped_storage().nbytes() == 0 for p in model.module.parameters())
    model.wake()
    with pytest.raises(RunError, match="no weights"):
        scores(model)
    model.load_tensors(weights, 3)

    assert torch.equal(expected, scores(model))
    model.sleep()
    model.wake()
    assert torch.equal(expected, scores(model))


def test_half_of_the_adapters_is_not_enough(model_dir):
    model = load(model_dir("qwen2"), SOME)
    weights = dict(list(trained_tensors(model).items())[1:])

    with pytest.raises(RunError, match=r"E509.*missing.*lora"):
        model.load_tensors(weights, 1)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_porj",), r"E516.*'q_porj'(.|\n)*did you mean 'q_proj'"),
        (("proj",), r"E516.*'proj'(.|\n)*down_proj, gate_proj"),
        (("q_proj", "wide", "high"), r"'wide'(.|\n)*'high'"),
        (("lm_head",), r"E516.*shares its weight with the embeddings"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(targets, message, model_dir):
    with pytest.raises(UsageError, match=message):
        load(model_dir("qwen2"), rf.LoRA(targets=targets))


def test_a_head_of_its_own_can_be_adapted(model_dir):
    model = load(model_dir("llama"), rf.LoRA(rank=1, targets=("lm_head",)))

    assert {"lm_head.lora_A", "lm_head.lora_B"} == model.trained_names()
    assert torch.equal(scores(load(model_dir("llama"))), scores(model))


def test_the_plain_and_the_fast_forward_of_a_layer_agree(model_dir):
    model = adapted(model_dir("qwen2"), ALL).model
    layer = model.module.model.layers[1].self_attn.k_proj
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    tensors = model.merged_tensors()
    weight = tensors["model.layers.1.self_attn.k_proj.weight"]

    expected = torch.nn.functional.linear(x, weight, layer.bias)
    for forward in (lora.AdaptedLinear.forward, fused.linear_forward):
        assert torch.allclose(expected, forward(layer, x), rtol=1e-10)
    with model.adapters_off():
        base = torch.nn.functional.linear(x, layer.weight, layer.bias)
        for forward in (lora.AdaptedLinear.forward, fused.linear_forward):
            assert torch.equal(base, forward(layer, x))
