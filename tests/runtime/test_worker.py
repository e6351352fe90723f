"""The worker: the verbs of a plan on real instances, and what it refuses."""

from __future__ import annotations

import weakref

import pytest
import torch

import rlflow as rf
from rlflow import ops
from rlflow.engines.hf.train import TrainEngine
from rlflow.errors import CheckpointError, RunError
from rlflow.runtime.local import LocalMachine
from rlflow.runtime.record.checkpoint import find_checkpoint, save_checkpoint
from rlflow.runtime.worker.node_states import SAVED
from rlflow.runtime.worker.worker import Worker
from rlflow.runtime.worker.world import resharder
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices.cluster import cpu_cluster
from tests.conftest import TINY

pytestmark = pytest.mark.torch


def judge(response: str, answer: str) -> float:
    return float(sum(map(ord, response)) % 7)


@rf.pipeline()
def pipeline(cfg: rf.Config) -> None:
    actor = rf.Model("actor", str(TINY), optimizer=rf.AdamW(lr=1e-3))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
    reward = ops.reward(judge, samples)
    advantage = ops.advantage("grpo", samples, reward)
    ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))


SPLIT = rf.Placement(
    pools={"train": 1, "gen": 1},
    assign={"actor": rf.on("train"), "actor.rollout": rf.on("gen")},
)
TOGETHER = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")})


def worker_of(placement, memory=None):
    cluster = cpu_cluster(placement.num_devices(), threads=1, memory=memory)
    plan = compile_plan(pipeline.trace(), placement, cluster, name="p").plan
    return plan, Worker(plan, seed=0)


def run(plan, worker, *iterations, kinds=("run", "reshard", "sleep", "wake")):
    """Play the plan's actions in their order; returns the metrics by action and iteration."""
    return {
        (action.id, iteration): worker.run(action, iteration)
        for iteration in iterations
        for action in plan.actions
        if action.due(iteration) and action.kind in kinds
    }


