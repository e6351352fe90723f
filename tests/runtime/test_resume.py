"""Runs that end too soon: what is left, what continues, and that no bit differs."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from rlflow.runtime.record import durable
from rlflow.runtime.record.checkpoint import list_checkpoints
from rlflow.runtime.record.manifest import read_manifest
from rlflow.runtime.record.metrics import read_metrics
from tests.conftest import PIPELINES, QUICK, SMALL, TINY, ended, process
from tests.runtime.whole_runs import Declared

pytestmark = pytest.mark.torch

GRPO = PIPELINES / "grpo_arithmetic.py"
WORDS = (*SMALL, *QUICK, "--set", "group_size=4", "--placement", "split", "--devices", "cpu:2")
EVERY = ("--save-every", 2)


def command(run: Path, iterations=7, *, resume=False):
    where = ("--resume", run) if resume else ("--run-dir", run)
    return ("run", GRPO, *WORDS, *EVERY, "--iterations", iterations, *where)


def state(run: Path):
    """The bytes of the metrics, and of every tensor of the last checkpoint."""
    last = list_checkpoints(run / "checkpoints")[-1]
    tensors = {
        f"{file.stem}/{name}": tensor.contiguous().view(-1).numpy().tobytes()
        for file in sorted(last.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    return last.name, (run / "metrics.jsonl").read_bytes(), tensors


@pytest.fixture
def whole(train):
    """The run directory of seven iterations without an accident, made once and only read."""
    return train(Declared(str(GRPO), (*WORDS, *EVERY, "--iterations", 7)), "split")


@pytest.fixture
def broken(rlflow, tmp_path, monkeypatch):
    """Start a run that breaks at a failpoint, in this process; returns its directory."""
    monkeypatch.chdir(tmp_path)

    def call(fault, *, run=None):
        resume = run is not None
        run = run or tmp_path / "run"
        monkeypatch.setenv(durable.FAULT_VARIABLE, fault)
        durable.arm_from_environment()
        result = rlflow(*command(run, resume=resume))
        monkeypatch.delenv(durable.FAULT_VARIABLE)
        durable.arm_from_environment()
        assert 1 == result.code, result.err
        assert "InjectedFault" in result.err
        return run

    return call


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "run:iteration=raise@5",
        "run:save=raise@2",
        "ckpt:latest:rename=raise@2",
        "run:iteration=raise@1",
        "run:iteration=raise@8",
        "run:saved=raise@3",
        "ckpt:component:write=raise@5",
        "metrics:write=raise@6",
        "ckpt:component:write=raise@1",
    ],
)
def test_a_run_that_broke_continues_to_the_same_bits(rlflow, broken, whole, fault):
    run = broken(fault)
    begins = not list_checkpoints(run / "checkpoints")
    assert begins or not fault.endswith("raise@1")
    result = rlflow(*command(run, resume=True))
    assert 0 == result.code, result.err
    assert begins == ("nothing was saved yet: the run begins again" in result.err)
    assert state(whole) == state(run)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["ckpt:component:write=enospc@3", "ckpt:reported=enospc@2"])
def test_a_disk_that_is_full_beside_the_run_is_its_error_and_it_continues(
    rlflow, tmp_path, monkeypatch, whole, fault
):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    monkeypatch.setenv(durable.FAULT_VARIABLE, fault)
    durable.arm_from_environment()
    result = rlflow(*command(run))
    monkeypatch.delenv(durable.FAULT_VARIABLE)
    durable.arm_from_environment()
    assert (1, 1) == (result.code, result.err.count("error[")), result.err
    assert "error[E701]" in result.err
    assert "continue with: rlflow run" in result.err
    assert 0 == rlflow(*command(run, resume=True)).code
    assert state(whole) == state(run)


@pytest.mark.slow
def test_a_save_waits_for_the_one_before_and_changes_no_bit(rlflow, tmp_path, monkeypatch, whole):
    """The writer is held up in the first of many saves; each is there in the end, in its turn."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    monkeypatch.setenv(durable.FAULT_VARIABLE, "ckpt:component:write=sleep:1.5")
    durable.arm_from_environment()
    result = rlflow(*command(run), "--keep", 9)
    monkeypatch.delenv(durable.FAULT_VARIABLE)
    durable.arm_from_environment()
    assert 0 == result.code, result.err
    kept = [int(path.name[-6:]) for path in list_checkpoints(run / "checkpoints")]
    assert [2, 4, 6, 7] == kept
    assert state(whole) == state(run)


