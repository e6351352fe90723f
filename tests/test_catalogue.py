"""The catalogue: every file of `pipelines/` is short, plans everywhere, runs, and is explained.

Files are discovered, so whatever lies there is held to this. `RLFLOW_WRITE_DOCS=1 pytest
tests/test_catalogue.py` draws the graphs of docs/catalogue.md anew, and puts the curves there.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from functools import cache, partial
from pathlib import Path

import pytest

import rlflow as rf
from rlflow.cli.config import load_pipeline
from rlflow.data import arithmetic
from rlflow.graph.headline import headline
from rlflow.report.render import render
from rlflow.report.summary import summary_text
from rlflow.runtime.record.metrics import read_metrics
from rlflow.scheduler.compile import compile_plan, dump_plan
from rlflow.scheduler.devices import cluster
from rlflow.scheduler.plan.saved import plan_from_json
from tests.conftest import PIPELINES, ROOT
from tests.test_pipelines import local

NAMES = sorted(path.stem for path in PIPELINES.glob("*.py"))
# What `make test` runs whole; the others wait for the slow tests.
SHORT = ("grpo_arithmetic", "ppo_arithmetic")
# Runs of these are compared bit by bit in `runtime/test_whole_runs.py`.
COMPARED = {
    "beat_reference",
    "delayed_ppo",
    "kept_samples",
    "mixed_demonstrations",
    "pods",
    "reference_baseline",
    "replayed_grpo",
    "topr",
}
# On Ray each of these sends what the others do not: turns, kept rows, two players, adapters, a
# teacher's distributions, values, pairs.
ON_RAY = {
    "dapo_episodes",
    "distill",
    "ppo_arithmetic",
}
# Of the others what is cut is as in one of these: turns, trips, two players, pairs, values.
CUT = {"dapo", "grpo_arithmetic", "multi_turn", "ppo_arithmetic", "self_play"}
LONGEST_FILE = 60
HELD_OUT = 32
LONGER = {
    "grpo_gsm8k": "a public data set: its columns, its answers and its two splits are named",
    "ppo_gsm8k": "a public data set, and placements from one device to eight nodes",
}
SMALL = {
    "prompts_per_iteration": 4,
    "prompts_per_trip": 6,
    "groups": 2,
    "group_size": 4,
    "batch": 4,
    "max_new_tokens": 8,
    "eval_every": 5,
    "eval_limit": 4,
    "warm_up": 1,
}
# What training is to raise, and how that does on held-out data.
USUAL = (("reward/mean",), ("eval/reward",))
HEADLINES = {
    "dapo": (("shaped/mean",), ("eval/reward",)),
    "dapo_episodes": (("episodes/reward",), ()),
    "distill": (("student.update/loss",), ("eval/reward",)),
    "kept_samples": (("reward/mean",), ()),
    "multi_turn": (("episodes/reward",), ()),
    "ppo_gsm8k": (("reward/mean",), ()),
    "reward_model": (("both/mean",), ("eval/reward",)),
    "self_play": (
        ("alice.reward/mean", "bob.reward/mean"),
        ("alice.eval/reward", "bob.eval/reward"),
    ),
    "sft_arithmetic": (("student.update/loss",), ("eval/reward", "sampled/reward")),
}
PAGE = ROOT / "docs" / "catalogue.md"
IMAGES = ROOT / "docs" / "images"


@cache
def pipeline(name: str):
    return load_pipeline(str(PIPELINES / f"{name}.py"))


def graph(name: str, **settings):
    return pipeline(name).trace(pipeline(name).config(**settings))


@cache
def planned(name: str, placement: str, stream: int | str = 1, **settings):
    """The plan of a placement on CPU devices of one thread."""
    where = pipeline(name).placements[placement].model_copy(update={"stream": stream})
    devices = cluster.cpu_cluster(where.num_devices(), threads=1, memory=4e9)
    return compile_plan(graph(name, **settings), where, devices, near=PIPELINES).plan


def small(name: str) -> tuple[str, ...]:
    """The settings that make a run of a pipeline take a moment."""
    known = pipeline(name).config.model_fields
    return tuple(
        word for key, value in SMALL.items() if key in known for word in ("--set", f"{key}={value}")
    )


def on_gpus() -> list[tuple[str, str]]:
    """The placements that are meant for GPUs: those named after one, and those of a whole node."""
    return [
        (name, placement)
        for name in NAMES
        for placement, where in pipeline(name).placements.items()
        if placement.startswith("h100") or where.num_devices() >= 8
    ]


def for_laptops(name: str) -> list[str]:
    """The placements that this process can run: pools of one device, no engine beside it."""
    return [
        placement
        for placement, where in pipeline(name).placements.items()
        if all(1 == len(devices) for devices in where.devices().values())
        and all(on.options is None for on in where.assign.values())
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_is_a_short_file_that_says_what_it_is(name):
    text = (PIPELINES / f"{name}.py").read_text()
    count = len(text.splitlines())
    assert (count > LONGEST_FILE) == (name in LONGER), f"{name}.py has {count} lines"
    head = text.split('"""')[1]
    assert re.match(r"[A-Z][^\n]+[.:]\n", head)
    assert f"pipelines/{name}.py" in head