def tensors(loaded):
    return {name: tensor.clone() for name, tensor in loaded.model.named_tensors().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def test_a_reshard_copies_the_weights_that_the_update_wrote():
    plan, worker = worker_of(SPLIT)
    train, gen = worker.loaded["actor@train"], worker.loaded["actor@gen"]
    run(plan, worker, 0, kinds=["run"])
    assert (1, 0) == (train.version, gen.version)
    assert not same(tensors(train), tensors(gen))
    (reshard,) = [action for action in plan.actions if action.kind == "reshard"]
    worker.run(reshard, 0)
    assert (1, 1) == (train.version, gen.version)
    assert same(tensors(train), tensors(gen))


def test_a_reshard_that_left_one_bit_different_is_found():
    plan, worker = worker_of(SPLIT)
    train, gen = worker.loaded["actor@train"], worker.loaded["actor@gen"]
    run(plan, worker, 0)
    (reshard,) = [action for action in plan.actions if action.kind == "reshard"]
    copies = resharder(None, reshard, train, [gen])
    copies.run()
    assert {} == copies.check()
    name, weight = next(iter(gen.model.named_tensors().items()))

    weight.view(-1).view(torch.int32)[3] ^= 1

    assert {name} == set(copies.check())


def test_stale_weights_are_refused():
    plan, worker = worker_of(SPLIT)
    run(plan, worker, 0, kinds=["run"])
    worker.run(plan.action("prompts"), 1)
    with pytest.raises(RunError) as caught:
        worker.run(plan.action("actor.rollout"), 1)
    assert "E752" == caught.value.findings[0].code
    assert "actor.rollout declared version 1 of actor@gen, which holds 0" in str(caught.value)


def test_the_store_is_empty_after_an_iteration():
    plan, worker = worker_of(TOGETHER)
    run(plan, worker, 0, 1)
    assert 0 == len(worker.store)


def test_only_the_trained_instance_is_saved():
    _, worker = worker_of(SPLIT)
    assert ["actor@train"] == [loaded.instance.name for loaded in worker.trained()]


def test_a_snapshot_is_the_same_asleep_and_awake_and_stays_while_training_goes_on(tmp_path):
    plan, worker = worker_of(TOGETHER)
    run(plan, worker, 0)
    (loaded,) = worker.trained()
    machine = LocalMachine(plan, worker, threads=1)
    (tmp_path / "awake").mkdir()
    (tmp_path / "asleep").mkdir()
    awake = machine.snapshot()[0].write(tmp_path / "awake")
    assert {"actor.safetensors", "actor.optimizer.safetensors"} == set(awake)
    assert not loaded.resting()
    loaded.train.sleep_optimizer()
    loaded.model.sleep("offload")
    asleep, _ = machine.snapshot()
    assert "offloaded" == loaded.model.state
    assert loaded.optimizer.asleep
    assert len(loaded.resting()) == sum(map(len, loaded.saved().values()))
    loaded.wake("weights")
    loaded.wake("optimizer")
    run(plan, worker, 1)
    assert awake == asleep.write(tmp_path / "asleep")


def test_restore_brings_back_weights_optimizer_and_version(tmp_path):
    plan, worker = worker_of(TOGETHER)
    run(plan, worker, 0)
    taken, counters = LocalMachine(plan, worker, threads=1).snapshot()
    save_checkpoint(tmp_path, 1, taken, {}, {})
    _, fresh = worker_of(TOGETHER)

    LocalMachine(plan, fresh, threads=1).restore(find_checkpoint(tmp_path), counters)

    (loaded,), (other,) = worker.trained(), fresh.trained()
    assert 1 == other.version
    for iteration in (1, 2):
        run(plan, worker, iteration)
        run(plan, fresh, iteration)
    assert same(tensors(loaded), tensors(other))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    plan, worker = worker_of(TOGETHER)
    _, counters = LocalMachine(plan, worker, threads=1).snapshot()
    (loaded,) = worker.trained()
    components = {
        component: {name: shard.tensor for name, shard in shards.items()}
        | {"surplus": torch.zeros(1)}
        for component, shards in loaded.saved().items()
    }
    save_checkpoint(tmp_path, 1, components, {}, {})

    with pytest.raises(CheckpointError) as caught:
        LocalMachine(plan, worker, threads=1).restore(find_checkpoint(tmp_path), counters)

    assert "E760" == caught.value.findings[0].code


def test_the_same_seed_gives_the_same_numbers_and_another_does_not():
    plan, first = worker_of(TOGETHER)
    _, second = worker_of(TOGETHER)
    other = Worker(plan, seed=7)
    numbers = run(plan, first, 0)
    assert numbers == run(plan, second, 0)
    assert numbers != run(plan, other, 0)


def test_a_body_gets_its_own_learning_rate_and_context():
    plan, worker = worker_of(TOGETHER)
    metrics = run(plan, worker, 0)["actor.update", 0]
    assert 1e-3 == metrics["lr"]


def out_of_memory(*words, **more):
    """What every allocation of a device without memory does; a tensor that it had made lives on."""
    made = torch.zeros(1 << 20)
    OUT_OF.append(weakref.ref(made))
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")


OUT_OF: list[weakref.ref] = []
POINTS = {
    "forward": ("rlflow.engines.hf.train.TrainEngine.compute", "actor.update"),
    "backward": ("torch.Tensor.backward", "actor.update"),
    "optimizer": ("rlflow.engines.hf.optim.adamw.AdamWState.step", "actor.update"),
    "rollout": ("rlflow.engines.hf.rollout.TorchRollout.generate", "actor.rollout"),
    "sync": ("rlflow.engines.reshard.resharder.Resharder.run", "reshard:"),
}


@pytest.mark.filterwarnings("ignore:.*out of memory; micro-batches have")
def test_a_run_goes_on_with_micro_batches_that_were_cut_for_want_of_memory(tmp_path, monkeypatch):
    """To the same bits; where the plan has others by now, its own hold."""
    plan, worker = worker_of(TOGETHER)
    compute = TrainEngine.compute

    def cramped(engine, micro, *words):
        if len(micro) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute(engine, micro, *words)

    with monkeypatch.context() as patch:
        patch.setattr(TrainEngine, "compute", cramped)
        run(plan, worker, 0)
    machine = LocalMachine(plan, worker, threads=1)
    taken, counters = machine.snapshot()
    save_checkpoint(tmp_path, 1, taken, {SAVED: machine.node_states()}, {})
    found, (loaded,) = find_checkpoint(tmp_path), worker.trained()
    run(plan, worker, 1)

    def going_on(planned):
        _, fresh = worker_of(TOGETHER)
        (other,) = fresh.trained()
        other.train.planned_tokens = planned
        LocalMachine(plan, fresh, threads=1).restore(found, counters)
        run(plan, fresh, 1)
        return other.train.micro_tokens, same(tensors(loaded), tensors(other))

    before = loaded.train.planned_tokens
    assert loaded.train.micro_tokens < before
    assert (loaded.train.micro_tokens, True) == going_on(before)
    assert (before + 1, False) == going_on(before + 1)


@pytest.mark.rows(3)
@pytest.mark.filterwarnings("ignore:.*out of memory; micro-batches have")
@pytest.mark.parametrize("point", POINTS)
def test_no_memory_is_one_error_that_leaves_the_weights_and_frees_what_was_taken(
    point, monkeypatch
):
    """At each point of an iteration; what the error's frames had is gone, and so are gradients."""
    where, action = POINTS[point]
    plan, worker = worker_of(SPLIT)
    run(plan, worker, 0)
    before = {name: tensors(loaded) for name, loaded in worker.loaded.items()}
    OUT_OF.clear()
    with monkeypatch.context() as patch:
        patch.setattr(where, out_of_memory)
        with pytest.raises(RunError, match="E768") as raised:
            run(plan, worker, 1)
    assert raised.value.findings[0].what.startswith(action)
    assert "2.00 GiB" in str(raised.value)
    assert OUT_OF
    assert {None} == {made() for made in OUT_OF}
    (trained,) = worker.trained()
    assert {} == trained.optimizer.grads == trained.optimizer.sums
    for name, loaded in worker.loaded.items():
        if point != "sync":
            assert all(torch.equal(before[name][k], t) for k, t in tensors(loaded).items())
    run(plan, worker, 1)
