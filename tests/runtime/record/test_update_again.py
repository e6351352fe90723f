"""An update computed again: equal in every bit, or beside the run's with what was changed."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from rlflow.batch import ragged_rows
from rlflow.cli.commands import Target, compile_target
from rlflow.cli.stages.replayable import edges_read, trained_iterations
from rlflow.errors import UsageError
from rlflow.report.compared.update import Replayed, apart
from rlflow.report.compared.update_text import replayed_lines
from rlflow.runtime.record.checkpoint import save_checkpoint
from rlflow.runtime.record.edges.names import About
from rlflow.runtime.record.edges.writing import edge_table, write_edge
from rlflow.runtime.record.replaying.ratios import RatiosOfOne, TokenRatios
from rlflow.runtime.record.replaying.weights import weights_moved
from rlflow.runtime.record.rundir import RunDir
from tests.conftest import PIPELINES, QUICK, SMALL

pytestmark = pytest.mark.torch
GRPO = str(PIPELINES / "grpo_arithmetic.py")
PPO = str(PIPELINES / "ppo_arithmetic.py")


def left(path, *, iterations=3, checkpoints=()):
    """The directory of a run that has trained some iterations, and recorded nothing."""
    (path / "run.json").write_text(json.dumps({"name": "grpo", "pipeline": GRPO, "started": ""}))
    lines = [{"iteration": n, "metrics": {"actor.update/loss": 0.5}} for n in range(iterations)]
    lines.append({"iteration": iterations, "metrics": {"eval/reward": 1.0}})
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for number in checkpoints:
        (path / "checkpoints" / f"iteration-{number:06d}").mkdir(parents=True)
    return path


def refused(rlflow, *words):
    done = rlflow("replay", *words)
    assert 2 == done.code
    return " ".join(done.err.split())


def test_all_that_is_missing_is_said_at_once(rlflow, tmp_path):
    said = refused(rlflow, left(tmp_path, checkpoints=(1, 3)), "--iteration", 2)

    assert "error[E347]" in said
    assert "it can begin iterations 0, 1 " in said
    assert "did you mean '--iteration 1'" in said
    assert "--save-every 1 --keep 4" in said
    assert "error[E335]" in said
    assert "run it with --record actor.rollout" in said
    assert not (tmp_path / "replays").exists()


def test_the_line_of_a_last_evaluation_is_no_iteration(rlflow, tmp_path):
    run = left(tmp_path)
    graph = compile_target(Target(pipeline=GRPO)).compiled.plan.graph
    assert [0, 1, 2] == trained_iterations(RunDir.view(run), graph)

    said = refused(rlflow, run, "--iteration", 3)
    assert "error[E346]" in said
    assert "got iterations 0 to 2" in said


def test_a_node_to_begin_with_that_is_none_is_said_with_the_nearest(rlflow, tmp_path):
    said = refused(rlflow, left(tmp_path), "--iteration", 0, "--from", "actor.rolout")
    assert "error[E330]" in said
    assert "did you mean 'actor.rollout'" in said


def test_rollouts_of_older_weights_are_not_sampled_again(tmp_path):
    planned = compile_target(Target(pipeline=GRPO, placement="async"))
    run = left(tmp_path)
    for iteration, version in ((1, 1), (2, 1)):
        about = About(
            node="actor.rollout", iteration=iteration, how="every", total=2, graph="", rows_of=""
        )
        versions = ragged_rows([[2, version], [2]], torch.int64)
        write_edge(run, edge_table(about, {"version": versions}, np.arange(2)))
    asked = (planned, RunDir.view(run))
    found = edges_read(*asked, 1, ("actor.rollout",), None)
    assert {} == found.read
    assert ("prompts", "actor.rollout", "reward", "advantage") == found.again
    with pytest.raises(UsageError, match=r"(?s)E348.*version 1 have sampled.*of version 2"):
        edges_read(*asked, 2, ("actor.rollout",), None)

    read = edges_read(*asked, 2, (), None)
    assert {"actor.rollout": str(run)} == read.read
    assert "sampled with actor of version 1, the update begins with 2" in read.notes[0]


def checkpoint(root, iteration, weight, moment):
    components = {
        "actor": {"w": torch.tensor(weight)},
        "actor.optimizer": {"m": torch.tensor(moment)},
    }
    state = {"optimizers": {"actor": {"steps": iteration}}}
    return save_checkpoint(root, iteration, components, state, {})


def test_norms_are_of_both_moves_and_of_what_is_between_them(tmp_path):
    before = checkpoint(tmp_path / "a", 1, [3.0, 4.0], [0.0])
    after = checkpoint(tmp_path / "a", 2, [3.0, 5.0], [1.0])
    again = checkpoint(tmp_path / "b", 2, [3.0, 6.0], [1.0])
    (found,) = weights_moved(before, after, again)

    assert (5.0, (1.0, 2.0), 1.0, 1.0) == (found.before, found.moved, found.apart, found.cosine)
    assert (False, True) == (found.same, found.same_state)

    (equal,) = weights_moved(before, after, after)
    assert (True, True, 0.0) == (equal.same, equal.same_state, equal.apart)
    (alone,) = weights_moved(before, None, again)
    assert (None, None, (None, 2.0)) == (alone.same, alone.apart, alone.moved)


def test_a_moment_of_another_bit_is_no_equal_state(tmp_path):
    before = checkpoint(tmp_path / "a", 1, [1.0], [0.0])
    after = checkpoint(tmp_path / "a", 2, [2.0], [0.0])
    (found,) = weights_moved(before, after, checkpoint(tmp_path / "b", 2, [2.0], [-0.0]))
    assert (True, False) == (found.same, found.same_state)


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [(1.5, 1.5, ""), (2.0, 3.0, "+1 (+50 %)"), (0.0, 1e-9, "+1e-09"), (1.0, float("nan"), "+nan")],
)
def test_figures_apart_are_printed_with_their_share(was, now, said):
    assert said == apart(was, now)


def test_both_updates_are_printed_side_by_side(tmp_path):
    one = RatiosOfOne(mean=1.0, least=0.9, most=1.1, beyond=0.0)
    other = RatiosOfOne(mean=1.1, least=0.5, most=1.9, beyond=0.25)
    ratios = TokenRatios(
        model="actor", tokens=4, rows=2, of_rows=2, band=0.2, run=one, replay=other,
        apart=(0.1, 0.6), row=1, token=0,
    )  # fmt: skip
    before = checkpoint(tmp_path / "a", 1, [3.0, 4.0], [0.0])
    after = checkpoint(tmp_path / "a", 2, [3.0, 5.0], [1.0])
    again = checkpoint(tmp_path / "b", 2, [3.0, 6.0], [1.0])
    found = Replayed(
        run="runs/a", replay="runs/b", iteration=1, begin="iteration-000001",
        read={"actor.rollout": "runs/a"}, computed=["actor.update"],
        changed=[("actor.optimizer.lr", "0.1", "0.2")],
        figures={"actor.update/lr": (0.1, 0.2), "actor.update/kl": (1.0, 1.0), "x": (None, 2.0)},
        rows={"reward": None}, weights=weights_moved(before, after, again), ratios=[ratios],
        notes=[],
    )  # fmt: skip
    text = "\n".join(replayed_lines(found))

    assert found.same is False
    assert "changed   actor.optimizer.lr: 0.1 -> 0.2" in text
    assert "1 of 2 figures are equal in every bit" in text
    assert "actor.update/kl" not in text
    assert "norm of the update  1    2       1 (1 of the run's)" in text
    assert "beyond 1 +- 0.2  0.00%  25.00%" in text
    assert "at most 0.6 (row 1, token 0)" in text
    assert "actor.update/kl" in "\n".join(replayed_lines(found, everything=True))
    assert found.as_json()["ratios"][0]["replay"]["beyond"] == 0.25


def test_weights_that_are_not_compared_are_said_with_why(tmp_path):
    before = checkpoint(tmp_path / "a", 1, [3.0, 4.0], [0.0])
    again = checkpoint(tmp_path / "b", 2, [3.0, 6.0], [1.0])
    found = Replayed(
        run="runs/a", replay="runs/b", iteration=1, begin="iteration-000001", read={},
        computed=["actor.update"], changed=[], figures={"actor.update/kl": (1.0, 1.0)}, rows={},
        weights=weights_moved(before, None, again), ratios=[], notes=[],
    )  # fmt: skip
    text = "\n".join(replayed_lines(found))

    assert "the replay moved them by 2: not compared" in text
    assert found.as_json()["same"] is None
    assert "norm of the update" not in text
    assert "figures that both have are equal, bit for bit; weights were not compared: " in text
    assert "the run keeps no checkpoint from after iteration 1\n" in text


def trained(rlflow, run, pipeline, *words):
    """A run of two iterations that has all that a replay reads."""
    kept = ("--save-every", "1", "--keep", "9", "--record", "actor.rollout", "--quiet")
    # Four answers of PPO may all be wrong, and nothing is learned.
    small = ("--set", "prompts_per_iteration=16") if pipeline == PPO else SMALL
    done = rlflow(
        "run", pipeline, *small, *QUICK, "--iterations", 2, "--run-dir", run, *kept, *words
    )
    assert 0 == done.code, done.err


def replay(rlflow, run, *words):
    done = rlflow("replay", run, "--json", *words)
    assert 0 == done.code, done.err
    return json.loads(done.out)


def equal(found, *models):
    """Whether a replay has the run's bits, of figures, weights and moments."""
    same = [(each["model"], each["same"], each["same_state"]) for each in found["weights"]]
    grads = [name for name in found["figures"] if name.endswith("grad_norm")]
    return (
        found["same"]
        and found["changed"] == []
        and found["differing"] == []
        and len(grads) == len(models)
        and all(each["moved"][0] != 0 for each in found["weights"])
        and sorted(same) == [(name, True, True) for name in models]
    )