@pytest.mark.slow
def test_a_run_that_breaks_twice_continues_to_the_same_bits(rlflow, broken, whole):
    run = broken("run:iteration=raise@4")
    broken("run:iteration=raise@2", run=run)
    assert 0 == rlflow(*command(run, resume=True)).code
    assert state(whole) == state(run)


@pytest.mark.slow
def test_a_finished_run_goes_on_to_more_iterations(rlflow, tmp_path, monkeypatch, whole):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    assert 0 == rlflow(*command(run, 3)).code
    assert 0 == rlflow(*command(run, 5, resume=True)).code
    assert 0 == rlflow(*command(run, 7, resume=True)).code
    assert state(whole) == state(run)


def test_a_finished_run_resumed_changes_nothing(rlflow, tmp_path, whole):
    run = shutil.copytree(whole, tmp_path / "run")
    assert 0 == rlflow(*command(run, resume=True)).code
    assert state(whole) == state(run)


def test_fewer_iterations_than_are_done_are_refused(rlflow, tmp_path, whole):
    run = shutil.copytree(whole, tmp_path / "run")
    result = rlflow(*command(run, 5, resume=True))
    assert 2 == result.code
    assert f"error[E755]: {run} has done 7 iterations already" in result.err
    assert "  fix          --iterations 7" in result.err
    assert state(whole) == state(run)


def test_resume_without_a_name_takes_the_run_directory_or_the_latest(
    rlflow, tmp_path, monkeypatch, whole
):
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(whole, tmp_path / "mine")
    result = rlflow(*command(run), "--resume")
    assert 0 == result.code, result.err
    assert "resuming after iteration 7 from mine" in result.err
    (tmp_path / "runs").mkdir()
    shutil.move(run, tmp_path / "runs" / "mine")
    words = [word for word in command(run) if word not in ("--run-dir", run)]
    result = rlflow(*words, "--resume")
    assert 0 == result.code, result.err
    assert "resuming after iteration 7 from runs/mine" in result.err


def wait_for(started, beginning):
    """Read what a process says until a line begins so."""
    for line in started.stderr:
        if line.startswith(beginning):
            return
    raise AssertionError(f"the process never said {beginning!r}")


def damage(checkpoint: Path) -> None:
    file = checkpoint / "actor.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(rlflow, tmp_path, whole):
    run = shutil.copytree(whole, tmp_path / "run")
    damage(list_checkpoints(run / "checkpoints")[-1])
    result = rlflow(*command(run, resume=True))
    assert 0 == result.code, result.err
    assert "warning: checkpoint iteration-000007 cannot be used: " in result.err
    assert "resuming after iteration 6" in result.err
    assert state(whole) == state(run)


def test_only_damaged_checkpoints_are_an_error_and_never_a_fresh_start(rlflow, tmp_path, whole):
    run = shutil.copytree(whole, tmp_path / "run")
    for checkpoint in list_checkpoints(run / "checkpoints"):
        damage(checkpoint)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    result = rlflow(*command(run, resume=True))
    assert 1 == result.code
    assert "error[E720]" in result.err
    assert f"No checkpoint in {run / 'checkpoints'} can be used, and a run is never" in result.err
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for changed in ("lock",):
        before.pop(run / changed)
        after.pop(run / changed)
    assert before == after


