"""Part F: a mesh of one rank computes and updates what a whole model does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.sharded.build import load_sharded
from rlflow.engines.hf.sharded.mesh import AXES
from rlflow.engines.hf.sharded.train import ShardedTrainEngine
from rlflow.engines.hf.train import TrainEngine
from tests.engines.examples import Spec
from tests.gpu.conftest import HALF_BILLION, TINY
from tests.gpu.test_compute import OUTPUTS, batch_of, weighted

pytestmark = pytest.mark.torch


@pytest.fixture
def mesh(device: Any) -> Iterator[DeviceMesh]:
    """The mesh of one rank, in this process."""
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        alone = torch.zeros((1,) * len(AXES), dtype=torch.int64)
        yield DeviceMesh(device.type, alone, mesh_dim_names=AXES)
    finally:
        dist.destroy_process_group()


def test_a_rank_alone_makes_the_steps_of_a_whole_model(
    mesh: DeviceMesh, model_of: Any, device: Any, big: bool
) -> None:
    size = HALF_BILLION if big else TINY
    batch = batch_of(size.vocabulary, groups=2, n=2, prompt=8, response=12)
    path = model_of(size)
    how: dict[str, Any] = {"dtype": torch.float32, "device": device, "init": "random", "seed": 3}
    found = []
    for sharded in (False, True):
        if sharded:
            model: Any = load_sharded(path, mesh=mesh, trained=True, name="actor", **how)
            engine: Any = ShardedTrainEngine(model, Spec(), micro_tokens=64)
        else:
            model = load_model(path, **how)
            engine = TrainEngine(model, Spec(), micro_tokens=64)
        steps = [
            engine.step(batch, weighted, outputs=OUTPUTS, temperature=0.8, max_grad_norm=1.0)
            for _ in range(3)
        ]
        found.append([(step.metrics["loss"], step.grad_norm) for step in steps])
        del model, engine
    for whole, cut in zip(*found, strict=True):
        assert cut == pytest.approx(whole, rel=2e-4)
