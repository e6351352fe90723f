"""Part A: what a device computes is what float64 on the CPU does; every way of training steps.

The bounds are those of the dtype: matrix products of float32 without TF32, of bfloat16 with sums in
float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlflow.batch import flat, lengths, make_batch, ragged_rows
from rlflow.contract.values import SampleKey, Sampling
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.engines.hf.train import TrainEngine
from rlflow.graph.model import LoRA
from tests.engines.examples import Spec
from tests.gpu.conftest import HALF_BILLION, TINY

pytestmark = [pytest.mark.torch]

BOUNDS = {torch.float32: 2e-4, torch.bfloat16: 6e-2}
OUTPUTS = ("log_probs", "entropy")


def batch_of(vocabulary: int, *, groups: int, n: int, prompt: int, response: int) -> Any:
    """Groups of `n` rows of one prompt; responses of all lengths up to `response`."""
    made = torch.Generator().manual_seed(1)
    prompts, responses = [], []
    for group in range(groups):
        tokens = torch.randint(vocabulary, (prompt + group,), generator=made).tolist()
        for row in range(n):
            size = max(1, response - (group * n + row) * 3 % response)
            prompts.append(tokens)
            responses.append(torch.randint(vocabulary, (size,), generator=made).tolist())
    fields = {
        "prompt_tokens": ragged_rows(prompts, torch.int64),
        "response_tokens": ragged_rows(responses, torch.int64),
    }
    return make_batch(fields, len(prompts))


def weighted(outputs: Any, micro: Any) -> Any:
    """A loss that reads every output at every token, however rows are cut."""
    tokens = flat(micro["response_tokens"]).to(outputs["log_probs"].device)
    weight = torch.sin(7 * tokens.to(outputs["log_probs"].dtype))
    return sum((values * weight).sum() for values in outputs.values()) / 64, {}


def gradients(engine: Any, batch: Any) -> dict[str, Any]:
    """What a step would use, by name, float64 on the CPU."""
    engine.optimizer.step = lambda scale: None
    engine.step(batch, weighted, outputs=OUTPUTS, temperature=0.8, max_grad_norm=None)
    state = engine.optimizer
    found = {
        name: state.flat.view(name, state.sums[slot.dtype])
        for name, slot in state.flat.slots.items()
    }
    return {name: gradient.double().cpu() for name, gradient in found.items()}


def apart(expected: Any, found: Any) -> float:
    """The norm of the difference as a part of the norm."""
    return float((expected - found).norm() / expected.norm())


@pytest.fixture(scope="module")
def exact(model_of: Any) -> Any:
    """A tiny model in float64 on the CPU: outputs and gradients that the others are near."""
    batch = batch_of(TINY.vocabulary, groups=3, n=3, prompt=9, response=14)
    path = model_of(TINY, weights=True)
    engine = TrainEngine(
        load_model(path, dtype=torch.float64, device="cpu"), Spec(), micro_tokens=None
    )
    outputs = engine.forward(batch, outputs=OUTPUTS, temperature=0.8)
    return path, batch, outputs, gradients(engine, batch)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"recompute": True},
    "selective": {"recompute": "selective"},
    "hosted": {"hosts_activations": True},
    "adapters": {"lora": LoRA(targets=("q_proj", "v_proj"), rank=4)},
}
# Compiling takes a CPU the better part of a minute. Where a graph begins anew, torch looks at what
# it got from the one before.
IN_GRAPHS = (
    pytest.mark.slow,
    pytest.mark.extra,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
)
COMPILED = pytest.param({"compiled": True}, id="compiled", marks=IN_GRAPHS)
SPECS = {
    "adamw": Spec(lr=1e-3),
    "bfloat16": Spec(lr=1e-3, moments="bfloat16"),
    "int8": Spec(lr=1e-3, moments="int8"),
    "muon": Spec(lr=1e-3, momentum=0.95),
}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("micro_tokens", [None, 40])
def test_outputs_and_gradients_are_those_of_float64(
    exact: Any, device: Any, dtype: Any, micro_tokens: int | None
) -> None:
    path, batch, outputs, expected = exact
    model = load_model(path, dtype=dtype, device=device)
    engine = TrainEngine(model, Spec(), micro_tokens=micro_tokens)
    found = engine.forward(batch, outputs=OUTPUTS, temperature=0.8)
    for name in OUTPUTS:
        assert apart(outputs[name], found[name].double()) < BOUNDS[dtype], name
    grads = gradients(engine, batch)
    assert {*expected} == {*grads}
    whole = torch.cat([expected[name].flatten() for name in sorted(expected)])
    mine = torch.cat([grads[name].flatten() for name in sorted(expected)])
    assert apart(whole, mine) < BOUNDS[dtype]


def losses(engine: Any, batch: Any) -> list[float]:
    """Of six steps on the same rows, supervised."""

    def loss(outputs: Any, micro: Any) -> Any:
        return -outputs["log_probs"].sum() / 48, {}

    made = [
        engine.step(batch, loss, outputs=("log_probs",), temperature=1.0, max_grad_norm=1.0)
        for _ in range(6)
    ]
    assert all(value.applied for value in made)
    return [value.metrics["loss"] for value in made]


@pytest.mark.rows(4)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("way", [*(pytest.param(WAYS[way], id=way) for way in WAYS), COMPILED])
def test_steps_bring_the_loss_down(
    model_of: Any, device: Any, big: bool, dtype: Any, way: dict[str, Any]
) -> None:
    """The likelihood of what is shown rises, step after step."""
    size = HALF_BILLION if big else TINY
    batch = batch_of(size.vocabulary, groups=2, n=2, prompt=8, response=12)
    model = load_model(model_of(size), dtype=dtype, device=device, init="random", seed=3, **way)
    first, *_, last = losses(
        TrainEngine(model, Spec(lr=1e-3 if big else 1e-2), micro_tokens=64), batch
    )
    assert last < first


@pytest.mark.parametrize("spec", SPECS)
def test_every_optimizer_brings_the_loss_down(
    model_of: Any, device: Any, big: bool, spec: str
) -> None:
    """On a GPU the codes of int8 and Muon's products are other kernels than on a CPU."""
    size = HALF_BILLION if big else TINY
    batch = batch_of(size.vocabulary, groups=2, n=2, prompt=8, response=12)
    model = load_model(model_of(size), dtype=torch.bfloat16, device=device, init="random", seed=3)
    first, *_, last = losses(TrainEngine(model, SPECS[spec], micro_tokens=64), batch)
    assert last < first


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(WAYS["recomputed"], id="recomputed"),
        pytest.param(WAYS["selective"], id="selective"),
        pytest.param(WAYS["hosted"], id="hosted"),
        pytest.param(WAYS["hosted"] | WAYS["recomputed"], id="hosted-recomputed"),
        COMPILED,
    ],
)
def test_gradients_do_not_depend_on_what_a_backward_finds(
    exact: Any, device: Any, way: dict[str, Any]
) -> None:
    """Recomputed, brought back from the host, or compiled: those of float64 up to float32."""
    path, batch, _, expected = exact
    model = load_model(path, dtype=torch.float32, device=device, **way)
    found = gradients(TrainEngine(model, Spec(), micro_tokens=40), batch)
    assert {*expected} == {*found}
    names = sorted(expected)
    whole, mine = (torch.cat([of[name].flatten() for name in names]) for of in (expected, found))
    assert apart(whole, mine) < BOUNDS[torch.float32]