@pytest.mark.parametrize("name", NAMES)
def test_it_checks_under_every_placement(rlflow, name):
    result = rlflow("check", PIPELINES / f"{name}.py", "--json")
    assert 0 == result.code, result.err
    assert sorted(pipeline(name).placements) == sorted(json.loads(result.out)["placements"])


@pytest.mark.rows(16)
@pytest.mark.parametrize(("name", "placement"), on_gpus())
def test_a_placement_for_gpus_is_planned_on_them(rlflow, name, placement):
    devices = f"h100:{pipeline(name).placements[placement].num_devices()}"
    words = ("--placement", placement, "--devices", devices, "--model-shape", "qwen2.5-7b")
    result = rlflow("plan", PIPELINES / f"{name}.py", *words)
    assert 0 == result.code, result.err
    assert f"on {devices}" in result.out.splitlines()[0]


@pytest.mark.parametrize(
    "name",
    [
        n if n in CUT else pytest.param(n, marks=pytest.mark.slow)
        for n in NAMES
        if "split" in pipeline(n).placements
    ],
)
def test_it_is_planned_in_as_many_chunks_as_are_worth_it(name):
    plan = planned(name, "split", stream="auto")
    assert "stream" in {note.rule for note in plan.notes}


@pytest.mark.rows(1)
@pytest.mark.torch
@pytest.mark.parametrize(
    "name",
    [
        n
        if n in SHORT
        else pytest.param(n, marks=[pytest.mark.slow, *[pytest.mark.extra] * (n in COMPARED)])
        for n in NAMES
    ],
)
def test_three_iterations_run_and_are_reported_and_exported(rlflow, tmp_path, monkeypatch, name):
    lines = three_iterations(rlflow, tmp_path, monkeypatch, name, "--threads", 1)
    for line in lines:
        assert all(map(math.isfinite, line.metrics.values()))
    assert set(HEADLINES.get(name, USUAL)[0]) <= set(lines[0].metrics)
    summary = summary_text(tmp_path / "here")
    assert f"{graph(name).name}   3 iterations" in summary
    assert all(f"{key}, " in summary for names in HEADLINES.get(name, USUAL) for key in names)
    report = rlflow("report", tmp_path / "here")
    assert 0 == report.code, report.err
    page = (tmp_path / "here" / "report.html").read_text()
    assert page.count("<svg") == len(("plan", "graph"))
    for model in {node.model for node in graph(name).nodes if node.op.name == "update"}:
        into = tmp_path / model
        exported = rlflow("export", tmp_path / "here", "--model", model, "-o", into)
        assert 0 == exported.code, exported.err
        assert list(into.glob("*.safetensors"))


@pytest.mark.rows(12)
@pytest.mark.parametrize("name", NAMES)
def test_its_plans_have_their_headline_are_drawn_and_are_read_back(name):
    """What headlines a run is what its policies learn from."""
    for placement in for_laptops(name):
        plan = planned(name, placement)
        found = headline(plan.graph)
        assert HEADLINES.get(name, USUAL) == (found.training, found.held_out)
        for form in ("dot", "mermaid", "text", "json"):
            assert render(plan.graph, None, level="graph", format=form)
            assert render(plan.graph, plan, level="plan", format=form)
        saved = dump_plan(plan)
        assert saved == dump_plan(plan_from_json(json.loads(saved)))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.torch
@pytest.mark.parametrize(
    "name",
    [n if n in ON_RAY else pytest.param(n, marks=pytest.mark.extra) for n in NAMES],
)
def test_three_iterations_on_ray_have_the_numbers_of_this_process(
    rlflow, tmp_path, monkeypatch, name
):
    words = ("--placement", for_laptops(name)[-1], "--threads", 1, "--backend")
    here, there = (
        three_iterations(rlflow, tmp_path, monkeypatch, name, *words, backend)
        for backend in ("local", "ray")
    )
    for mine, theirs in zip(here, there, strict=True):
        assert mine.metrics == pytest.approx(theirs.metrics, rel=1e-4, abs=1e-6)


