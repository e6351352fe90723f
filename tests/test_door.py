"""The Python door: plans, simulations and runs of a program, by the functions of the commands."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading

import pytest

import rlflow as rf
from rlflow.cli.door.events import RunWatch
from rlflow.cli.door.handle import started
from rlflow.errors import CallbackError, PlanError, RunError, UsageError
from tests.conftest import PIPELINES

GRPO = PIPELINES / "grpo_arithmetic.py"
SPLIT = rf.Placement(
    pools={"train": "1/2", "gen": "1/2"},
    assign={"*": rf.on("train"), "actor.rollout": rf.on("gen")},
)


def test_a_plan_is_that_of_the_command(rlflow):
    plan = rf.compile(GRPO, placement="split", devices="cpu:2@4GB", threads=1)
    words = ("--placement", "split", "--devices", "cpu:2@4GB", "--threads", 1)

    assert rlflow("plan", GRPO, *words).out.strip() == str(plan).strip()
    explained = rlflow("plan", GRPO, *words, "--explain", "actor.update").out.strip()
    assert explained == plan.explain("actor.update").strip()
    with pytest.raises(UsageError, match="E206"):
        plan.explain("actor.updaet")
    assert json.loads(rlflow("simulate", GRPO, *words, "--json").out) == json.loads(
        json.dumps(rf.simulate(plan).as_json())
    )


def test_a_notebook_shows_the_table_and_the_picture():
    plan = rf.compile(GRPO, placement=SPLIT, devices="cpu:4", config={"group_size": 4})
    shown = plan._repr_mimebundle_()

    assert str(plan) == shown["text/plain"]
    assert "train [0:2], gen [2:4]" in shown["text/plain"]
    assert {"<pre", "<svg", "actor.update"} <= {
        mark for mark in ("<pre", "<svg", "actor.update") if mark in shown["text/html"]
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "cpu:2"}, "did you mean 'devices'"),
        ({"devices": 8}, "a text"),
        ({"staleness": True}, "a whole number"),
        ({"backend": "rayy"}, "local or ray"),
        ({"stream": "many"}, "auto"),
        ({"config": {"group_sise": 4}}, "did you mean 'group_size'"),
    ],
)
def test_what_is_no_option_is_said(options, said):
    with pytest.raises(UsageError) as caught:
        rf.compile(GRPO, **options)
    assert said in str(caught.value)


def test_a_plan_that_is_compiled_takes_no_more_options():
    plan = rf.compile(GRPO, devices="cpu:1")
    with pytest.raises(UsageError, match="E820"):
        rf.simulate(plan, devices="cpu:2")
    with pytest.raises(UsageError, match="nothing that declares a pipeline"):
        rf.compile(plan)
    with pytest.raises(PlanError, match="E255"):
        rf.compile(GRPO, placement=SPLIT, devices="cpu:3")


class FakeRun:
    """A run as a watch sees it, which ends where it is stopped."""

    plan = None

    class settings:
        iterations = 5

    def __init__(self):
        self.stopped = threading.Event()

    def stop(self):
        self.stopped.set()


def played(watch, tmp_path, fails=None):
    """The work of a run of five iterations, or of one that fails in the third."""

    def work():
        run = FakeRun()
        watch.take(run, tmp_path)
        watch.ready()
        for iteration in range(6):
            if run.stopped.is_set():
                return
            if iteration == fails:
                raise RunError(summary="the run itself")
            watch.iteration(iteration, {"reward": iteration / 2})

    return work


def test_a_handle_yields_every_iteration_and_no_more(tmp_path):
    watch = RunWatch(())
    run = started(watch, played(watch, tmp_path))
    found = list(run)

    assert [(n, 5, n / 2) for n in range(5)] == [
        (done.iteration, done.iterations, done.metrics["reward"]) for done in found
    ]
    assert found == list(run)
    assert run.done
    assert run.directory == tmp_path


def test_a_callback_that_raises_is_told_apart_from_a_run_that_fails(tmp_path):
    def stumbles(done):
        raise KeyError(done.iteration)

    watch = RunWatch((stumbles,))
    run = started(watch, played(watch, tmp_path))
    with pytest.raises(
        CallbackError, match=r"E821.*stumbles raised KeyError after iteration 0"
    ) as it:
        run.wait()
    assert isinstance(it.value.__cause__, KeyError)
    watch = RunWatch(())
    run = started(watch, played(watch, tmp_path, fails=2))
    seen = []
    with pytest.raises(RunError, match="the run itself"):
        seen.extend(done.iteration for done in run)
    assert "failed" in repr(run)


def test_a_callback_stops_a_run_after_what_has_begun(tmp_path):
    watch = RunWatch((lambda done: done.stop() if done.iteration == 2 else None,))
    run = started(watch, played(watch, tmp_path))

    assert [0, 1, 2] == [done.iteration for done in run]


def test_what_fails_before_the_first_iteration_is_raised_at_once():
    def work():
        raise UsageError(summary="nothing was started")

    with pytest.raises(UsageError, match="nothing was started"):
        started(RunWatch(()), work)


def test_naming_the_door_loads_neither_torch_nor_ray():
    code = "import sys, rlflow as rf; rf.run; print('torch' in sys.modules, 'ray' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "False False" == shown.stdout.strip()


MISTAKES = """
import rlflow as rf