def test_another_value_is_refused_and_named_unless_it_is_allowed(rlflow, tmp_path, whole):
    run = shutil.copytree(whole, tmp_path / "run")
    for setting, changed, way in (
        ("lr=1e-3", "actor.optimizer.lr: 0.0002 -> 0.001", "--allow-changes lr"),
        ("seed=3", "seed: 0 -> 3", "--allow-changes seed"),
        ("group_size=2", "actor.rollout.n: 4 -> 2", "--from-weights"),
    ):
        result = rlflow(*command(run, resume=True), "--set", setting)
        assert 1 == result.code
        assert "was saved by a run with other values" in result.err
        assert changed in result.err, result.err
        assert f"  fix          {way}" in result.err
    assert state(whole) == state(run)
    wrong = rlflow(*command(run, resume=True), "--set", "lr=1e-3", "--allow-changes", "lr,clap")
    assert "error[E313]: --allow-changes clap: nothing of that name has changed" in wrong.err
    assert (whole / "graph.json").read_bytes() == (run / "graph.json").read_bytes()


@pytest.mark.slow
def test_an_allowed_change_is_recorded_and_allowed_from_then_on(
    rlflow, tmp_path, monkeypatch, whole
):
    """Also where a run dies before it has saved with the new value."""
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(whole, tmp_path / "run")
    words = (*command(run, 9, resume=True), "--set", "lr=1e-3")
    monkeypatch.setenv(durable.FAULT_VARIABLE, "run:iteration=raise@1")
    durable.arm_from_environment()
    broken = rlflow(*words, "--allow-changes", "lr")
    monkeypatch.delenv(durable.FAULT_VARIABLE)
    durable.arm_from_environment()
    assert "from here on actor.optimizer.lr: 0.0002 -> 0.001" in broken.err
    noted = json.loads((run / "run.json").read_text())["resumed"]
    assert [{"actor.optimizer.lr": ["0.0002", "0.001"]}] == [entry["changes"] for entry in noted]
    assert [7] == [entry["iteration"] for entry in noted]

    assert 0 == rlflow(*words).code
    rates = [line.metrics["actor.update/lr"] for line in read_metrics(run / "metrics.jsonl")[:9]]
    assert 7 * [2e-4] + 2 * [1e-3] == pytest.approx(rates)
    back = rlflow(*command(run, 9, resume=True))
    assert "actor.optimizer.lr: 0.001 -> 0.0002" in back.err


@pytest.mark.slow
def test_a_run_starts_from_the_weights_of_another(rlflow, tmp_path, monkeypatch, whole):
    """Rollouts on the other pool begin on them too; moments and the count of steps do not."""
    monkeypatch.chdir(tmp_path)
    _, _, given = state(whole)
    saved = list_checkpoints(whole / "checkpoints")[-1]
    made = []
    for number, source in enumerate((whole, saved)):
        run = tmp_path / f"run{number}"
        result = rlflow(
            *command(run, 2), "--set", "lr=1e-12", "--from-weights", source, "--check-sync"
        )
        assert 0 == result.code, result.err
        made.append(state(run))
    assert made[0] == made[1]
    name, metrics, tensors = made[0]
    assert "iteration-000002" == name
    for key in [key for key in tensors if key.startswith("actor/")]:
        pair = np.frombuffer(tensors[key], np.float32), np.frombuffer(given[key], np.float32)
        assert np.allclose(*pair, rtol=0, atol=1e-9)
    manifest = read_manifest(list_checkpoints(tmp_path / "run0" / "checkpoints")[-1])
    assert {"actor": {"steps": 2}} == manifest.state["optimizers"]
    assert (whole / "metrics.jsonl").read_bytes()[:300] != metrics[:300]
    first = read_metrics(tmp_path / "run0" / "metrics.jsonl")[0].metrics
    assert first["actor.update/rollout_gap"] < 1e-5
    nothing = rlflow(*command(tmp_path / "no", 2), "--from-weights", tmp_path / "nowhere")
    assert 2 == nothing.code
    assert "error[E314]" in nothing.err
    assert "error[E315]" in rlflow(*command(whole, resume=True), "--from-weights", whole).err


@pytest.mark.slow
def test_a_run_on_anothers_weights_that_saved_nothing_begins_on_them_again(
    rlflow, tmp_path, monkeypatch, whole
):
    monkeypatch.chdir(tmp_path)
    made = []
    for fault in ("", "ckpt:component:write=raise@1"):
        run = tmp_path / f"run{len(made)}"
        if fault:
            monkeypatch.setenv(durable.FAULT_VARIABLE, fault)
        durable.arm_from_environment()
        result = rlflow(*command(run, 3), "--from-weights", whole)
        monkeypatch.delenv(durable.FAULT_VARIABLE, raising=False)
        durable.arm_from_environment()
        assert bool(fault) == bool(result.code), result.err
        if fault:
            result = rlflow(*command(run, 3, resume=True))
            assert 0 == result.code, result.err
            assert "starting from the weights of" in result.err
        made.append(state(run))
    assert made[0] == made[1]


