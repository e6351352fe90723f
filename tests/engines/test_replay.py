"""Routing replay: experts that a rollout or a forward chose, chosen again in another forward."""

from __future__ import annotations

import pytest
import torch
import transformers

from rlflow.batch import flat, lengths, make_batch, ragged_like, ragged_rows, select_field
from rlflow.contract.values import SampleKey, Sampling
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.engines.hf.routing.replays import PROMPTS, RESPONSES
from rlflow.engines.hf.train import TrainEngine
from rlflow.errors import UsageError
from rlflow.graph.user.routers import Router
from rlflow.modelfiles.mixtures.routers import ROUTERS
from rlflow.scheduler.models.shapes import read_shape
from tests.architectures.tiny import tiny_config
from tests.engines import mixtures, sharded_routers
from tests.engines.examples import Spec, gradients, one_step, rows, worst

pytestmark = pytest.mark.torch

KEY = SampleKey(seed=3, iteration=0, stream="x")
EIGHT = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "initializer_range": 0.15,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return mixtures.save_mixture("qwen3_moe", tmp_path_factory.mktemp("mixture"), **EIGHT)


def trained(path, dtype=torch.float32, micro_tokens=None):
    model = load_model(path, dtype=dtype, device="cpu")
    return TrainEngine(model, Spec(), micro_tokens=micro_tokens)


def sampled(model, n=3, tokens=20, sizes=(9, 5, 12)):
    """Rows that a model has sampled, with the experts that their tokens chose."""
    drawn = torch.Generator().manual_seed(5)
    given = [torch.randint(32, (size,), generator=drawn) for size in sizes]
    prompts = ragged_rows(given, torch.int64)
    sampling = Sampling(max_new_tokens=tokens, n=n, stop_tokens=(7,), routing=True)
    ids = torch.arange(n * len(sizes))
    made = TorchRollout(model).generate(prompts, sampling, KEY, ids)
    parent = torch.arange(len(sizes)).repeat_interleave(n)
    fields = {
        "prompt_tokens": select_field(prompts, parent),
        "response_tokens": made.response_tokens,
        "rollout_log_probs": made.log_probs,
        PROMPTS: made.prompt_experts,
        RESPONSES: made.experts,
    }
    return make_batch(fields, len(parent))


def without(batch):
    fields = {n: batch[n] for n in batch.keys() if n not in (PROMPTS, RESPONSES)}  # noqa: SIM118
    return make_batch(fields, int(batch.batch_size[0]))


def log_probs(engine, batch):
    return engine.forward(batch, outputs=("log_probs",), temperature=1.0)["log_probs"]


def test_a_rollout_tells_what_a_forward_of_the_same_weights_chooses(path):
    engine = trained(path, micro_tokens=40)
    batch = sampled(engine.model)

    found = engine.forward(
        without(batch), outputs=("log_probs", PROMPTS, RESPONSES), temperature=1.0
    )

    assert found[RESPONSES].shape == (int(lengths(batch["response_tokens"]).sum()), 6)
    assert found[RESPONSES].dtype == torch.int16
    for name in (PROMPTS, RESPONSES):
        assert torch.equal(found[name], flat(batch[name])), name
    last = lengths(batch["response_tokens"]).cumsum(0) - 1
    unread = (found[RESPONSES] < 0).all(-1).nonzero()[:, 0]
    assert torch.equal(unread, last)
    assert torch.equal(found["log_probs"], log_probs(engine, without(batch)))


def test_replay_is_bit_equal_where_the_numbers_are(path):
    batch = sampled(trained(path).model)
    for micro_tokens in (None, 40):
        plain = log_probs(trained(path, micro_tokens=micro_tokens), without(batch))
        replayed = log_probs(trained(path, micro_tokens=micro_tokens), batch)

        assert torch.equal(plain, replayed)
    ways = [gradients(trained(path, micro_tokens=40), each) for each in (without(batch), batch)]
    assert all(torch.equal(ways[0][name], ways[1][name]) for name in ways[0])


def test_the_gap_to_a_rollout_in_bfloat16_falls_with_its_experts(path):
    """The same weights in bfloat16 and in float32: what differs is rounding, and who is chosen."""
    rolling = load_model(path, dtype=torch.bfloat16, device="cpu")
    batch = sampled(rolling, n=8, tokens=40)
    engine = trained(path)
    own = engine.forward(without(batch), outputs=(PROMPTS, RESPONSES), temperature=1.0)[RESPONSES]
    read = flat(batch[RESPONSES])[:, 0] >= 0
    chosen = (each[read].view(-1, 3, 2).sort(-1).values for each in (own, flat(batch[RESPONSES])))
    gaps = [
        (log_probs(engine, each) - flat(batch["rollout_log_probs"])).abs()
        for each in (without(batch), batch)
    ]

    assert 0.01 < float(torch.ne(*chosen).any(-1).double().mean()) < 0.1
    assert gaps[1].mean() < 0.5 * gaps[0].mean()
    assert gaps[1].max() < 0.2 * gaps[0].max()


