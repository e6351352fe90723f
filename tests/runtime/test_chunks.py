"""Runs in chunks, in this process: the same numbers as in one piece, and nothing is left over."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rlflow as rf
from rlflow import ops
from rlflow.batch import flat, lengths, ragged
from rlflow.commands import Target, declare
from rlflow.launch import in_the_same_chunks
from rlflow.ops.body import Stat
from rlflow.runtime.flow import Flow
from rlflow.runtime.metrics import read_metrics
from rlflow.runtime.rows import chunk_rows
from rlflow.runtime.stats import join, logged
from rlflow.runtime.store import Stored, together
from rlflow.runtime.worker import Worker
from rlflow.scheduler.cluster import cpu_cluster
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.plan import Action, Chunk, Plan, Reason
from tests.conftest import PIPELINES, QUICK, TINY

pytestmark = pytest.mark.torch

EQUAL = f"""
import zlib
import rlflow as rf
from rlflow import ops

class Config(rf.Config):
    pass

def judge(response: str, answer: str) -> float:
    return float(sum(map(ord, response)) % 7)

@rf.op(per="row")
def bonus(reward: rf.Row[float], group: rf.Row[int], sample: rf.Row[int]) -> rf.Row[float]:
    return reward + (group % 5) * 0.25 + (sample % 3) * 0.125

@rf.op(per="group")
def centred(bonus: rf.Row[float], group: rf.Row[int]) -> rf.Row[float]:
    return bonus - bonus.mean()

@rf.op(per="batch")
def digest(response: rf.Row[str], centred: rf.Row[float]) -> rf.Row[float]:
    import torch
    from rlflow.batch import strings
    said = "|".join(strings(response)) + str(centred.tolist())
    return torch.full((len(response),), float(zlib.crc32(said.encode()) % 2**20))

@rf.pipeline(placements={{}})
def equal(cfg: Config) -> None:
    actor = rf.Model("actor", {str(TINY)!r}, optimizer=rf.AdamW(lr=1e-3))
    ref = rf.Model("ref", {str(TINY)!r})
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=16)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=6, ignore_eos=True)
    rewarded = bonus(ops.reward(judge, samples), samples)
    ref_lp, old_lp = ops.log_probs(ref, samples), ops.log_probs(actor, samples)
    adv = ops.advantage("grpo", samples, rewarded.rename(reward="bonus"))
    loss = rf.PolicyLoss("ppo_clip", kl_coef=0.1)
    ops.update(actor, samples, adv, ref_lp, old_lp, loss=loss, STEPS)
    ops.metrics(digest(samples, centred(rewarded, samples)))
