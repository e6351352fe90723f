"""The Python door: plans, simulations and runs of a program, by the functions of the commands."""

from __future__ import annotations

import inspect
import json
import keyword
import re
import subprocess
import sys
import textwrap
import threading
from typing import get_type_hints

import click
import numpy as np
import pytest
import torch

import rlflow as rf
from rlflow.batch import ragged, text
from rlflow.cli.door.asking import PlanOptions, RunOptions, SearchOptions
from rlflow.cli.door.evaluating import EvalOptions
from rlflow.cli.door.events import RunWatch
from rlflow.cli.door.handle import started
from rlflow.cli.main import cli
from rlflow.errors import CallbackError, PlanError, RunDirError, RunError, UsageError
from rlflow.runtime.record.edges.names import About
from rlflow.runtime.record.edges.writing import edge_table, write_edge
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
    assert plan._repr_html_() == shown["text/html"]
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
        ({"only": ["actor.update", 3]}, "a text, or several"),
        ({"only": "actor.updaet"}, "did you mean 'actor.update'"),
        ({"from_": "actor.rollout"}, "RUN:NODE"),
    ],
)
def test_what_is_no_option_is_said(options, said):
    with pytest.raises(UsageError) as caught:
        rf.compile(GRPO, **options)
    assert said in str(caught.value)


# What commands have for a terminal: a program prints, writes and compares what it was given.
OF_A_TERMINAL = {"json", "output", "no_color", "dry_run", "show_passes", "explain", "range"}
# A program calls `rf.tune` for each size.
OF_A_TERMINAL |= {"sweep", "price"}


