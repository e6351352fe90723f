"""Chunks on Ray: rows go from rank to rank chunk by chunk, and make the numbers of one process."""

from __future__ import annotations

import time

import pytest

from rlflow.commands import Target, compile_target
from rlflow.runtime.executor import Executor
from tests.conftest import TINY

pytestmark = [pytest.mark.ray, pytest.mark.torch]

PIPELINE = f"""
import zlib
import rlflow as rf
from rlflow import ops

class Config(rf.Config):
    ordered: bool = False

def judge(response: str, answer: str) -> float:
    return float(sum(map(ord, response)) % 7)

rf.register_dispatch("alternating", lambda tokens, groups, parts: [
    [r for r in range(len(tokens)) if (r + 1) % parts == part] for part in range(parts)
])

@rf.op(per="row", dispatch="alternating")
def bonus(reward: rf.Row[float], sample: rf.Row[int]) -> rf.Row[float]:
    return reward + (sample % 3) * 0.125

@rf.op(per="group")
def centred(bonus: rf.Row[float], group: rf.Row[int]) -> rf.Row[float]:
    return bonus - bonus.mean()

@rf.op(per="batch")
def digest(
    response: rf.Row[str], centred: rf.Row[float], group: rf.Row[int], sample: rf.Row[int]
) -> rf.Row[float]:
    import torch
    from rlflow.batch import strings
    said = "|".join(strings(response)) + str([c.tolist() for c in (centred, group, sample)])
    return torch.full((len(response),), float(zlib.crc32(said.encode()) % 2**20))

def split(**options):
    return rf.Placement(
        pools={{"train": 1, "gen": 1}},
        assign={{
            "actor": rf.on("train"),
            "actor.rollout": rf.on("gen"),
            "ref": rf.on("train"),
            "bonus": rf.on("gen"),
        }},
        **options,
    )

def fsdp(**options):
    return rf.Placement(
        pools={{"all": 2, "cpus": 1}},
        assign={{
            "*": rf.on("all", fsdp=2),
            "actor.rollout": rf.on("all"),
            "bonus": rf.on("all"),
            "centred": rf.on("cpus"),
        }},
        **options,
    )

@rf.pipeline(placements={{
    "split": split(), "split2": split(stream=2), "fsdp": fsdp(), "fsdp2": fsdp(stream=2),
}})
def chunks(cfg: Config) -> None:
    actor = rf.Model("actor", {str(TINY)!r}, optimizer=rf.AdamW(lr=1e-3))
    ref = rf.Model("ref", {str(TINY)!r})
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=16)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=6, ignore_eos=True)
    rewarded = bonus(ops.reward(judge, samples), samples)
    ref_lp, old_lp = ops.log_probs(ref, samples), ops.log_probs(actor, samples)
    adv = ops.advantage("grpo", samples, rewarded.rename(reward="bonus"))
    loss = rf.PolicyLoss("ppo_clip", kl_coef=0.1)
    steps = {{"mini_batches": 4, "shuffle": False}} if cfg.ordered else {{"epochs": 2}}
    ops.update(actor, samples, adv, ref_lp, old_lp, loss=loss, **{{"mini_batches": 2, **steps}})
    ops.metrics(digest(samples, centred(rewarded, samples)))
"""


class Notes:
    """A listener that keeps the metrics of every iteration."""

    def __init__(self):
        self.found = []

    def started(self, action, iteration):
        pass

    def finished(self, action, completion):
        pass

    def iteration_done(self, iteration, metrics):
        self.found.append(dict(metrics))


def played(plan, machine, iterations=3):
    """The metrics of every iteration."""
    notes, backend = Notes(), machine.backend(time.perf_counter)
    try:
        Executor(plan, backend, notes, start=0, end=iterations, barrier=iterations).run()
    finally:
        backend.close()
    return notes.found


@pytest.fixture
def compiled(tmp_path):
    file = tmp_path / "chunks.py"
    file.write_text(PIPELINE)

    def call(placement, devices, backend=None, ordered=False):
        target = Target(
            settings=(f"ordered={ordered}",),
            pipeline=str(file),
            placement=placement,
            devices=f"cpu:{devices}",
            threads=1,
            backend=backend,
        )
        return compile_target(target).compiled.plan, file

    return call


def on_ray(plan, file):
    """The metrics of a run on Ray, and how many entries each rank's store has left."""
    from rlflow.runtime.on_ray.machine import Options, RayMachine

    options = Options(kind="cpu", threads=1, seed=0, near=file, deadline=60)
    machine = RayMachine(plan, options)
    try:
        return played(plan, machine), machine.held()
    finally:
        machine.close()


def chunked(plan, kind):
    """The nodes of which a plan has actions of a kind in chunks."""
    return {a.node for a in plan.actions if a.kind == kind and a.chunk is not None}


@pytest.mark.parametrize("ordered", [False, True])
def test_chunks_between_processes_have_the_bits_of_one_process_and_one_piece(compiled, ordered):
    from rlflow.runtime.local import LocalMachine
    from rlflow.runtime.worker import Worker

    local = []
    for placement in ("split", "split2"):
        plan, file = compiled(placement, 2, ordered=ordered)
        worker = Worker(plan, seed=0, near=file)
        local.append(played(plan, LocalMachine(plan, worker, threads=1)))
        assert 0 == len(worker.store)
    plan, file = compiled("split2", 2, "ray", ordered)
    there, left = on_ray(plan, file)

    assert {"actor.rollout", "prompts"} <= chunked(plan, "transfer")
    assert ordered is ("actor.update" in chunked(plan, "run"))
    assert {0} == set(left.values())
    whole, here = local
    assert here == there
    assert len(whole) == len(here) == 3
    for one, many in zip(whole, here, strict=True):
        assert one.keys() == many.keys()
        for name, value in one.items():
            joined = name.endswith(("/mean", "/std"))
            assert many[name] == (pytest.approx(value, rel=1e-12) if joined else value), name


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [pytest.param(False, marks=pytest.mark.extra), True])
def test_chunks_over_sharded_ranks_make_the_same_tokens_and_losses(compiled, ordered):
    one, _ = on_ray(*compiled("fsdp", 3, ordered=ordered))
    plan, file = compiled("fsdp2", 3, ordered=ordered)
    two, left = on_ray(plan, file)

    assert {"actor.rollout", "ref.log_probs", "bonus", "centred"} <= chunked(plan, "run")
    assert {0} == set(left.values())
    for whole, chunks in zip(one, two, strict=True):
        assert whole.keys() == chunks.keys()
        for name, value in whole.items():
            exact = "digest" in name
            close = pytest.approx(value, rel=1e-12 if exact else 1e-4, abs=1e-5 * (not exact))
            assert chunks[name] == close, name