"""

ACTOR = '"actor": rf.on("train"), "actor.rollout": rf.on("gen")'
LOOK = f'{{"train": 1, "gen": 1, "look": 1}}, assign={{{ACTOR}, "ref": rf.on("look")}}'
STEPS = {"equal": "epochs=2, mini_batches=2", "steps": "mini_batches=4, shuffle=False"}
CASES = {
    "equal": LOOK,
    "steps": LOOK,
    "grpo_arithmetic": f'{{"train": 1, "gen": 1}}, assign={{{ACTOR}, "ref": rf.on("gen")}}',
    "ppo_arithmetic": '{"policy": 1, "others": 1}, assign={"actor": rf.on("policy"), '
    '"critic": rf.on("others"), "ref": rf.on("others")}',
}


def streamed(case: str, folder: Path) -> Path:
    """A pipeline with placements `p1`, `p2` and `p4`, that cut into so many chunks."""
    own = case in STEPS
    text = EQUAL.replace("STEPS", STEPS[case]) if own else (PIPELINES / f"{case}.py").read_text()
    added = "".join(f'"p{n}": rf.Placement(pools={CASES[case]}, stream={n}), ' for n in (1, 2, 4))
    text = text.replace("placements={", "placements={" + added)
    file = folder / f"{case}.py"
    file.write_text(text.replace('"pipelines/assets/arith-tiny', f'"{TINY}'))
    return file


@pytest.fixture
def runs(rlflow, tmp_path, monkeypatch):
    """Run a pipeline in 1, 2 and 4 pieces; the run directories by number of pieces."""
    monkeypatch.chdir(tmp_path)

    def call(case: str, *words: str) -> dict[int, Path]:
        file = streamed(case, tmp_path)
        found = {}
        for n in (1, 2, 4):
            where = tmp_path / f"run{n}"
            devices = ("--devices", f"cpu:{CASES[case].count(': 1')}", "--threads", "1")
            options = ("--placement", f"p{n}", "--iterations", 3, "--run-dir", where, "-q")
            result = rlflow("run", file, *devices, *words, *options)
            assert 0 == result.code, result.err
            found[n] = where
            actions = json.loads((where / "plan.json").read_text())["actions"]
            counts = {a["chunk"]["count"] if a["chunk"] else 1 for a in actions}
            assert {1, n} == counts
        return found

    return call


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The tensors of the last checkpoint by component and name."""
    last = run / "checkpoints" / (run / "checkpoints" / "LATEST").read_text().strip()
    return {
        f"{file.stem}/{name}": tensor
        for file in sorted(last.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def numbers(run: Path) -> list[dict[str, float]]:
    return [line.metrics for line in read_metrics(run / "metrics.jsonl")]


@pytest.mark.parametrize("case", ["equal", "steps"])
def test_chunks_do_not_change_a_bit(runs, case):
    """Responses of one length: no sum in a model depends on how many rows are beside a row."""
    found = runs(case)
    whole, trained = numbers(found[1]), weights(found[1])
    for n in (2, 4):
        for one, many in zip(whole, numbers(found[n]), strict=True):
            assert one.keys() == many.keys()
            for name, value in one.items():
                joined = name.endswith(("/mean", "/std"))
                assert many[name] == (pytest.approx(value, rel=1e-12) if joined else value), name
        for name, tensor in weights(found[n]).items():
            assert tensor.numpy().tobytes() == trained[name].numpy().tobytes(), name


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("grpo_arithmetic", ("--set", "prompts_per_iteration=8", "--set", "kl_coef=0.05")),
        ("ppo_arithmetic", ("--set", "prompts_per_iteration=32")),
    ],
)
def test_chunks_of_ragged_rows_make_the_same_tokens_and_losses(runs, case, words):
    """Matrix products of other shapes add up in another order: float32 tolerance, no more."""
    found = runs(case, *QUICK, *words)
    whole, trained = numbers(found[1]), weights(found[1])
    for n in (2, 4):
        for one, many in zip(whole, numbers(found[n]), strict=True):
            assert one.keys() == many.keys()
            for name, value in one.items():
                drawn = name.startswith("reward/") or "length" in name or "finished" in name
                close = pytest.approx(value, rel=1e-12 if drawn else 1e-4, abs=1e-5 * (not drawn))
                assert many[name] == close, name
        for name, tensor in weights(found[n]).items():
            torch.testing.assert_close(tensor, trained[name], rtol=1e-4, atol=1e-5)


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
    found = together(pieces, ("number", "often"))
    assert (None, 6) == (found.rows, found.total)
    assert {"number", "often"} == set(found.fields)
    assert list(range(6)) == found.fields["number"].tolist()
    assert list(range(6)) == lengths(found.fields["often"]).tolist()
    assert [2, 3, 4, 5] == together(pieces[1:], ("number",)).rows.tolist()
    assert pieces[0].fields["often"] is together(pieces[:1], ("often",)).fields["often"]


def test_the_numbers_of_chunks_are_joined_once():
    half = {"mean": Stat(kind="mean", total=3.0, count=2.0), "max": Stat(kind="max", total=1.0)}
    rest = {"mean": Stat(kind="mean", total=9.0, count=4.0), "max": Stat(kind="max", total=7.0)}
    assert {"mean": 1.5, "max": 1.0} == logged(action(None), [half])
    chunks = [
        logged(action(Chunk(index=index, count=2)), [part])
        for index, part in enumerate((half, rest))
    ]
    assert {"mean": 2.0, "max": 7.0} == join(chunks)


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
    chunk = {"index": 0, "count": 2}
    begun = {"id": "b[1/2]", "chunk": chunk, "begins": True}
    aside = {"id": "c[1/8]", "chunk": {"index": 0, "count": 8}, "begins": False}
    saved = {"actions": [{"id": "a", "chunk": None, "begins": False}, begun, aside]}
    (tmp_path / "plan.json").write_text(json.dumps(saved))
    target = Target(pipeline=str(PIPELINES / "grpo_arithmetic.py"), stream=said)
    assert taken == in_the_same_chunks(declare(target), target, tmp_path).stream
    assert said == in_the_same_chunks(declare(target), target, tmp_path / "none").stream
