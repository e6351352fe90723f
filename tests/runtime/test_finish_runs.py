"""Runs in pieces by who ends first: tokens and losses of one piece, rows in their order again."""

from __future__ import annotations

import pytest
import torch

from rlflow.batch import lengths
from rlflow.commands import Target, compile_target
from rlflow.graph.ending import ended_rows
from rlflow.runtime.local import LocalMachine
from rlflow.runtime.store import Stored, together
from rlflow.runtime.worker import Worker
from rlflow.scheduler.plan import Chunk
from tests.conftest import TINY
from tests.runtime.on_ray.test_stream_runs import chunked, on_ray, played

pytestmark = pytest.mark.torch

PIPELINE = f"""
import zlib
import rlflow as rf
from rlflow import ops

class Config(rf.Config):
    pass

def judge(response: str, answer: str) -> float:
    return float(sum(map(ord, response)) % 7)

rf.register_dispatch("in_turn", lambda tokens, groups, parts: [
    [r for r in range(len(tokens)) if (r + 1) % parts == part] for part in range(parts)
])

@rf.op(per="row", dispatch="in_turn")
def bonus(reward: rf.Row[float], group: rf.Row[int], sample: rf.Row[int]) -> rf.Row[float]:
    return reward + (group % 5) * 0.25 + (sample % 3) * 0.125

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

def apart(**options):
    assign = {{"actor": rf.on("train"), "actor.rollout": rf.on("gen"), "ref": rf.on("look")}}
    assign["bonus"] = rf.on("gen")
    return rf.Placement(pools={{"train": 1, "gen": 1, "look": 1}}, assign=assign, **options)

def ranks(**options):
    assign = {{"*": rf.on("train"), "actor.rollout": rf.on("gen"), "bonus": rf.on("gen")}}
    return rf.Placement(pools={{"train": 1, "gen": 2}}, assign=assign, **options)

PLACEMENTS = {{f"apart{{n}}": apart(stream=n) for n in (1, 2, 4, 5)}}
PLACEMENTS |= {{f"ranks{{n}}": ranks(stream=n) for n in (1, 4)}}

@rf.pipeline(placements=PLACEMENTS)
def finish(cfg: Config) -> None:
    actor = rf.Model("actor", {str(TINY)!r}, optimizer=rf.AdamW(lr=1e-3))
    ref = rf.Model("ref", {str(TINY)!r})
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=6)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=12, temperature=2.0)
    rewarded = bonus(ops.reward(judge, samples), samples)
    ref_lp, old_lp = ops.log_probs(ref, samples), ops.log_probs(actor, samples)
    adv = ops.advantage("grpo", samples, rewarded.rename(reward="bonus"))
    loss = rf.PolicyLoss("ppo_clip", kl_coef=0.1)
    ops.update(actor, samples, adv, ref_lp, old_lp, loss=loss, epochs=2, mini_batches=2)
    ops.metrics(digest(samples, centred(rewarded, samples)))
"""
CUT = {"actor.rollout", "reward", "bonus", "ref.log_probs", "actor.log_probs"}
EXACT = ("digest", "reward/", "rollout/length", "rollout/finished")


@pytest.fixture
def compiled(tmp_path):
    file = tmp_path / "finish.py"
    file.write_text(PIPELINE)

    def call(placement, backend=None):
        target = Target(
            pipeline=str(file), placement=placement, devices="cpu:3", threads=1, backend=backend
        )
        return compile_target(target).compiled.plan, file

    return call


def same(whole, chunks):
    """The same tokens, and losses but for the order in which float32 numbers are added up."""
    assert len(whole) == len(chunks)
    for one, many in zip(whole, chunks, strict=True):
        assert one.keys() == many.keys()
        for name, value in one.items():
            exact = any(word in name for word in EXACT)
            close = pytest.approx(value, rel=1e-12 if exact else 1e-4, abs=1e-5 * (not exact))
            assert many[name] == close, name


def test_pieces_in_one_process_make_the_tokens_and_losses_of_one_piece(compiled):
    found = {}
    for count in (1, 2, 4):
        plan, file = compiled(f"apart{count}")
        worker = Worker(plan, seed=0, near=file)
        found[count] = played(plan, LocalMachine(plan, worker, threads=1))
        assert 0 == len(worker.store)
        assert (CUT if count > 1 else set()) == chunked(plan, "run")
        ways = {a.chunk.by for a in plan.actions if a.chunk is not None}
        assert ways == ({"finish"} if count > 1 else set())
    assert 3 == len(found[1])
    same(found[1], found[2])
    same(found[1], found[4])


@pytest.mark.parametrize("count", [4, 5])
def test_a_piece_has_the_rows_that_end_next(compiled, count):
    plan, file = compiled(f"apart{count}")
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
    found = together([piece(1, 4), piece(0, 5), piece(2, 3)], ("number",))
    assert (None, 6) == (found.rows, found.total)
    assert [0, 10, 20, 30, 40, 50] == found.fields["number"].tolist()


def test_pieces_of_some_rows_keep_their_numbers():
    """Another process has the rest."""
    found = together([piece(1, 4), piece(0, 5)], ("number",))
    assert ([0, 1, 4, 5], 6) == (found.rows.tolist(), found.total)
    assert [0, 10, 40, 50] == found.fields["number"].tolist()


def test_a_piece_by_who_ends_is_read_as_it_was_made():
    held = piece(1, 4)
    assert held.of(Chunk(index=2, count=3, by="finish")) is held
    assert [4] == held.of(Chunk(index=2, count=3)).rows.tolist()


@pytest.mark.ray
@pytest.mark.slow
def test_pieces_of_several_ranks_make_the_tokens_and_losses_of_one_piece(compiled):
    whole, _ = on_ray(*compiled("ranks1", "ray"))
    plan, file = compiled("ranks4", "ray")
    pieces, left = on_ray(plan, file)
    assert CUT == chunked(plan, "run")
    assert {0} == set(left.values())
    same(whole, pieces)


@pytest.mark.ray
@pytest.mark.slow
def test_pieces_between_processes_have_the_numbers_of_one_process(compiled):
    plan, file = compiled("apart2")
    here = played(plan, LocalMachine(plan, Worker(plan, seed=0, near=file), threads=1))
    there, left = on_ray(*compiled("apart2", "ray"))
    assert {0} == set(left.values())
    assert here == there