def test_layers_on_the_host_compute_the_same(model_of: Any, device: Any, big: bool) -> None:
    size = HALF_BILLION if big else TINY
    batch = batch_of(size.vocabulary, groups=2, n=2, prompt=8, response=12)
    found = []
    for more in ({}, {"offload": "layers"}):
        model = load_model(
            model_of(size), dtype=torch.bfloat16, device=device, init="random", seed=3, **more
        )
        engine = TrainEngine(model, None, micro_tokens=None)
        found.append(engine.forward(batch, outputs=("log_probs",), temperature=1.0)["log_probs"])
    assert torch.equal(*found)


def test_greedy_tokens_are_the_likeliest_of_whole_forwards(exact: Any, device: Any) -> None:
    """What decoding on a cache chose, a forward over whole rows finds likeliest, up to ties."""
    path, batch, _, _ = exact
    model = load_model(path, dtype=torch.float32, device=device)
    prompts = batch["prompt_tokens"].unbind()[::3]
    drawn = TorchRollout(model).generate(
        ragged_rows([p.tolist() for p in prompts], torch.int64),
        Sampling(max_new_tokens=12, temperature=0.0, n=1),
        SampleKey(seed=0, iteration=0, stream="rollout"),
        torch.arange(len(prompts)),
    )
    fields = {
        "prompt_tokens": ragged_rows([p.tolist() for p in prompts], torch.int64),
        "response_tokens": drawn.response_tokens,
    }
    engine = TrainEngine(model, None, micro_tokens=None)
    scores = engine.forward(
        make_batch(fields, len(prompts)),
        outputs=("log_probs", "top_log_probs", "top_ids"),
        temperature=1.0,
        top_k=1,
    )
    assert 12 * len(prompts) == int(lengths(drawn.response_tokens).sum())
    short = scores["top_log_probs"][:, 0] - scores["log_probs"]
    assert float(short.max()) < 1e-3


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_sleep_and_a_wake_keep_every_bit(model_of: Any, device: Any, dtype: Any) -> None:
    batch = batch_of(TINY.vocabulary, groups=2, n=2, prompt=8, response=12)
    model = load_model(model_of(TINY), dtype=dtype, device=device, init="random", seed=3)
    engine = TrainEngine(model, Spec(), micro_tokens=None)
    engine.step(batch, weighted, outputs=OUTPUTS, temperature=0.8, max_grad_norm=None)
    held = {**model.named_tensors(), **engine.optimizer.tensors()}
    before = {name: tensor.clone() for name, tensor in held.items()}
    engine.sleep_optimizer()
    model.sleep("offload")
    model.wake()
    engine.wake_optimizer()
    after = {**model.named_tensors(), **engine.optimizer.tensors()}
    assert {*before} == {*after}
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_flat_buffer_beyond_32_bits(gpu: Any) -> None:
    """One buffer of more than 2^31 numbers: views, copies to the host and back, and a step."""
    from rlflow.engines.hf.flat import FlatParameters, free, restore, to_host

    module = torch.nn.Module()
    rows = 2**16
    for name in ("low", "high"):
        weight = torch.nn.Parameter(torch.zeros(rows, 2**14 + 16, dtype=torch.bfloat16, device=gpu))
        module.register_parameter(name, weight)
    flat_parameters = FlatParameters(module, frozenset({"low", "high"}))
    (buffer,) = flat_parameters.buffers.values()
    assert buffer.numel() > 2**31
    module.high.data[-1, -1] = 3.0
    kept = to_host([buffer])
    free([buffer])
    restore([buffer], kept)
    assert 3.0 == float(module.high[-1, -1])
    assert 0.0 == float(module.low.sum())


