"""Compiled layers: the same gradients to rounding, no compilation for each length, no decoding."""

from __future__ import annotations

import shutil

import pytest
import torch

from rlflow.contract.values import SampleKey, Sampling
from rlflow.engines.hf.layerwise import compiled
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.engines.hf.train import TrainEngine
from rlflow.errors import UsageError
from tests.engines import sharded_checks as checks
from tests.engines.examples import Spec, gradients, rows, worst

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    # Where a graph begins anew, torch looks at what it got from the one before.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

# Largest difference of a gradient in float32, over the largest number of its tensor.
BOUND = 1e-5


@pytest.fixture(autouse=True)
def from_scratch(monkeypatch):
    """Traced as for any backend; kernels are those of torch itself."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")


def engine(path, *, on=True, micro_tokens=25, **options):
    model = load_model(path, dtype=torch.float32, device="cpu", compiled=on, **options)
    return TrainEngine(model, Spec(), micro_tokens=micro_tokens)


def counted(name):
    return dict(torch._dynamo.utils.counters[name])


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("qwen2", {"recompute": True, "hosts_activations": True}, id="qwen2-hosting"),
        pytest.param("qwen3", {"recompute": "selective"}, id="qwen3-selective"),
        pytest.param("gpt2", {}, id="gpt2"),
    ],
)
def test_gradients_are_those_of_plain_layers_to_rounding(family, options, model_dir):
    plain, found = (
        gradients(engine(model_dir(family), on=on, **options), rows()) for on in (False, True)
    )
    assert counted("stats")["unique_graphs"]
    assert worst(plain, found) < BOUND


def test_one_compilation_does_for_all_layers_and_lengths(model_dir):
    """Four graphs around attention, whose break is one of each frame that it is in.

    No length is that of another dimension, which torch would take for the same one.
    """
    trained = engine(model_dir("qwen2"), micro_tokens=None)
    batches = [rows(prompt_sizes=(25 + n, 23, 29), seed=n) for n in range(5)]
    gradients(trained, batches[0])
    graphs = counted("stats")["unique_graphs"]
    breaks = counted("graph_break")
    for batch in batches[1:]:
        gradients(trained, batch)
    assert (graphs, counted("stats")["unique_graphs"]) == (4, 4)
    assert sum(breaks.values()) == 3
    assert all("torch.compiler.disable" in reason for reason in breaks)
    for batch in batches:
        trained.forward(batch, outputs=("log_probs",), temperature=1.0)
    assert counted("stats")["unique_graphs"] == 8


def test_decoding_is_not_compiled(model_dir):
    """Prompts of a rollout are not either: their keys and values are kept."""
    path = model_dir("qwen2")
    prompts = rows()["prompt_tokens"]
    key = SampleKey(seed=1, iteration=2, stream="s")
    made = [
        TorchRollout(engine(path, on=on).model).generate(
            prompts, Sampling(max_new_tokens=4), key, torch.arange(prompts.size(0))
        )
        for on in (False, True)
    ]
    assert torch.equal(*(each.response_tokens.values() for each in made))
    assert torch.equal(*(each.log_probs.values() for each in made))
    assert not counted("stats")


def test_weights_that_are_loaded_are_those_that_are_computed_with(model_dir):
    path = model_dir("qwen2")
    first, other = engine(path), engine(path, on=False, init="random", seed=5)
    gradients(first, rows())
    first.model.sleep("discard")
    first.model.wake()
    first.model.load_tensors(other.model.named_tensors(), 3)
    found, expected = (gradients(each, rows()) for each in (first, other))
    assert worst(expected, found) < BOUND


def test_a_model_without_layers_is_refused():
    with pytest.raises(UsageError, match="E515"):
        compiled.compile_layers(torch.nn.Sequential(torch.nn.Linear(2, 2)))


@pytest.mark.extra
def test_ranks_that_share_parameters_compile_too(world, model_dir):
    assert all(world(2).run(checks.compiled_alike, model_dir("qwen2"), (1, 2, 1), timeout=230))


@pytest.mark.extra
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
def test_kernels_of_a_cpu_agree_too(model_dir, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    path = model_dir("qwen2")
    plain, found = (gradients(engine(path, on=on), rows()) for on in (False, True))
    assert worst(plain, found) < BOUND