def test_replayed_experts_are_chosen_and_weighed_by_the_routers_own_logits(path):
    """Against the formula of one layer: softmax over all, the chosen ones made to add up to 1."""
    engine = trained(path)
    batch = sampled(engine.model, n=1)
    turned = {
        name: ragged_like(
            torch.where(flat(batch[name]) < 0, -1, (flat(batch[name]) + 3) % 8), batch[name]
        )
        for name in (PROMPTS, RESPONSES)
    }
    fields = {n: batch[n] for n in ("prompt_tokens", "response_tokens")} | turned
    other = make_batch(fields, int(batch.batch_size[0]))
    seen = []
    router = engine.model.routers[1]
    router.register_forward_hook(lambda part, given, made: seen.append(made))

    engine.forward(other, outputs=("log_probs", PROMPTS, RESPONSES), temperature=1.0)
    found = gradients(engine, other)

    logits, weights, chosen = seen[-1]
    expected = logits.softmax(-1).gather(-1, chosen)
    assert torch.allclose(weights, expected / expected.sum(-1, keepdim=True))
    told = engine.forward(other, outputs=(RESPONSES,), temperature=1.0)[RESPONSES]
    assert torch.equal(told, flat(turned[RESPONSES]).to(torch.int16))
    assert found["model.layers.1.mlp.gate.weight"].abs().sum() > 0
    assert worst(gradients(trained(path), without(other)), found) > 1e-2


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe", "ernie4_5_moe", "granitemoe"])
def test_routers_of_all_kinds_are_told_what_to_choose(family, tmp_path):
    engine = trained(mixtures.save_mixture(family, tmp_path), micro_tokens=40)
    batch = sampled(engine.model, n=2, tokens=8)

    assert torch.equal(log_probs(engine, without(batch)), log_probs(engine, batch))
    told = engine.forward(batch, outputs=(RESPONSES,), temperature=1.0)
    assert torch.equal(told[RESPONSES], flat(batch[RESPONSES]))


def test_models_without_such_routers_are_refused(model_dir, tmp_path):
    for path in (model_dir("qwen2"), mixtures.save_mixture("phimoe", tmp_path)):
        engine = trained(path)
        with pytest.raises(UsageError) as refused:
            engine.forward(rows(), outputs=(RESPONSES,), temperature=1.0)
        assert refused.value.findings[0].code == "E536"
        with pytest.raises(UsageError):
            sampled(engine.model)


@pytest.mark.slow
def test_ranks_replay_what_one_rank_does(world, tmp_path):
    path = mixtures.save_mixture("qwen3_moe", tmp_path)

    for shape in ((1, 2, 1), (1, 1, 2), (1, 2, 1, 2)):  # the last with experts apart, ep=2
        assert all(world(2).run(sharded_routers.replay_equal, path, shape))


@pytest.mark.slow
def test_stages_replay_what_one_rank_does(world, tmp_path):
    """Every stage records and replays the layers that it has; of the second model one has none."""
    for dense in ((), (0,)):
        layers = {"mlp_only_layers": list(dense)}
        path = mixtures.save_mixture("qwen3_moe", tmp_path / str(len(dense)), **layers)
        assert all(world(2).run(sharded_routers.replay_equal, path, (1, 1, 1), 2))
        deep = mixtures.save_mixture(
            "qwen3_moe", tmp_path / f"deep{len(dense)}", **layers, num_hidden_layers=5
        )
        args = deep, (1, 1, 1), 2, (1, 2, 1, 1)  # two stages on each rank
        assert all(world(2).run(sharded_routers.replay_equal, *args))
    for shape in ((1, 2, 1, 2), (1, 2, 1, 1, 2)):  # experts apart, and tokens
        assert all(world(4).run(sharded_routers.replay_equal, path, shape, 2))
        assert all(world(4).run(sharded_routers.replay_equal, deep, shape, 2, (1, 2, 1, 1)))


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize("kind", [kind for kind, known in ROUTERS.items() if known.replays])
def test_routers_of_every_family_are_told_and_trained(kind, tmp_path):
    torch.manual_seed(0)
    config = tiny_config(kind)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = trained(str(tmp_path), micro_tokens=40)
    batch = sampled(engine.model, n=2, tokens=8)

    assert torch.equal(log_probs(engine, without(batch)), log_probs(engine, batch))
    told = engine.forward(batch, outputs=(RESPONSES,), temperature=1.0)[RESPONSES]
    assert torch.equal(told, flat(batch[RESPONSES]))
    assert told.shape[1] == read_shape(tmp_path).routed

    rate = 0.01 if ROUTERS[kind].bias else 0.0
    model = load_model(str(tmp_path), dtype=torch.float32, device="cpu")
    router = Router(balance_coef=0.1, z_coef=0.1, bias_rate=rate)
    other = TrainEngine(model, Spec(), micro_tokens=40, router=router)
    assert one_step(other, without(batch)).metrics["balance_loss"] >= 1.5
    assert len(other.routers.names) == (len(model.routers) if rate else 0)