def three_iterations(rlflow, folder: Path, monkeypatch, name: str, *words):
    """Metrics of a run of three iterations; one more line is that of the last evaluation."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(rf.data, "arithmetic", partial(arithmetic, test_size=HELD_OUT))
    into = folder / ("there" if "ray" in words else "here")
    folder = folder / f"{into.name}_data"
    folder.mkdir()
    given = (*small(name), *local(f"{name}.py", folder), *words)
    options = ("--iterations", 3, "--run-dir", into, "-q")
    result = rlflow("run", PIPELINES / f"{name}.py", *given, *options)
    assert 0 == result.code, result.err
    lines = read_metrics(into / "metrics.jsonl")
    evaluated = any(node.op.name == "evaluate" for node in graph(name).nodes)
    assert list(range(4 if evaluated else 3)) == [line.iteration for line in lines]
    given = dict(setting.split("=") for setting in small(name)[1::2])
    trained = [node for node in graph(name, **given).nodes if node.op.name == "update"]
    for number, line in enumerate(lines[:3]):
        due = {f"{node.name}/grad_norm" for node in trained if node.due(number)}
        told = {key for key in line.metrics if key.endswith(".update/grad_norm")}
        assert due == told
    return lines


def test_the_norm_of_dr_grpo_is_the_longest_response_allowed():
    loss = dict(graph("dr_grpo", max_new_tokens=20).node("actor.update").params)["loss"]
    assert ("seq-mean-token-sum-norm", 20) == (loss.aggregate, loss.constant)


def test_the_baseline_of_remax_is_the_reward_of_its_greedy_response():
    of = {node.name: node for node in graph("remax").nodes}
    assert 0 == dict(of["greedy"].params)["temperature"]
    (baseline,) = [b for b in of["advantage"].inputs if b.name == "baseline"]
    assert "sampled" == baseline.source
    (carried,) = [b for b in of["sampled"].inputs if b.name == "baseline"]
    assert ("greedy_reward", "reward") == (carried.source, carried.field.name)


@pytest.mark.parametrize("placement", ["colocate", "split"])
def test_the_reference_of_adapters_is_the_model_without_them(placement):
    plan = planned("lora_grpo", placement)
    assert ["actor"] == [model.name for model in plan.graph.models]
    (note,) = [note for note in plan.notes if note.rule == "base weights"]
    assert "ref.log_probs runs on actor without its adapters" in note.text
    assert "base" not in {n.rule for n in planned("lora_grpo", placement, kl_coef=0.0).notes}


def test_stale_rollouts_pause_and_meet_a_decoupled_loss():
    whole, paused = planned("async_grpo", "split"), planned("async_grpo", "paused")
    assert "actor.rollout.resumed" not in {action.node for action in whole.actions}
    assert "actor.rollout.resumed" in {action.node for action in paused.actions}
    loss = dict(graph("async_grpo").node("actor.update").params)["loss"]
    assert "recomputed" == loss.old
    assert loss.correction is not None


def test_each_of_two_players_meets_the_other_and_both_learn():
    of = {node.name: node for node in graph("self_play").nodes}
    for player, other in (("alice", "bob"), ("bob", "alice")):
        assert other == of[f"{player}.rival"].model
        assert player == of[f"{player}.rollout"].model
        (rival,) = [b for b in of[f"{player}.rollout"].inputs if b.name == "rival"]
        assert (f"{player}.rival", "response") == (rival.source, rival.field.name)
        assert "train" == of[f"{player}.update"].op.use


@pytest.mark.parametrize(
    ("response", "rival", "expected"),
    [("12", "13", 1), ("13", "12", -1), ("11", "13", 0), ("12", "12", 0), ("x", "99", -1)],
)
def test_who_is_closer_wins(response, rival, expected):
    outcome = sys.modules[pipeline("self_play").function.__module__].outcome
    assert expected == outcome(response, rival, "12")
    assert -expected == outcome(rival, response, "12")


@pytest.mark.parametrize(("length", "penalty"), [(1, 0), (8, 0), (9, 0.25), (11, 0.75), (12, 1)])
def test_the_last_tokens_of_a_long_response_cost(length, penalty):
    shaped = sys.modules[pipeline("dapo").function.__module__].shaped
    assert 1 - penalty == shaped(1.0, [5] * length)


def sections() -> dict[str, str]:
    """The text below each heading of the page that names a file."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    assert sorted(parts[1::2]) == sorted(set(parts[1::2])), "a section twice"
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_page_explains_it(name):
    text = sections()[name]
    assert f"](images/graph_{name}.svg)" in text
    assert f"rlflow run pipelines/{name}.py" in text
    named = set(re.findall(r"`ops\.(\w+)", text))
    assert named == set(re.findall(r"\bops\.(\w+)\(", (PIPELINES / f"{name}.py").read_text()))


def test_the_page_explains_nothing_that_is_not_there():
    assert NAMES == sorted(sections())
    assert {path.stem for path in IMAGES.glob("graph_*.svg")} == {f"graph_{n}" for n in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_pictures_show_the_graph_and_the_curve_that_was_measured(name):
    path = IMAGES / f"graph_{name}.svg"
    if os.environ.get("RLFLOW_WRITE_DOCS"):
        render(graph(name), None, level="graph", output=path)
    titles = set(re.findall(r"<title>([^<]+)</title>", path.read_text()))
    assert {node.name for node in graph(name).nodes} <= titles
    assert f"{len(graph(name).nodes)} nodes" in path.read_text().replace("&#160;", " ")
    shown = f"![Curve of {name}](images/curve_{name}.svg)"
    graph_shown = f"![Graph of {name}](images/graph_{name}.svg)\n"
    measured = (IMAGES / f"curve_{name}.svg").is_file()
    if measured and os.environ.get("RLFLOW_WRITE_DOCS") and shown not in PAGE.read_text():
        PAGE.write_text(PAGE.read_text().replace(graph_shown, f"{graph_shown}\n{shown}\n"))
    assert measured == (shown in sections()[name])
