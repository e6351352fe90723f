"""Routers of mixtures in training: losses of their own, equal however a step is cut."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import pytest
import torch
from torch import Tensor

from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.routing.losses import imbalance, loads, router_probabilities
from rlflow.engines.hf.train import TrainEngine
from rlflow.errors import UsageError
from tests.engines import mixtures, sharded_routers
from tests.engines.examples import Spec, gradients, one_step, rows, worst

pytestmark = pytest.mark.torch

FSDP, TP, EP = (1, 2, 1), (1, 1, 2), (1, 2, 1, 2)


@dataclass(frozen=True, kw_only=True)
class Routed:
    balance_coef: float = 0.0
    balance_over: str = "layer"
    z_coef: float = 0.0
    bias_rate: float = 0.0


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    made = {}

    def make(family, **options):
        key = (family, *options.items())
        if key not in made:
            path = tmp_path_factory.mktemp(family)
            made[key] = mixtures.save_mixture(family, path, **options)
        return made[key]

    return make


def engine(path, router, micro_tokens=None, **options):
    """Experts are computed in float32 at most, and all else with them."""
    model = load_model(path, dtype=torch.float32, device="cpu", **options)
    return TrainEngine(model, Spec(), micro_tokens=micro_tokens, router=router)


def zero(outputs, micro):
    return outputs["log_probs"].sum() * 0.0, {}


def added(trained, batch):
    """The gradients of what routers add, by name; and the step's metrics."""
    trained.optimizer.step = lambda scale: None
    result = trained.step(batch, zero, outputs=("log_probs",), temperature=1.0, max_grad_norm=None)
    found = {name: p.grad.clone() for name, p in trained.model.module.named_parameters()}
    return found, result.metrics


