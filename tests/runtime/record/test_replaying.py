"""Edges read from a record: training that reads them is the training that was recorded."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from rlflow.batch import make_batch
from rlflow.cli.commands import Target, declare
from rlflow.errors import RlflowError, RunError
from rlflow.ops.body import Call
from rlflow.runtime.record.edges.names import About, edge_directory, file_name
from rlflow.runtime.record.edges.reading import is_whole, read_edge, recorded
from rlflow.runtime.record.edges.writing import edge_table, write_edge
from rlflow.runtime.record.replaying.present import require_recorded
from rlflow.runtime.record.replaying.source import recorded_rows
from tests.conftest import PIPELINES, QUICK, SMALL
from tests.runtime.whole_checkpoints import joined

pytestmark = pytest.mark.torch
GRPO = str(PIPELINES / "grpo_arithmetic.py")


@pytest.fixture
def run(tmp_path):
    """The directory of a run that has recorded nothing."""
    (tmp_path / "run.json").write_text("{}")
    return tmp_path


def graph_from(run, edge="reward"):
    target = Target(pipeline=GRPO, only=("actor.update",), from_=(f"{run}:{edge}",))
    return declare(target).graph


def write(run, iteration, *, field="reward", dtype=torch.float32, total=4, edge="reward"):
    """Rows 0 to 3 of a node's output of `total` rows."""
    about = About(
        node=edge, iteration=iteration, how="every", total=total, graph="", rows_of="actor.rollout"
    )
    values = {field: torch.arange(4).to(dtype)}
    rows = np.arange(4)
    write_edge(run, edge_table(about, values, rows, groups=rows // 2))


def refused(run, count):
    with pytest.raises(RlflowError) as caught:
        require_recorded(graph_from(run), range(count))
    return " ".join(caught.value.render().split())


def test_what_is_there_and_as_declared_is_taken(run):
    for iteration in range(2):
        write(run, iteration)
    require_recorded(graph_from(run), range(2))


def test_iterations_that_are_not_there_are_said_with_how_many_are(run):
    for iteration in range(2):
        write(run, iteration)
    said = refused(run, 9)

    assert "error[E335]" in said
    assert "all rows of reward in 7 iterations from 2 to 8" in said
    assert "--iterations 2, or run it with --record reward" in said


def test_rows_of_a_few_groups_are_not_enough(run):
    write(run, 0, total=32)
    said = refused(run, 1)

    assert "E335" in said
    assert "4 rows of iteration 0, and not all" in said


def test_a_node_that_is_not_recorded_is_said_with_those_that_are(run):
    write(run, 0, edge="rewards")
    said = refused(run, 1)

    assert "E335" in said
    assert "did you mean 'rewards'" in said


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"dtype": torch.float64}, "got float64[rows] expected reward: float32[rows]"),
        ({"field": "score"}, "no such field; score"),
    ],
)
def test_fields_other_than_declared_are_said_with_their_types(run, wrong, said):
    write(run, 0, **wrong)
    found = refused(run, 1)

    assert "E336" in found
    assert said in found


def test_a_torn_file_and_a_directory_of_no_run_are_said(run, tmp_path):
    write(run, 0)
    (edge_directory(run, "reward") / file_name(0)).write_bytes(b"PAR1")
    assert "E733" in refused(run, 1)
    assert "E712" in refused(tmp_path / "none", 1)


def call_of(run, rows=None):
    """A call of a source, by itself or joined to rows that are here, of 4 in all."""
    node = graph_from(run).node("reward")
    return Call(
        node="reward",
        op=node.op,
        iteration=0,
        seed=0,
        params=dict(node.params),
        wanted=frozenset({"reward"}),
        permutation=torch.randperm,
        tokenizer=lambda: None,
        inputs=None if rows is None else make_batch({"group": rows // 2}, len(rows)),
        rows=rows,
        total=4,
    )


def test_a_source_that_is_joined_brings_the_rows_that_are_there(run):
    write(run, 0)
    whole = recorded_rows(call_of(run))
    some = recorded_rows(call_of(run, torch.tensor([3, 1])))

    assert [0.0, 1.0, 2.0, 3.0] == whole.fields["reward"].tolist()
    assert [0, 0, 1, 1] == whole.fields["group"].tolist()
    assert [3.0, 1.0] == some.fields["reward"].tolist()


def test_rows_of_another_batch_are_not_joined(run):
    write(run, 0)
    call = call_of(run, torch.arange(3))
    object.__setattr__(call, "total", 3)
    with pytest.raises(RunError, match=r"(?s)E339.*4 rows in .*, 3 here"):
        recorded_rows(call)


def bits(tensor):
    return tensor.numpy().tobytes()


def lines(run):
    """The metrics of every iteration of a run."""
    text = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"] for line in text]


@pytest.mark.slow
def test_training_from_a_record_is_bit_equal_to_the_run_that_left_it(rlflow, tmp_path):
    """Of both rollouts and rewards, and of rollouts alone, without an engine or a rollout."""
    words = ["run", GRPO, *SMALL, *QUICK, "--iterations", "2", "--save-every", "1", "--quiet"]
    whole = tmp_path / "whole"
    recording = ("--record", "actor.rollout", "--record", "reward")
    assert 0 == rlflow(*words, "--run-dir", whole, *recording).code
    weights = joined(whole / "checkpoints" / "iteration-000002")
    for edges in (["actor.rollout"], ["actor.rollout", "reward"]):
        run = tmp_path / f"from-{len(edges)}"
        sources = [word for edge in edges for word in ("--from", f"{whole}:{edge}")]
        done = rlflow(*words, "--run-dir", run, *sources, "--only", "actor.update")
        assert 0 == done.code, done.err

        found = joined(run / "checkpoints" / "iteration-000002")
        assert weights.keys() == found.keys()
        assert [] == [n for n in weights if bits(weights[n]) != bits(found[n])]
        for before, now in zip(lines(whole)[:2], lines(run), strict=True):
            assert "actor.update/grad_norm" in now
            assert now == {name: before[name] for name in now}


@pytest.mark.slow
def test_a_stage_by_itself_leaves_its_rows_for_the_next(rlflow, tmp_path):
    words = ["run", GRPO, *SMALL, *QUICK, "--iterations", "1", "--quiet"]
    sampled, trained = tmp_path / "sampled", tmp_path / "trained"
    assert 0 == rlflow(*words, "--run-dir", sampled, "--only", "actor.rollout").code
    assert {"actor.rollout": [0]} == recorded(sampled)
    assert is_whole(read_edge(sampled, "actor.rollout", 0))

    source = ("--from", f"{sampled}:actor.rollout", "--only", "actor.update")
    done = rlflow(*words, "--run-dir", trained, *source)
    assert 0 == done.code, done.err
    assert lines(trained)[0]["actor.update/grad_norm"] > 0

    nothing = rlflow(*words, "--only", "actor.rollout", "--record", "none", "--dry-run")
    assert "record: nothing" in nothing.out
