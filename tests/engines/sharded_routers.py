"""What the ranks of a world do in the tests of routers."""

from __future__ import annotations

import torch

from rlflow.batch import select_rows
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.sharded.build import load_sharded
from rlflow.engines.hf.sharded.train import ShardedTrainEngine
from rlflow.engines.hf.train import TrainEngine
from tests.engines.examples import Spec, rows, weighted
from tests.engines.sharded_checks import differ, gradients, mesh, own_rows

KINDS = ("log_probs",)


def check_equal(rank, path, shape, router):
    """Gradients and metrics of ranks, cut unevenly, are those of one rank with all rows at once."""
    shared = {"dtype": torch.float32, "device": "cpu"}
    model = load_sharded(path, mesh=mesh(*shape), trained=True, **shared)
    sharded = ShardedTrainEngine(model, Spec(), micro_tokens=20, router=router)
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
    names = one.routers.names
    mine = {name: shards[name].tensor for name in names}
    whole = one.model.named_tensors()
    assert not differ({n: whole[n] for n in names}, mine, shards, 1e-6)
    assert bool(router.bias_rate) == any(whole[name].any() for name in names)
    return True
