"""Planned bytes of weights, gradients and moments are those of the real objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import rlflow as rf
from rlflow import ops
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.train import TrainEngine
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices.cluster import cpu_cluster
from tests.conftest import PIPELINES, TINY
from tests.engines import sharded_states as states
from tests.engines.examples import Spec
from tests.engines.seeing import write_seeing

pytestmark = pytest.mark.torch

ADAM = rf.AdamW(lr=1e-3)
DTYPES = [torch.float32, torch.bfloat16]
ADAPTERS = rf.LoRA(rank=4, targets=("q_proj", "k_proj", "down_proj"))
SEEING = str(PIPELINES / "assets" / "shapes-tiny")


@dataclass(frozen=True)
class Planned:
    """Bytes a rank, by part."""

    weights: int
    state: int


def planned(
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    lora: Any = None,
    optimizer: Any = ADAM,
    path: str = str(TINY),
    freeze: Any = (),
    pp: int = 1,
) -> Planned:
    """What a plan says of a trained actor, its state being gradients and optimizer."""
    count = shape[0] * shape[1] * shape[2]
    name: Any = str(dtype).removeprefix("torch.")

    def pipeline(cfg: rf.Config) -> None:
        how: Any = {"dtype": name, "optimizer": optimizer, "lora": lora, "freeze": freeze}
        actor = rf.Model("actor", path, **how)
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
        reward = ops.reward(judge, samples)
        advantage = ops.advantage("grpo", samples, reward)
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))

    placement = rf.Placement(
        pools={"all": count}, assign={"*": rf.on("all", fsdp=shape[1], tp=shape[2], pp=pp)}
    )
    graph = rf.pipeline()(pipeline).trace()
    plan = compile_plan(graph, placement, cpu_cluster(count, 1), name="p").plan
    sizes = {part.name: part.size or 0 for part in plan.parts}
    return Planned(
        weights=sizes["actor@all/weights"],
        state=sizes["actor@all/gradients"] + sizes["actor@all/optimizer"],
    )


def judge(response: str, answer: str) -> float:
    return 0.0


@pytest.mark.parametrize("lora", [None, ADAPTERS], ids=["full", "adapters"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_process_holds_what_is_planned(dtype: torch.dtype, lora: Any) -> None:
    model = load_model(str(TINY), dtype=dtype, device="cpu", lora=lora)
    engine = TrainEngine(model, Spec(), micro_tokens=None)
    assert engine.optimizer is not None
    expected = planned(dtype, (1, 1, 1), lora)
    assert expected == Planned(weights=model.num_bytes(), state=engine.optimizer.num_bytes())
    engine.optimizer.zero_grad()
    made = [*engine.optimizer.state_buffers(), *engine.optimizer.grads.values()]
    made += [s for s in engine.optimizer.sums.values() if all(s is not m for m in made)]
    assert expected.state == sum(buffer.untyped_storage().nbytes() for buffer in made)


LOW, CODED = (rf.AdamW(lr=1e-3, moments=m) for m in ("bfloat16", "int8"))


@pytest.mark.parametrize("optimizer", [LOW, CODED, rf.Muon(lr=1e-3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fewer_moments_are_what_is_planned(dtype: torch.dtype, optimizer: Any) -> None:
    model = load_model(str(TINY), dtype=dtype, device="cpu")
    engine = TrainEngine(model, optimizer, micro_tokens=None)
    assert engine.optimizer is not None
    expected = planned(dtype, (1, 1, 1), optimizer=optimizer)
    assert expected == Planned(weights=model.num_bytes(), state=engine.optimizer.num_bytes())
    assert expected.state < planned(dtype, (1, 1, 1)).state


@pytest.mark.parametrize("optimizer", [ADAM, CODED, rf.Muon(lr=1e-3)])
@pytest.mark.parametrize(
    ("dtype", "freeze"),
    [
        (torch.float32, "vision"),
        (torch.float32, "projector"),
        # Of 16-bit numbers the tower's widths fill no lines of a cache.
        (torch.bfloat16, ("vision", "projector")),
    ],
    ids=str,
)
def test_frozen_parts_take_their_weights_alone(dtype: Any, freeze: Any, optimizer: Any) -> None:
    parts = (freeze,) if isinstance(freeze, str) else freeze
    model = load_model(SEEING, dtype=dtype, device="cpu", freeze=parts)
    engine = TrainEngine(model, optimizer, micro_tokens=None)
    assert engine.optimizer is not None
    seen = {"path": SEEING, "optimizer": optimizer}
    expected = planned(dtype, (1, 1, 1), **seen, freeze=freeze)
    assert expected == Planned(weights=model.num_bytes(), state=engine.optimizer.num_bytes())
    whole = planned(dtype, (1, 1, 1), **seen)
    assert (expected.weights, expected.state < whole.state) == (whole.weights, True)


@pytest.mark.rows(3)
@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 1, 2)], ids=["fsdp", "tp"])
def test_a_rank_holds_frozen_parts_as_planned(shape: Any, world: Any) -> None:
    """Those in 16 bits beside what is trained in 32; along `tp` every rank has all of a tower."""
    low = torch.bfloat16
    found = world(2).run(states.bytes_held, SEEING, shape, low, None, ("vision",))
    expected = planned(low, shape, path=SEEING, freeze="vision")
    assert (expected.weights, expected.state) == found[0]


@pytest.mark.slow
@pytest.mark.rows(3)
def test_a_rank_holds_a_mixture_that_sees_as_planned(world: Any, tmp_path: Any) -> None:
    shape = (1, 2, 1)
    path = write_seeing(tmp_path, "qwen3_vl_moe", layers=3)
    found = world(2).run(states.bytes_held, path, shape, torch.float32)
    expected = planned(torch.float32, shape, path=path)
    assert (expected.weights, expected.state) == found[0]


@pytest.mark.rows(3)
@pytest.mark.parametrize("freeze", [(), ("vision",)], ids=str)
def test_the_first_stage_holds_a_tower_as_planned(freeze: Any, world: Any) -> None:
    found = world(2).run(states.bytes_of_stages, SEEING, torch.float32, freeze)
    expected = planned(torch.float32, (2, 1, 1), path=SEEING, freeze=freeze, pp=2)
    # The last norm is planned as if each stage had a part of it.
    for most, held in zip((expected.weights, expected.state), max(found), strict=True):
        assert held <= most < held * 1.0005


@pytest.mark.rows(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 1, 1)], ids=["fsdp", "tp", "both", "replicas"]
)
def test_a_rank_holds_what_is_planned(shape: Any, dtype: torch.dtype, world: Any) -> None:
    ranks = world(shape[0] * shape[1] * shape[2])
    found = ranks.run(states.bytes_held, str(TINY), shape, dtype)
    expected = planned(dtype, shape)
    assert (expected.weights, expected.state) == found[0]


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("optimizer", "shape"),
    [(rf.Muon(lr=1e-3), (1, 2, 1)), (rf.Muon(lr=1e-3), (1, 1, 2)), (CODED, (1, 2, 1))],
    ids=["muon-fsdp", "muon-tp", "int8-fsdp"],
)
def test_a_rank_holds_fewer_moments_as_planned(optimizer: Any, shape: Any, world: Any) -> None:
    found = world(2).run(states.bytes_held, str(TINY), shape, torch.bfloat16, optimizer)
    expected = planned(torch.bfloat16, shape, optimizer=optimizer)
    assert (expected.weights, expected.state) == found[0]