def test_micro_batches_wait_for_nothing(model_of: Any, gpu: Any) -> None:
    """From the second on; rows come by a stream of their own, packed by a thread beside."""
    model = load_model(model_of(TINY), dtype=torch.bfloat16, device=gpu, init="random", seed=3)
    engine = TrainEngine(model, None, micro_tokens=64)
    assert engine.packing.stream is not None
    batch = batch_of(TINY.vocabulary, groups=4, n=4, prompt=8, response=12)
    passes = 0
    try:
        for _, micro in engine.packing.over(engine.micro_batches(batch)):
            found = engine.compute(micro, OUTPUTS, 0.8)
            found["log_probs"].sum().backward()
            torch.cuda.set_sync_debug_mode("error")
            passes += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert passes > 2


def test_rows_packed_ahead_give_the_same_gradients(model_of: Any, device: Any) -> None:
    batch = batch_of(TINY.vocabulary, groups=4, n=4, prompt=8, response=12)
    found = []
    for ahead in (False, True):
        model = load_model(
            model_of(TINY), dtype=torch.float32, device=device, init="random", seed=3
        )
        engine = TrainEngine(model, Spec(), micro_tokens=64, ahead=ahead)
        found.append(gradients(engine, batch))
    assert all(torch.allclose(found[0][name], found[1][name]) for name in found[0])
