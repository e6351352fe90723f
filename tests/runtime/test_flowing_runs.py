"""Groups that flow into an update as they are complete: the run of one piece, here and on Ray."""

from __future__ import annotations

import pytest
import torch

from rlflow.runtime.local import LocalMachine
from rlflow.runtime.worker.worker import Worker
from tests.runtime.whole_runs import GRPO, agree, chunked, compiled, on_ray, played

pytestmark = pytest.mark.torch

SMALL = ("prompts_per_iteration=6", "group_size=4", "kl_coef=0.05", "eval_every=9")
FLOWING = {"actor.rollout", "reward", "ref.log_probs", "advantage", "actor.update"}


@pytest.fixture(autouse=True)
def _groups_whatever_they_take(monkeypatch):
    """Rows in order of completion are as short by estimate, so groups are kept."""
    monkeypatch.setattr("rlflow.scheduler.compile.estimated_period", lambda plan: 0.0)


def flowing(count, **more):
    plan, file = compiled(GRPO, "split", *SMALL, devices=2, stream=str(count), **more)
    assert chunked(plan, "run") == (FLOWING if count > 1 else set())
    return plan, file


def here(count, iterations=3):
    """The metrics of a run in this process, and the weights that it ends with."""
    plan, file = flowing(count)
    worker = Worker(plan, seed=0, near=file)
    found = played(plan, LocalMachine(plan, worker, threads=1), iterations)
    assert 0 == len(worker.store)
    return found, worker.loaded["actor@train"].model.named_tensors()


def test_an_error_amid_chunks_leaves_no_gradient_to_the_next_try(monkeypatch):
    """The iteration is made again by the same worker, from its first chunk."""
    plan, file = flowing(2)
    whole, again = (Worker(plan, seed=0, near=file) for _ in range(2))
    due = [a for a in plan.actions if a.kind in ("run", "reshard") and a.due(0)]
    for action in due:
        whole.perform(action, 0)
    trainer = again.loaded["actor@train"].trainer
    begun = {n: t.clone() for n, t in again.loaded["actor@train"].model.named_tensors().items()}
    for action in due:
        if action.id == "actor.update[2/2]":
            break
        again.perform(action, 0)
    assert trainer.adding
    for name, tensor in again.loaded["actor@train"].model.named_tensors().items():
        assert torch.equal(tensor, begun[name])
    again.store._held.clear()
    again.store._left.clear()
    for action in due:
        again.perform(action, 0)
    made = again.loaded["actor@train"].model.named_tensors()
    for name, tensor in whole.loaded["actor@train"].model.named_tensors().items():
        assert torch.equal(tensor, made[name])


@pytest.mark.slow
def test_flowing_groups_make_the_run_of_one_piece():
    (whole, weights), (flowed, made) = here(1), here(3)
    agree(whole, flowed, exact="^$", joined="^reward/|length|finished")
    for name, tensor in weights.items():
        # Where a gradient is all rounding AdamW makes some of a step of it, of 2e-4.
        torch.testing.assert_close(made[name], tensor, rtol=1e-4, atol=5e-5)


@pytest.mark.slow
@pytest.mark.ray
def test_flowing_groups_between_processes_have_the_bits_of_one_process():
    there, left = on_ray(*flowing(3, backend="ray"))
    assert {0} == set(left.values())
    assert here(3)[0] == there