@pytest.mark.parametrize(
    ("command", "options", "beside"),
    [
        ("plan", PlanOptions, set()),
        ("simulate", PlanOptions, {"iterations"}),
        ("tune", SearchOptions, {"max_staleness", "top"}),
        ("run", RunOptions, set()),
        ("eval", EvalOptions, set()),
    ],
)
def test_a_program_has_the_options_of_the_command(command, options, beside):
    asked = [p for p in cli.commands[command].params if isinstance(p, click.Option)]
    names = {each.opts[-1].lstrip("-").replace("-", "_") for each in asked}
    words = {f"{name}_" if keyword.iskeyword(name) else name for name in names}
    said = {"config" if word == "set" else word for word in words} - OF_A_TERMINAL
    own = set(inspect.signature(getattr(rf, command)).parameters) if command != "plan" else set()

    assert said == set(get_type_hints(options)) | beside
    assert beside <= own


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ({"sample": 4}, "E820", "did you mean 'samples'"),
        ({"samples": 0}, "E820", "'--samples'"),
        ({"samples": 4, "k": 8}, "E370", "-n 8"),
        ({"k": "many"}, "E820", "k='many'"),
        ({"answer": "boxd"}, "E366", "did you mean 'boxed'"),
        ({"iteration": 3}, "E361", "not the directory of a run"),
        ({"pipeline": 3}, "E820", "pipeline=3"),
        ({"deadline": -1.0}, "E209", "--deadline"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused_as_by_the_command(options, code, said):
    with pytest.raises(UsageError, match=rf"(?s){code}.*{re.escape(said)}"):
        rf.eval(GRPO, **options)


def test_a_part_of_the_graph_is_compiled_and_played():
    part = {"only": "actor.rollout", "devices": "cpu:1"}
    plan = rf.compile(GRPO, **part)

    assert {"actor.rollout", "actor.rollout.sink"} <= {node.name for node in plan.graph.nodes}
    assert not plan.graph.has_node("actor.update")
    assert plan.hash == rf.simulate(GRPO, **part).plan.hash


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


def sampled(run, iterations):
    """Record a rollout with its rewards, but for the rewards of the last iteration."""
    for iteration in iterations:
        fields = {
            "group": torch.tensor([0, 0, 1]),
            "response": text(["ten", "eleven", "nine"]),
            "response_tokens": ragged(torch.arange(6), torch.tensor([1, 3, 2])),
        }
        rewards = {"reward": torch.tensor([0.5, 1.0, 0.0])}
        edges = {"actor.rollout": fields, "reward": rewards}
        for node in edges if iteration != iterations[-1] else ["actor.rollout"]:
            how = {"how": "every", "total": 3, "graph": "g", "rows_of": "actor.rollout"}
            about = About(node=node, iteration=iteration, **how)
            write_edge(run, edge_table(about, edges[node], np.arange(3), texts=("response",)))


@pytest.mark.torch
def test_samples_are_the_rows_that_the_command_shows(rlflow, tmp_path):
    facts = {"name": "grpo", "pipeline": "grpo.py", "started": "2025"}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    watch = RunWatch(())
    run = started(watch, played(watch, tmp_path)).wait()
    with pytest.raises(RunDirError, match="E734"):
        run.samples()
    sampled(tmp_path, [2, 3, 4])
    found = run.samples()
    shown = json.loads(rlflow("samples", tmp_path, "--iteration", "all", "--json").out)

    assert [2, 2, 2, 3, 3, 3, 4, 4, 4] == found["iteration"].tolist()
    assert [each["response_tokens"] for each in shown] == found["response_tokens"].tolist()
    assert set(shown[0]) == set(found.columns)
    assert [0.5, 1.0, 0.0] == run.samples([3])["reward"].tolist()
    assert found["reward"].isna().tolist() == [False] * 6 + [True] * 3
    with pytest.raises(RunDirError, match="E734"):
        run.samples([9])
    with pytest.raises(RunDirError, match=r"did you mean +'actor\.rollout'"):
        run.samples(node="actor.rolout")


@pytest.mark.parametrize(
    ("look", "said"),
    [(lambda run: run.metrics, "run.metrics"), (lambda run: run.samples(), "run.samples()")],
)
def test_without_pandas_the_message_says_what_brings_it(tmp_path, monkeypatch, look, said):
    monkeypatch.setitem(sys.modules, "pandas", None)
    watch = RunWatch(())
    run = started(watch, played(watch, tmp_path)).wait()
    with pytest.raises(UsageError, match=r"E822") as caught:
        look(run)
    assert f"{said} is a pandas DataFrame" in str(caught.value)
    assert "rlflow-engine[notebook]" in str(caught.value)


def test_what_fails_before_the_first_iteration_is_raised_at_once():
    def work():
        raise UsageError(summary="nothing was started")

    with pytest.raises(UsageError, match="nothing was started"):
        started(RunWatch(()), work)


def test_naming_the_door_loads_neither_torch_nor_ray():
    code = "import sys, rlflow as rf; rf.run; print('torch' in sys.modules, 'ray' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "False False" == shown.stdout.strip()


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
            samples = run.samples()
            assert set(samples["iteration"]) == set(range(len(seen))), samples
            assert samples.query("iteration == 1")["response_tokens"].map(len).min() > 0
            assert samples[["reward", "advantages"]].notna().all(axis=None)
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


@pytest.mark.slow
@pytest.mark.torch
def test_a_stage_runs_alone_and_another_on_what_it_recorded(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import rlflow as rf

            part = rf.run({str(GRPO)!r}, devices="cpu:1", iterations=1, run_dir="part",
                          only="actor.rollout", track="none",
                          config={{"group_size": 4}}).wait()
            assert not part.plan.graph.has_node("actor.update")
            train = rf.run({str(GRPO)!r}, devices="cpu:1", iterations=1, run_dir="train",
                           from_="part:actor.rollout", record=["actor.rollout=rows:3", "reward"],
                           config={{"group_size": 4}}).wait()
            assert 3 == train.samples()["response"].notna().sum()
            assert not (part.directory / "tensorboard").exists()
            """
        )
    )
    words = [sys.executable, str(script)]
    shown = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert 0 == shown.returncode, shown.stderr
