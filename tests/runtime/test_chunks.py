"""Runs in chunks, in this process: the same numbers as in one piece, and nothing is left over."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import rlflow as rf
from rlflow import ops
from rlflow.batch import flat, lengths, ragged
from rlflow.cli.commands import Target, declare
from rlflow.cli.continuing import in_the_same_chunks
from rlflow.contract.values import Stat
from rlflow.runtime.execute.flow import Flow
from rlflow.runtime.execute.rows import chunk_rows
from rlflow.runtime.execute.stats import join_metrics, logged
from rlflow.runtime.worker.store import Stored, joined_fields
from rlflow.runtime.worker.worker import Worker
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices.cluster import cpu_cluster
from rlflow.scheduler.plan.plan import Action, Chunk, Plan, Reason
from tests.conftest import PIPELINES, TINY
from tests.runtime.whole_runs import (
    CHUNKS,
    GRPO,
    PPO,
    agree,
    numbers,
    plan_of,
    sets,
    tensors,
    weights,
)

pytestmark = pytest.mark.torch

# Sums over rows that are joined from chunks.
JOINED = "/(mean|std|entropy)$"
# What follows from the tokens alone; it is joined as well.
DRAWN = "^reward/|length|finished"


def in_pieces(train, what, placement, counts):
    """The runs in one piece and in so many, whose plans are cut so."""
    found = {n: train(what, placement, *(("--stream", n) if n > 1 else ())) for n in (1, *counts)}
    for n, run in found.items():
        chunks = [action["chunk"] for action in plan_of(run)["actions"]]
        assert {1, n} == {chunk["count"] if chunk else 1 for chunk in chunks}
    return found.pop(1), found


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, True])
def test_chunks_do_not_change_a_bit(train, ordered):
    """Responses of one length: no sum in a model depends on which rows are beside a row.

    Chunks have 16, 8 and 2 rows; prompts have several lengths.
    """
    what = CHUNKS.said(*sets(f"ordered={ordered}"))
    whole, found = in_pieces(train, what, "look", (2, 4, 16))
    for run in found.values():
        agree(numbers(whole), numbers(run), exact="", joined=JOINED)
        assert tensors(whole) == tensors(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        GRPO.said(*sets("prompts_per_iteration=8", "kl_coef=0.05")),
        PPO.said(*sets("prompts_per_iteration=32")),
    ],
    ids=["grpo", "ppo"],
)
def test_chunks_of_ragged_rows_make_the_same_tokens_and_losses(train, what):
    """Rows of a prompt end in several chunks, and share attention with those there: tolerance."""
    whole, found = in_pieces(train, what, "split", (4,))
    for run in found.values():
        agree(numbers(whole), numbers(run), exact="^$", joined=DRAWN)
        for name, tensor in weights(run).items():
            torch.testing.assert_close(tensor, weights(whole)[name], rtol=1e-4, atol=1e-5)


def action(chunk: Chunk | None) -> Action:
    reason = Reason(rule="test", text="a test")
    return Action(id="a", kind="run", reason=reason, devices=(0,), pool="", chunk=chunk)


@pytest.mark.parametrize(("total", "count"), [(8, 1), (8, 2), (8, 4), (12, 3), (0, 2)])
def test_the_rows_of_chunks_are_runs_of_equal_size(total, count):
    found = [chunk_rows(total, Chunk(index=index, count=count)) for index in range(count)]
    size = total // count
    assert [(n * size, (n + 1) * size) for n in range(count)] == found
    assert (0, total) == chunk_rows(total, None)


def stored(first: int, last: int, total: int) -> Stored:
    """Rows `first` to `last` - 1, each with its number, and as often as that is."""
    numbers = torch.arange(first, last)
    whole = (first, last) == (0, total)
    fields = {
        "number": numbers,
        "often": ragged(numbers.repeat_interleave(numbers), numbers),
        "unread": numbers,
    }
    return Stored(fields=fields, total=total, rows=None if whole else numbers)


def test_a_chunk_has_its_rows_of_the_whole_batch():
    found = stored(0, 6, 6).of(Chunk(index=1, count=3))
    assert ([2, 3], 6, 2) == (found.rows.tolist(), found.total, found.held)
    assert [2, 3] == found.fields["number"].tolist()
    assert [2, 2, 3, 3, 3] == flat(found.fields["often"]).tolist()


def test_a_chunk_has_its_rows_of_one_rank_that_holds_others_too():
    held = Stored(fields={"number": torch.tensor([5, 0, 3])}, total=6, rows=torch.tensor([5, 0, 3]))
    found = held.of(Chunk(index=1, count=2))
    assert ([5, 3], [5, 3]) == (found.rows.tolist(), found.fields["number"].tolist())
    assert held.of(None) is held


def test_chunks_are_joined_in_their_order_to_the_whole():
    pieces = [stored(0, 2, 6), stored(2, 4, 6), stored(4, 6, 6)]
    found = joined_fields(pieces, ("number", "often"))
    assert (None, 6) == (found.rows, found.total)
    assert {"number", "often"} == set(found.fields)
    assert list(range(6)) == found.fields["number"].tolist()
    assert list(range(6)) == lengths(found.fields["often"]).tolist()
    assert [2, 3, 4, 5] == joined_fields(pieces[1:], ("number",)).rows.tolist()
    assert pieces[0].fields["often"] is joined_fields(pieces[:1], ("often",)).fields["often"]


def test_the_numbers_of_chunks_are_joined_once():
    half = {"mean": Stat(kind="mean", total=3.0, count=2.0), "max": Stat(kind="max", total=1.0)}
    rest = {"mean": Stat(kind="mean", total=9.0, count=4.0), "max": Stat(kind="max", total=7.0)}
    assert {"mean": 1.5, "max": 1.0} == logged(action(None), [half])
    chunks = [
        logged(action(Chunk(index=index, count=2)), [part])
        for index, part in enumerate((half, rest))
    ]
    assert {"mean": 2.0, "max": 7.0} == join_metrics(chunks)


def judge(response: str, answer: str) -> float:
    return float(sum(map(ord, response)) % 7)


@rf.pipeline()
def pipeline(cfg: rf.Config) -> None:
    actor = rf.Model("actor", str(TINY), optimizer=rf.AdamW(lr=1e-3))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4, ignore_eos=True)
    reward = ops.reward(judge, samples)
    advantage = ops.advantage("grpo", samples, reward)
    ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))


def plan_in(chunks: int) -> Plan:
    placement = rf.Placement(
        pools={"train": 1, "gen": 1},
        assign={"actor": rf.on("train"), "actor.rollout": rf.on("gen")},
        stream=chunks,
    )
    return compile_plan(pipeline.trace(), placement, cpu_cluster(2, threads=1)).plan


def test_a_worker_keeps_nothing_and_gives_rows_their_numbers():
    plan = plan_in(2)
    worker = Worker(plan, seed=0)
    seen = {}
    for each in plan.actions:
        if each.kind == "run":
            worker.perform(each, 0)
            if each.node == "actor.rollout":
                held = worker.store.get(each.id, 0)
                seen[each.id] = (held.rows.tolist(), held.total, held.fields["group"].tolist())
    assert seen == {
        "actor.rollout[1/2]": ([0, 1, 2, 3], 8, [0, 0, 1, 1]),
        "actor.rollout[2/2]": ([4, 5, 6, 7], 8, [2, 2, 3, 3]),
    }
    assert 0 == len(worker.store)


def test_chunks_are_read_in_the_order_of_their_rows_whatever_that_of_the_plan():
    plan = plan_in(2)
    flow = Flow(replace(plan, actions=plan.actions[::-1]))
    wanted = ("actor.rollout[1/2]", "actor.rollout[2/2]")
    assert wanted == flow.origins("actor.update", "actor.rollout")
    assert wanted[:1] == flow.origins("reward[1/2]", "actor.rollout")


@pytest.mark.parametrize(("said", "taken"), [("auto", "2"), (None, None), ("4", "4")])
def test_a_run_that_goes_on_keeps_the_chunks_that_estimates_chose(tmp_path, said, taken):
    saved = json.loads(json.dumps(plan_in(2).to_json()))
    last = saved["actions"][-1]
    aside = {**last, "id": "c[1/8]", "chunk": {"index": 0, "count": 8}, "begins": False}
    (tmp_path / "plan.json").write_text(
        json.dumps({**saved, "actions": [*saved["actions"], aside]})
    )
    target = Target(pipeline=str(PIPELINES / "grpo_arithmetic.py"), stream=said)
    same = in_the_same_chunks(declare(target), target, tmp_path)
    assert (taken, False) == (same.stream, same.groups)
    for each in saved["actions"]:
        if each.get("chunk"):
            each["chunk"]["by"] = "groups"
    (tmp_path / "plan.json").write_text(json.dumps(saved))
    assert in_the_same_chunks(declare(target), target, tmp_path).groups is True
    assert said == in_the_same_chunks(declare(target), target, tmp_path / "none").stream