def plain_routers(path, batch):
    """The same rows through transformers, padded: the logits of routers, and which are real."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(path).eval()
    read = [
        torch.cat([p, r])[:-1]
        for p, r in zip(
            batch["prompt_tokens"].unbind(), batch["response_tokens"].unbind(), strict=True
        )
        if len(r)
    ]
    tokens = torch.nn.utils.rnn.pad_sequence(read, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in read], batch_first=True)
    made = module(input_ids=tokens, attention_mask=mask, output_router_logits=True)
    return module, made.router_logits, mask


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_balance_is_what_transformers_computes_of_padded_rows_without_their_padding(
    family, mixture
):
    path, batch = mixture(family), rows()
    module, logits, mask = plain_routers(path, batch)
    kind = import_module(type(module).__module__)
    expected = kind.load_balancing_loss_func(logits, 4, 2, mask)
    (0.5 * expected).backward()

    trained = engine(path, Routed(balance_coef=0.5, balance_over="model"), micro_tokens=20)
    found, metrics = added(trained, batch)

    assert metrics["balance_loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert metrics["loss"] == pytest.approx(0.5 * expected.item(), abs=1e-5)
    whole = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    assert worst(whole, found) < 1e-4
    assert not any(found[name].any() for name in found.keys() - whole.keys())


def test_losses_of_layers_are_those_of_the_formulas(mixture):
    path, batch = mixture("qwen3_moe"), rows()
    _, logits, mask = plain_routers(path, batch)
    real: list[Tensor] = [layer[mask.flatten().bool()].detach() for layer in logits]
    z = torch.stack([layer.logsumexp(-1).square().mean() for layer in real]).mean()
    balance, apart = [], []
    for layer in real:
        given = layer.softmax(-1)
        chosen = torch.zeros_like(given).scatter(1, given.topk(2).indices, 1.0)
        balance.append(4 * (chosen.mean(0) * given.mean(0)).sum())
        apart.append(chosen.sum(0).max() / chosen.sum(0).mean())

    trained = engine(path, Routed(balance_coef=0.1, z_coef=0.01))
    _, metrics = added(trained, batch)

    assert metrics["z_loss"] == pytest.approx(float(z), rel=1e-5)
    assert metrics["balance_loss"] == pytest.approx(float(sum(balance)) / 2, rel=1e-5)
    assert metrics["loss"] == pytest.approx(
        0.1 * metrics["balance_loss"] + 0.01 * metrics["z_loss"], rel=1e-9
    )
    assert metrics["expert_imbalance"] == pytest.approx(float(sum(apart)) / 2, rel=1e-5)
    assert metrics["expert_imbalance_max"] == pytest.approx(float(max(apart)), rel=1e-5)


def test_the_z_loss_has_the_gradient_of_its_formula(mixture):
    path, batch = mixture("qwen3_moe"), rows()
    module, logits, mask = plain_routers(path, batch)
    real = [layer[mask.flatten().bool()] for layer in logits]
    torch.stack([layer.logsumexp(-1).square().mean() for layer in real]).mean().backward()

    found, _ = added(engine(path, Routed(z_coef=1.0), micro_tokens=12), batch)

    whole = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    assert worst(whole, found) < 1e-4


def test_gradients_and_metrics_do_not_depend_on_cuts_nor_on_layers_computed_again(mixture):
    path, batch, router = mixture("qwen3_moe"), rows(), Routed(balance_coef=0.3, z_coef=0.1)
    expected, metrics = added(engine(path, router), batch)

    for options in ({"micro_tokens": 12}, {"micro_tokens": 25, "recompute": True}):
        found, others = added(engine(path, router, **options), batch)

        assert worst(expected, found) < 1e-4
        assert others == pytest.approx(metrics, rel=1e-5)


def test_nothing_said_of_routers_changes_no_bit(mixture):
    path, batch = mixture("qwen3_moe"), rows()

    plain = gradients(engine(path, None, micro_tokens=20), batch)
    measured = gradients(engine(path, Routed(), micro_tokens=20), batch)

    assert all(torch.equal(plain[name], measured[name]) for name in plain)


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("family", "shape", "router"),
    [
        *(("qwen3_moe", shape, Routed(balance_coef=0.3, z_coef=0.1)) for shape in (FSDP, TP, EP)),
        ("ernie4_5_moe", FSDP, Routed(bias_rate=0.01)),
    ],
    ids=["fsdp", "tp", "ep", "bias"],
)
def test_statistics_are_of_all_ranks_rows(family, shape, router, mixture, world):
    assert all(world(2).run(sharded_routers.check_equal, mixture(family), shape, router))


@pytest.mark.slow
@pytest.mark.parametrize("over", ["layer", "model"])
def test_statistics_are_of_all_stages(over, mixture, world):
    router = Routed(balance_coef=0.3, z_coef=0.1, balance_over=over)
    path = mixture("qwen3_moe")

    assert all(world(2).run(sharded_routers.check_equal, path, (1, 1, 1), router, 2))
    for shape in (EP, (1, 2, 1, 1, 2)):
        assert all(world(4).run(sharded_routers.check_equal, path, shape, router, 2))
    args = (mixture("ernie4_5_moe"), (1, 1, 1), Routed(bias_rate=0.01), 2)
    assert all(world(2).run(sharded_routers.check_equal, *args))


@pytest.mark.slow
def test_statistics_are_of_all_stages_where_a_rank_has_several(mixture, world, tmp_path):
    """Also where one of a rank's stages has no router, and rows that only fill up passes."""
    router, stages = Routed(balance_coef=0.3, z_coef=0.1), (2, 1, 1, 1)
    layers = {"num_hidden_layers": 5, "mlp_only_layers": [0, 1]}
    deep = mixtures.save_mixture("qwen3_moe", tmp_path, **layers)

    assert all(world(2).run(sharded_routers.check_equal, deep, (1, 1, 1), router, 2, stages))
    for shape in (FSDP, EP, TP):
        assert all(world(4).run(sharded_routers.check_equal, deep, shape, router, 2, stages))
    biased = mixture("ernie4_5_moe", num_hidden_layers=5), (1, 1, 1), Routed(bias_rate=0.01)
    assert all(world(2).run(sharded_routers.check_equal, *biased, 2, stages))


@pytest.mark.slow
def test_statistics_are_of_all_stages_where_backwards_are_in_two_halves(mixture, world):
    router, split = Routed(balance_coef=0.3, z_coef=0.1), (2, (), "zero-bubble")
    path = mixture("qwen3_moe")

    assert all(world(2).run(sharded_routers.check_equal, path, (1, 1, 1), router, *split))
    for shape in (EP, TP):
        assert all(world(4).run(sharded_routers.check_equal, path, shape, router, *split))
    args = (mixture("ernie4_5_moe"), (1, 1, 1), Routed(bias_rate=0.01), *split)
    assert all(world(2).run(sharded_routers.check_equal, *args))
    assert all(world(2).run(sharded_routers.replay_equal, path, (1, 1, 1), *split))