@pytest.mark.slow
def test_an_update_again_is_equal_and_with_another_rate_beside_it(rlflow, tmp_path):
    run = tmp_path / "run"
    trained(rlflow, run, GRPO)
    for iteration in (0, 1):
        assert equal(replay(rlflow, run, "--iteration", iteration), "actor")
    sampled = replay(rlflow, run, "--iteration", 1, "--from", "actor.rollout")
    assert equal(sampled, "actor")
    assert {} == sampled["read"]
    assert {"actor.rollout": None} == sampled["rows"]

    found = replay(rlflow, run, "--iteration", 1, "--set", "lr=1e-3")
    assert found["same"] is False
    assert [["actor.optimizer.lr", "0.0002", "0.001"]] == found["changed"]
    assert ["actor.update/lr"] == found["differing"]
    (weights,) = found["weights"]
    assert weights["moved"][1] == pytest.approx(5 * weights["moved"][0], rel=1e-3)
    (ratios,) = found["ratios"]
    assert ratios["rows"] == ratios["of_rows"] == 32
    assert ratios["replay"]["least"] < ratios["run"]["least"] < 1
    assert 1 == rlflow("replay", run, "--iteration", 1, "--set", "lr=1e-3", "--exit-code").code


@pytest.mark.slow
def test_both_updates_of_ppo_again_are_equal(rlflow, tmp_path):
    run = tmp_path / "run"
    trained(rlflow, run, PPO)
    for iteration in (0, 1):
        assert equal(replay(rlflow, run, "--iteration", iteration), "actor", "critic")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(("pipeline", "models"), [(GRPO, ["actor"]), (PPO, ["actor", "critic"])])
def test_updates_of_two_ranks_again_are_equal_and_near_those_of_one(
    rlflow, tmp_path, pipeline, models
):
    run, both = tmp_path / "run", tmp_path / "both.py"
    both.write_text(
        "import rlflow as rf\n"
        "placement = rf.Placement(pools={'all': 2}, assign={'*': rf.on('all')})\n"
    )
    trained(rlflow, run, pipeline, "--placement", both, "--devices", "cpu:2")
    assert equal(replay(rlflow, run, "--iteration", 1, "--placement", both), *models)

    one = replay(rlflow, run, "--iteration", 1, "--placement", "colocate", "--devices", "cpu:1")
    assert "placement" in [name for name, *_ in one["changed"]]
    for weights in one["weights"]:
        assert weights["apart"] < 0.02 * weights["moved"][0]
