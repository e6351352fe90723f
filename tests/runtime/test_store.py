"""The shard store: fields live until their last reader has run."""

from __future__ import annotations

import threading

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.runtime.store import ShardStore
from tests.conftest import TINY


def judge(response: str, answer: str) -> float:
    return 1.0


@rf.pipeline()
def pipeline(cfg: rf.Config) -> None:
    actor = rf.Model("actor", str(TINY), optimizer=rf.AdamW(lr=1e-4))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
    reward = ops.reward(judge, samples)
    advantage = ops.advantage("grpo", samples, reward)
    ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))


@pytest.fixture
def store():
    return ShardStore(pipeline.trace())


def readers(name):
    return sum(name in node.sources for node in pipeline.trace().nodes)


def test_fields_go_with_their_last_reader(store):
    fields = {"reward": object()}
    count = readers("actor.rollout")
    assert count > 1
    store.put("actor.rollout", 0, fields)
    for _ in range(count - 1):
        store.release("actor.rollout", 0)
        assert fields is store.get("actor.rollout", 0)
    store.release("actor.rollout", 0)
    assert 0 == len(store)
    with pytest.raises(KeyError):
        store.get("actor.rollout", 0)


def test_what_nobody_reads_is_not_kept(store):
    assert 0 == readers("actor.update")
    store.put("actor.update", 0, {"x": object()})
    assert 0 == len(store)


def test_iterations_are_kept_apart(store):
    first, second = {"prompt": 0}, {"prompt": 1}
    store.put("prompts", 0, first)
    store.put("prompts", 1, second)
    assert (first, second) == (store.get("prompts", 0), store.get("prompts", 1))
    for _ in range(readers("prompts")):
        store.release("prompts", 0)
    assert second is store.get("prompts", 1)


def test_many_threads_release_each_reader_once(store):
    count = readers("actor.rollout")
    for iteration in range(200):
        store.put("actor.rollout", iteration, {})
    barrier = threading.Barrier(count)

    def read():
        barrier.wait()
        for iteration in range(200):
            store.release("actor.rollout", iteration)

    threads = [threading.Thread(target=read) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 == len(store)
