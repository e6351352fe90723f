"""Runs in pieces by who ends first: tokens and losses of one piece, rows in their order again."""

from __future__ import annotations

import pytest
import torch

from rlflow.batch import lengths
from rlflow.graph.rules.completion_order import ended_rows
from rlflow.runtime.local import LocalMachine
from rlflow.runtime.worker.store import Stored, joined_fields
from rlflow.runtime.worker.worker import Worker
from rlflow.scheduler.plan.plan import Chunk
from tests.runtime.whole_runs import CHUNKS, agree, chunked, compiled, on_ray, played

pytestmark = pytest.mark.torch

RAGGED = ("batch=6", "n=4", "length=12", "temperature=2.0", "equal=false")
CUT = {"actor.rollout", "reward", "bonus", "ref.log_probs", "actor.log_probs"}
# What follows from the tokens alone.
EXACT = "digest|reward/|rollout/length|rollout/finished"


def cut(count, placement="look", backend=None):
    return compiled(CHUNKS, placement, *RAGGED, stream=str(count), backend=backend)


@pytest.mark.slow
def test_pieces_in_one_process_make_the_tokens_and_losses_of_one_piece():
    found = {}
    for count in (1, 2, 4):
        plan, file = cut(count)
        worker = Worker(plan, seed=0, near=file)
        found[count] = played(plan, LocalMachine(plan, worker, threads=1))
        assert 0 == len(worker.store)
        assert (CUT if count > 1 else set()) == chunked(plan, "run")
        ways = {a.chunk.by for a in plan.actions if a.chunk is not None}
        assert ways == ({"finish"} if count > 1 else set())
    assert 3 == len(found[1])
    agree(found[1], found[2], exact="^$", joined=EXACT)
    agree(found[1], found[4], exact="^$", joined=EXACT)


@pytest.mark.parametrize("count", [4, 5])
def test_a_piece_has_the_rows_that_end_next(count):
    plan, file = cut(count)
    worker = Worker(plan, seed=0, near=file)
    made, judged = [], []
    for action in plan.actions:
        if action.kind not in ("run", "reshard"):
            continue
        worker.perform(action, 0)
        if action.node == "actor.rollout":
            held = worker.store.get(action.id, 0)
            sizes = lengths(held.fields["response_tokens"]).tolist()
            made.append([*zip(sizes, held.rows.tolist(), strict=True)])
            groups = (held.rows // 4).tolist()
            assert groups == held.fields["group"].tolist()
        elif action.node == "reward":
            judged.append(worker.store.get(action.id, 0).rows.tolist())
    assert [ended_rows(24, i + 1, count) - ended_rows(24, i, count) for i in range(count)] == [
        *map(len, made)
    ]
    order = [pair for piece in made for pair in sorted(piece)]
    assert sorted(order) == order
    assert list(range(24)) == sorted(row for _, row in order) != [row for _, row in order]
    assert [[row for _, row in piece] for piece in made] == judged
    assert judged == [sorted(rows) for rows in judged]
    assert 0 == len(worker.store)


def piece(*rows, total=6):
    numbers = torch.tensor(rows)
    return Stored(fields={"number": numbers * 10}, total=total, rows=numbers)


def test_pieces_are_joined_in_the_order_of_their_rows():
    found = joined_fields([piece(1, 4), piece(0, 5), piece(2, 3)], ("number",))
    assert (None, 6) == (found.rows, found.total)
    assert [0, 10, 20, 30, 40, 50] == found.fields["number"].tolist()


def test_pieces_of_some_rows_keep_their_numbers():
    """Another process has the rest."""
    found = joined_fields([piece(1, 4), piece(0, 5)], ("number",))
    assert ([0, 1, 4, 5], 6) == (found.rows.tolist(), found.total)
    assert [0, 10, 40, 50] == found.fields["number"].tolist()


def test_a_piece_by_who_ends_is_read_as_it_was_made():
    held = piece(1, 4)
    assert held.of(Chunk(index=2, count=3, by="finish")) is held
    assert [4] == held.of(Chunk(index=2, count=3)).rows.tolist()


@pytest.mark.ray
@pytest.mark.slow
def test_pieces_of_several_ranks_make_the_tokens_and_losses_of_one_piece():
    whole, _ = on_ray(*cut(1, "ranks", "ray"))
    plan, file = cut(4, "ranks", "ray")
    pieces, left = on_ray(plan, file)
    assert CUT == chunked(plan, "run")
    assert {0} == set(left.values())
    agree(whole, pieces, exact="^$", joined=EXACT)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.extra
def test_pieces_between_processes_have_the_numbers_of_one_process():
    plan, file = cut(2)
    here = played(plan, LocalMachine(plan, Worker(plan, seed=0, near=file), threads=1))
    there, left = on_ray(*cut(2, backend="ray"))
    assert {0} == set(left.values())
    assert here == there
