"""What the ranks of a world do in the tests of routers."""

from __future__ import annotations

import torch

from rlflow.batch import flat, lengths, ragged_like, select_rows
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.microbatches import flat_places
from rlflow.engines.hf.routing.replays import PROMPTS, RESPONSES
from rlflow.engines.hf.sharded.build import load_sharded
from rlflow.engines.hf.sharded.train import ShardedTrainEngine
from rlflow.engines.hf.stages.train import StagedTrainEngine
from rlflow.engines.hf.train import TrainEngine
from tests.engines.examples import Spec, rows, weighted
from tests.engines.sharded_checks import differ, gradients, meshes, own_rows

KINDS = ("log_probs",)


def engine_of(pp):
    return ShardedTrainEngine if pp == 1 else StagedTrainEngine


def replay_equal(rank, path, shape, pp=1, stages=(), schedule="1f1b"):
    """Ranks that replay experts, which are none's own choice, compute what one rank does."""
    shared = {"dtype": torch.float32, "device": "cpu"}
    apart = {**meshes(shape, pp), "stages": stages}
    model = load_sharded(path, **apart, trained=True, recompute=True, **shared)
    sharded = engine_of(pp)(model, Spec(), micro_tokens=20)
    if pp > 1:
        sharded.follow(schedule)
    one = TrainEngine(load_model(path, **shared), Spec(), micro_tokens=None)
    batch = rows(n=4)
    told = one.forward(batch, outputs=(PROMPTS, RESPONSES), temperature=1.0)
    for name, like in ((PROMPTS, "prompt_tokens"), (RESPONSES, "response_tokens")):
        turned = torch.where(told[name] < 0, told[name], (told[name] + 1) % 4)
        batch[name] = ragged_like(turned, batch[like])
    mine = own_rows(sharded, len(batch), uneven=True)
    own = select_rows(batch, mine)

    expected = one.forward(batch, outputs=("log_probs",), temperature=1.0)["log_probs"]
    found = sharded.forward(own, outputs=("log_probs", PROMPTS, RESPONSES), temperature=1.0)

    of_rows = flat_places(lengths(batch["response_tokens"]), torch.tensor(mine, dtype=torch.int64))
    assert torch.allclose(expected[of_rows], found["log_probs"], atol=1e-4)
    assert torch.equal(found[RESPONSES], flat(own[RESPONSES]))
    read = (found[PROMPTS] >= 0).any(-1)
    assert torch.equal(found[PROMPTS][read], flat(own[PROMPTS])[read])
    wrong = differ(
        gradients(one, batch, batch, KINDS),
        gradients(sharded, own, batch, KINDS),
        model.shards(),
        5e-5,
    )
    assert not wrong, wrong
    return True


def check_equal(rank, path, shape, router, pp=1, stages=(), schedule="1f1b"):
    """Gradients and metrics of ranks, cut unevenly, are those of one rank with all rows at once."""
    shared = {"dtype": torch.float32, "device": "cpu"}
    model = load_sharded(path, **meshes(shape, pp), stages=stages, trained=True, **shared)
    sharded = engine_of(pp)(model, Spec(), micro_tokens=20, router=router)
    if pp > 1:
        sharded.follow(schedule)
    one = TrainEngine(load_model(path, **shared), Spec(), micro_tokens=None, router=router)
    batch = rows(n=4)
    mine = select_rows(batch, own_rows(sharded, len(batch), uneven=True))
    shards = model.shards()

    wrong = differ(
        gradients(one, batch, batch, KINDS), gradients(sharded, mine, batch, KINDS), shards, 2e-5
    )
    assert not wrong, wrong

    results = [
        engine.step(part, weighted(batch), outputs=KINDS, temperature=0.8, max_grad_norm=2.0)
        for engine, part in ((one, batch), (sharded, mine))
    ]
    assert results[0].metrics.keys() == results[1].metrics.keys()
    for name, value in results[0].metrics.items():
        assert abs(results[1].metrics[name] - value) <= 2e-5 * max(1, abs(value)), name
    names = sharded.routers.names
    of_stages = model.ranks.gather(names, ("pp",))
    assert set(one.routers.names) == set().union(*of_stages)
    mine = {name: shards[name].tensor for name in names}
    whole = one.model.named_tensors()
    assert not names or not differ({n: whole[n] for n in names}, mine, shards, 1e-6)
    names = one.routers.names
    assert bool(router.bias_rate) == any(whole[name].any() for name in names)
    return True
