"""The shard store and who reads it: rows live until their last reader has run."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.runtime.execute.flow import Flow
from rlflow.runtime.worker.store import ShardStore, Stored
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices.cluster import cpu_cluster
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
    ops.metrics(reward)


ONE = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")})


def plan(backend, every=1):
    """The plan, its metrics computed every so many iterations."""
    cluster = cpu_cluster(1, threads=1)
    made = compile_plan(pipeline.trace(), ONE, cluster, name="p", backend=backend).plan
    seldom = (replace(a, every=every) if a.id == "metrics" else a for a in made.actions)
    return replace(made, actions=tuple(seldom))


def rows(total=1):
    return Stored(fields={}, total=total)


def test_rows_go_with_their_last_reader():
    store, kept = ShardStore(), rows()

    store.put("a", 0, kept, 2)
    store.release("a", 0)
    assert kept is store.get("a", 0)
    store.release("a", 0)

    assert 0 == len(store)
    with pytest.raises(KeyError):
        store.get("a", 0)


def test_what_nobody_reads_is_not_kept():
    store = ShardStore()

    store.put("a", 0, rows(), 0)

    assert 0 == len(store)


def test_iterations_are_kept_apart():
    store, first, second = ShardStore(), rows(1), rows(2)

    store.put("a", 0, first, 1)
    store.put("a", 1, second, 1)
    assert (first, second) == (store.get("a", 0), store.get("a", 1))
    store.release("a", 0)

    assert second is store.get("a", 1)


def test_many_threads_release_each_reader_once():
    store, count = ShardStore(), 4
    for iteration in range(200):
        store.put("a", iteration, rows(), count)
    barrier = threading.Barrier(count)

    def read():
        barrier.wait()
        for iteration in range(200):
            store.release("a", iteration)

    threads = [threading.Thread(target=read) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 0 == len(store)


def test_in_one_process_nodes_read_each_other():
    flow = Flow(plan("local"))

    assert ("actor.rollout",) == flow.origins("reward", "actor.rollout")
    assert ("prompts",) == flow.sources("actor.rollout")
    assert 0 == flow.readers("actor.update", 0)


def test_a_reader_counts_only_in_the_iterations_it_is_due_in():
    made = plan("local", every=5)
    flow = Flow(made)
    (seldom,) = [action for action in made.actions if action.every == 5]

    counts = [flow.readers("reward", iteration) for iteration in range(6)]

    assert [2, 1, 1, 1, 1, 2] == counts
    assert [True, False] == [seldom.due(5), seldom.due(6)]


def test_between_processes_a_transfer_reads_and_is_read():
    made = plan("ray")
    flow = Flow(made)
    transfers = [action for action in made.actions if action.kind == "transfer"]

    assert transfers
    for transfer in transfers:
        assert (transfer.node,) == flow.sources(transfer.id)
        readers = [a for a in made.actions if transfer.id in flow.sources(a.id)]
        assert len(readers) == flow.readers(transfer.id, 0) > 0
        assert {reader.takes for reader in readers} == {transfer.makes}