@pytest.mark.slow
def test_checkpoints_by_the_clock_leave_the_bits_and_the_best_one_stays(
    rlflow, tmp_path, monkeypatch, whole
):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    words = [word for word in command(run) if word not in EVERY]
    result = rlflow(*words, "--save-every", "0.001s")
    assert 0 == result.code, result.err
    assert state(whole) == state(run)

    best = tmp_path / "best"
    words = [*words[:-1], best, "--save-every", 1, "--keep", 1, "--keep-best", "reward/mean"]
    assert 0 == rlflow(*words).code
    curve = [line.metrics["reward/mean"] for line in read_metrics(best / "metrics.jsonl")[:7]]
    found = [int(path.name[-6:]) for path in list_checkpoints(best / "checkpoints")]
    assert [curve.index(max(curve[1:7]), 1), 7] == found
    ahead = rlflow(*words, "--staleness", 1, "--save-every", "600s", "--dry-run")
    assert "error[E312]" in ahead.err
    assert "--save-every 10,600s" in ahead.err


def test_an_unknown_failpoint_is_refused(rlflow, tmp_path, monkeypatch):
    monkeypatch.setenv(durable.FAULT_VARIABLE, "run:iteratoin=raise")
    durable.arm_from_environment()
    try:
        result = rlflow(*command(tmp_path / "run"))
    finally:
        monkeypatch.delenv(durable.FAULT_VARIABLE)
        durable.arm_from_environment()
    assert 2 == result.code
    assert "did you mean 'run:iteration'" in result.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ctrl_c_stops_cleanly_and_its_line_continues(tmp_path):
    run, straight = tmp_path / "run", tmp_path / "straight"
    started = process(*command(run, 4000), cwd=tmp_path)
    wait_for(started, "iter ")
    started.send_signal(signal.SIGINT)
    code, _, err = ended(started)
    assert 130 == code, err
    assert "Traceback" not in err
    last = err.strip().splitlines()[-1]
    assert last.startswith("stopped after ")
    done = int(last.split()[2])
    assert [f"iteration-{done:06d}"] == [list_checkpoints(run / "checkpoints")[-1].name]
    assert "; continue with: rlflow run " in last
    assert str(run) in last
    words = last.partition("continue with: rlflow ")[2].replace("4000", str(done + 3)).split()
    assert 0 == ended(process(*words, cwd=tmp_path))[0]
    assert 0 == ended(process(*command(straight, done + 3), cwd=tmp_path))[0]
    assert state(straight) == state(run)


SLOW_REWARD = """
import time
import rlflow as rf
from rlflow import ops

def judge(response: str, answer: str) -> float:
    print("judging", flush=True)
    time.sleep(60)
    return 1.0

@rf.pipeline()
def mine(cfg: rf.Config) -> None:
    actor = rf.Model("actor", "MODEL", optimizer=rf.AdamW(lr=1e-4))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=2)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=6)
    adv = ops.advantage("grpo", samples, ops.reward(judge, samples))
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))
"""


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(tmp_path):
    (tmp_path / "mine.py").write_text(SLOW_REWARD.replace("MODEL", str(TINY)))
    started = process("run", "mine.py", "--run-dir", "out", cwd=tmp_path)
    printed = tmp_path / "out" / "logs" / "printed.txt"
    while not (printed.exists() and "judging" in printed.read_text()):
        assert started.poll() is None
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    wait_for(started, "warning: stopping")
    began = time.monotonic()
    started.send_signal(signal.SIGINT)
    code, _, err = ended(started)
    assert 130 == code, err
    assert time.monotonic() - began < 20
    assert "Traceback" not in err
    assert "stopped at once; continue with: rlflow run mine.py" in err