plan = rf.compile("grpo.py", device="h100:8")
plan.explain(3)
for done in rf.run("grpo.py", iterations="ten"):
    done.metrics["loss"] = 1.0
rf.tune("grpo.py").plcement
"""
RIGHT = """
from pathlib import Path

import rlflow as rf


def looks(done: rf.IterationDone) -> None:
    print(done.iteration, done.metrics["reward/mean"], done.seconds)


plan = rf.compile(Path("grpo.py"), placement="split", devices="h100:8", config={"lr": 1e-5})
text: str = plan.explain("actor.update")
period: float = rf.simulate(plan, iterations=4).period
best: rf.Placement = rf.tune("grpo.py", devices="h100:8", top=3).placement
with rf.run("grpo.py", placement=best, callbacks=[looks], iterations=10) as run:
    for done in run:
        if done.metrics["reward/mean"] > 0.9:
            run.stop()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("text", "errors"), [(RIGHT, []), (MISTAKES, [4, 5, 6, 7, 8])])
def test_type_checkers_see_the_door(tmp_path, text, errors):
    file = tmp_path / "mine.py"
    file.write_text(text)
    words = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(file)]
    options = ["--no-error-summary", "--cache-dir", str(tmp_path / "cache")]
    result = subprocess.run([*words, *options], capture_output=True, text=True, check=False)
    found = [line for line in result.stdout.splitlines() if "mine.py:" in line and "error" in line]
    assert errors == sorted({int(line.split(":")[1]) for line in found}), result.stdout


@pytest.mark.slow
@pytest.mark.torch
def test_a_run_is_iterated_over_and_read_as_a_table(tmp_path):
    """In a process of its own, as a user's script has it: figures, printing, stop, resume."""
    script = tmp_path / "mine.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import rlflow as rf

            seen = []
            run = rf.run({str(GRPO)!r}, devices="cpu:1", iterations=40, run_dir="mine",
                         config={{"group_size": 4}}, callbacks=[seen.append])
            for done in run:
                print("done", done.iteration)
                if done.iteration == 2:
                    run.stop()
            assert len(seen) == len(run.metrics) < 40, (len(seen), len(run.metrics))
            assert list(run.metrics.index[:3]) == [0, 1, 2]
            again = rf.run({str(GRPO)!r}, devices="cpu:1", iterations=len(seen) + 1,
                           config={{"group_size": 4}}, resume="mine").wait()
            assert [len(seen)] == [done.iteration for done in again]
            assert set(range(len(seen) + 1)) <= set(again.metrics.index)
            print(again)
            """
        )
    )
    words = [sys.executable, str(script)]
    shown = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert 0 == shown.returncode, shown.stderr
    assert "done 0\ndone 1\ndone 2\n" in shown.stdout
    assert "over" in shown.stdout.splitlines()[-1]