def test_a_balance_loss_brings_experts_into_balance(mixture):
    path, batch = mixture("qwen3_moe", num_experts=8, num_experts_per_tok=1), rows()
    trained = engine(path, Routed(balance_coef=1.0))

    results = [one_step(trained, batch, zero).metrics for _ in range(15)]

    assert results[0]["balance_loss"] > 1.5
    assert results[-1]["balance_loss"] < 1.2
    assert results[-1]["expert_imbalance"] < results[0]["expert_imbalance"] - 0.5


def test_a_model_without_routers_is_refused(model_dir):
    with pytest.raises(UsageError) as refused:
        engine(model_dir("qwen2"), Routed(z_coef=0.1))

    assert refused.value.findings[0].code == "E534"


def test_probabilities_of_sigmoid_scores_are_shares_and_loads_count_rows():
    logits = torch.tensor([[0.0, 0.0, 1.0], [2.0, -1.0, 0.5]], dtype=torch.bfloat16)

    given = router_probabilities(logits, "sigmoid")

    assert given.dtype == torch.float32
    assert torch.allclose(given.sum(-1), torch.ones(2))
    counted = loads(torch.tensor([[0, 2], [2, 1]]), torch.tensor([3.0, 0.0]), 4)
    assert counted.tolist() == [3.0, 0.0, 3.0, 0.0]
    assert imbalance(torch.stack([counted, torch.zeros(4)])).tolist() == [2.0, 1.0]


def biases(model):
    held = model.named_tensors().items()
    return {n: t.clone() for n, t in held if n.endswith("e_score_correction_bias")}


@pytest.mark.parametrize("family", ["glm4_moe", "ernie4_5_moe"])
def test_biases_follow_the_sign_of_loads_and_no_loss(family, mixture):
    path, batch = mixture(family), rows()
    trained = engine(path, Routed(bias_rate=0.01), micro_tokens=20)
    before, counted = biases(trained.model), []

    for _ in range(2):
        result = one_step(trained, batch, zero)
        counted.append(trained.routers.loads.clone())
        assert result.applied

    after = biases(trained.model)
    assert before.keys() == after.keys()
    assert len(after) == len(counted[0])
    for layer, name in enumerate(after):
        moved = sum((one[layer].mean() - one[layer]).sign() * 0.01 for one in counted)
        assert torch.allclose((after[name] - before[name]).flatten().double(), moved, atol=1e-7)
    assert any((after[name] != before[name]).any() for name in after)


def test_biases_balance_what_experts_are_chosen(mixture):
    path = mixture("glm4_moe", n_routed_experts=8, num_experts_per_tok=1)
    trained, batch = engine(path, Routed(bias_rate=0.01)), rows((19, 23, 17, 29), n=1)
    for name in trained.routers.names:
        trained.model.named_tensors()[name][0] += 0.3

    found = [one_step(trained, batch, zero).metrics["expert_imbalance"] for _ in range(50)]

    assert found[0] > 2.5
    assert sum(found[-10:]) / 10 < 1.6


def test_biases_are_weights_of_shards_and_checkpoints_and_files(mixture, tmp_path):
    """What a step has made of them reaches another model of the same path, and its files."""
    from safetensors.torch import load_file

    from rlflow.engines.hf.writing import save_model

    path = mixture("glm4_moe")
    trained, other = (engine(path, Routed(bias_rate=0.1)) for _ in range(2))
    one_step(trained, rows(), zero)
    made = biases(trained.model)
    assert made.keys() <= trained.saved_weights().keys()

    trained.model.sleep()
    trained.model.wake()
    other.model.load_tensors(trained.model.named_tensors(), 1)
    save_model(other.model, str(tmp_path))

    written = load_file(tmp_path / "model.safetensors")
    assert made
    for name, bias in made.items():
        assert bias.abs().sum() > 0.1
        assert torch.equal(other.model.named_tensors()[name], bias)
        assert torch.equal(written[name], bias)


def test_families_without_such_a_bias_are_refused(mixture):
    with pytest.raises(UsageError) as refused:
        engine(mixture("qwen3_moe"), Routed(bias_rate=0.001))

    assert refused.value.findings[0].code == "E535"
