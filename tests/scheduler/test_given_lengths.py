"""Lengths that are said, counted or seen: what estimates make of them, and what stays."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.graph.user.lengths import Length, read_lengths
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.lengths import (
    Load,
    ResponseLengths,
    after,
    as_seen,
    before,
    between,
    scaled_lengths,
)
from rlflow.scheduler.costs.rows.assumptions import seconds_rest_on
from rlflow.scheduler.costs.rows.given import given_lengths, ninety_fifth
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.devices.measured import MeasuredCosts, Sample
from rlflow.scheduler.models import prompts as counted
from rlflow.scheduler.models.prompts import NOT_LOADED, counted_prompts
from rlflow.scheduler.models.shapes import known_shape
from rlflow.scheduler.plan.text import plan_text
from tests.budget import examples
from tests.scheduler.examples import COLOCATE, compiled_with, grpo

ROOT = Path(__file__).parents[2]
ARITH = ROOT / "pipelines/assets/arith-tiny/tokenizer.json"
SEEN = st.lists(st.integers(1, 500), min_size=2, max_size=60)


@pytest.mark.parametrize(
    "said",
    [Length(1800, 4000, 8192), Length(100, 101), Length(50, 190), Length(900, 990, 1000)],
    ids=str,
)
def test_said_lengths_have_the_mean_and_the_tail_that_are_said(said):
    """Drawn 40,000 times, cut off: within a few standard errors, and none beyond the longest."""
    found = given_lengths(said, 16_000, 512)
    assert found.mean == said.mean
    assert found.longest == 16_000
    assert ninety_fifth(found) == pytest.approx(said.p95, rel=0.01)
    draw = random.Random(1)
    from rlflow.scheduler.costs.lengths import location

    drawn = [
        min(draw.lognormvariate(location(found), found.spread), found.end) for _ in range(40_000)
    ]
    assert fmean(drawn) == pytest.approx(said.mean, rel=0.03)
    assert found.survival(found.end) == 0


def test_a_longest_that_is_said_bounds_the_tail_and_not_the_memory():
    short = given_lengths(Length(300, max=400), 8192, 512)
    assert 400 == short.end
    assert short.expected_longest(10_000) <= 400 < ResponseLengths(8192, 300).expected_longest(9999)
    load = Load(rows=8, prompts=8, prompt=10, lengths=short)
    assert 8202 == load.longest_row


@settings(max_examples=examples(100), deadline=None)
@given(SEEN, st.integers(1, 400))
def test_seen_lengths_are_cut_as_rows_are(seen, tokens):
    """Few enough to be kept whole: every derived mean is that of the rows themselves."""
    lengths = as_seen(1000, seen)
    if lengths.fixed:
        assert not len(set(seen)) - 1 or lengths.mean >= 0.98 * max(seen)
        return
    assert lengths.mean == pytest.approx(fmean(seen))
    cut = before(lengths, tokens)
    assert cut.mean == pytest.approx(fmean(min(each, tokens) for each in seen))
    rest, share = after(lengths, tokens)
    left = [each - tokens for each in seen if each > tokens]
    assert share == pytest.approx(len(left) / len(seen))
    if left:
        assert rest.mean == pytest.approx(fmean(left))
    half = between(lengths, 0.0, 0.5)
    assert half.mean <= lengths.mean
    assert scaled_lengths(lengths, 1.0, 2.0).mean == pytest.approx(lengths.mean)


def test_many_seen_lengths_keep_their_mean_and_their_longest():
    draw = random.Random(2)
    seen = [round(draw.lognormvariate(5, 0.8)) + 1 for _ in range(20_000)]
    lengths = as_seen(100_000, seen)
    assert lengths.mean == pytest.approx(fmean(seen), rel=0.03)
    assert max(seen) == lengths.end
    assert lengths.expected_longest(1e6) == pytest.approx(max(seen), rel=0.02)


def planned(words: str, **options: object):
    graph = replace(grpo(), lengths=read_lengths(words) if words else None)
    return compiled_with(graph, COLOCATE, **options).plan


def seconds(plan):
    return {action.id: action.cost.seconds for action in plan.actions}


def test_longer_rows_take_longer_and_the_memory_stays():
    plain, short, long = (planned(words) for words in ("", "response=2", "response=7"))
    for name in ("actor.rollout", "ref.log_probs", "actor.update"):
        assert seconds(short)[name] < seconds(long)[name]
    assert plain.peaks == short.peaks == long.peaks
    assert seconds(planned("prompt=90"))["actor.update"] > seconds(plain)["actor.update"]
    assert planned("prompt=90").peaks[0] > plain.peaks[0]


def test_what_is_assumed_said_is_what_is_assumed():
    """Words that say what is assumed anyway change no byte but the line that says so."""
    plain = plan_text(planned(""))
    said = plan_text(planned("response=4"))
    half = [line for line in plain.splitlines() if "inputs:" not in line]
    assert "8 at most (assumed: half of the limit)" in plain
    assert half == [line for line in said.splitlines() if "inputs:" not in line]
    assert "responses 4 tokens in the mean, 95 % within 8 (assumed tail), 8 at most (given)" in said


def test_a_mean_beyond_the_limit_is_refused():
    with pytest.raises(PlanError, match="E358") as raised:
        planned("response=500")
    assert "max_new_tokens, 8" in raised.value.render()


def test_measured_seconds_follow_from_the_lengths_that_are_said():
    """Twice what tables say was measured: at other lengths it is twice what they say there."""
    graph, cluster = grpo(), parse_cluster("cpu:1", 1)
    plan = compile_plan(graph, COLOCATE, cluster).plan
    costs = Costs(graph=plan.graph, cluster=cluster, shapes=shapes_of(plan.graph))
    node, instance = plan.graph.node("actor.rollout"), plan.instances[0]
    key = costs.run_key(node, instance, 1, rlflow_whole())
    table = costs.table(node, instance, 1).seconds
    sample = Sample("run", 5, 2 * table, 0.0)
    measured = MeasuredCosts().adding([(key, costs.setting, sample)])
    said = replace(
        costs,
        graph=replace(plan.graph, lengths=read_lengths("response=2")),
        cluster=replace(cluster, measured=measured),
    )
    assert key == said.run_key(node, instance, 1, rlflow_whole())
    found = said.run(node, instance, 1)
    assert found.seconds == pytest.approx(2 * said.table(node, instance, 1).seconds)
    assert found.seconds < 2 * table
    assert found.source.startswith("measured, 1 run")


def rlflow_whole():
    from rlflow.scheduler.costs.pieces import WHOLE

    return WHOLE


def shapes_of(graph):
    from rlflow.scheduler.models.shapes import model_shape

    return {model.name: model_shape(model, None) for model in graph.models}


def test_prompts_are_tokenized_once_and_kept(tmp_path, monkeypatch):
    """Of 1000 problems 256 are taken evenly; the second count loads no tokenizer."""
    from tokenizers import Tokenizer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = rf.data.generator(lambda i: {"prompt": "7+" * (1 + i)}, size=100, columns=("prompt",))
    own = Tokenizer.from_file(str(ARITH))
    counts = [len(own.encode("7+" * (1 + i)).ids) for i in range(100)]
    found = counted_prompts(data, ARITH)
    assert (max(counts), fmean(counts)) == (found.longest, found.mean)
    monkeypatch.setattr(counted, "_counted", None)
    assert found == counted_prompts(data, ARITH)
    assert 1 == len(json.loads((tmp_path / "rlflow/prompts.json").read_text()))
    changed = Path(shutil.copy(ARITH, tmp_path / "tokenizer.json"))
    changed.write_text(changed.read_text() + "\n")
    assert "characters of 64 rows" == counted_prompts(data, changed).how


def test_a_file_that_is_no_tokenizer_counts_as_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    data = rf.data.generator(lambda i: {"prompt": "x" * 30}, size=10, columns=("prompt",))
    assert 30 == counted_prompts(data, tmp_path / "tokenizer.json").longest
    assert not (tmp_path / "rlflow").exists()


def test_prompts_without_a_tokenizer_count_as_characters_and_far_data_is_assumed():
    data = rf.data.generator(lambda i: {"prompt": "x" * 30}, size=100, columns=("prompt",))
    assert 30 == counted_prompts(data, None).longest
    assert NOT_LOADED == counted_prompts(None, ARITH)
    assert NOT_LOADED == counted_prompts(
        rf.data.huggingface("org/none", columns=("prompt",)), ARITH
    )


def test_a_mean_prompt_counts_for_seconds_and_the_longest_for_memory():
    from rlflow.scheduler.costs.roofline import Roofline
    from rlflow.scheduler.devices.hardware import KINDS

    roof = Roofline(kind=KINDS["h100"], shape=known_shape("qwen2.5-7b"), size=2)
    lengths = ResponseLengths(512, 200.0)
    long = Load(rows=64, prompts=8, prompt=4000, lengths=lengths)
    usual = replace(long, usual=500.0)
    short = Load(rows=64, prompts=8, prompt=500, lengths=lengths)
    assert roof.rollout(usual) == roof.rollout(short) < roof.rollout(long)
    held = [sum(size for _, size in roof.rollout_holds(load)) for load in (usual, long, short)]
    assert held[0] == held[1] > held[2]


def test_the_line_says_where_each_is_from():
    """Rates and rewards count as measured once no action of them is assumed."""
    graph, cluster = grpo(), parse_cluster("cpu:1", 1)
    plan = compile_plan(graph, COLOCATE, cluster).plan
    costs = Costs(graph=plan.graph, cluster=cluster, shapes=shapes_of(plan.graph))
    assert ("rewards 5 us a row (assumed)", "rates of cpu (table)") == plan.inputs[-2:]
    measured = tuple(
        replace(action, cost=replace(action.cost, source="measured, 3 runs"))
        for action in plan.actions
    )
    told = seconds_rest_on(replace(plan, actions=measured), costs)
    assert ("rewards (measured)", "rates (measured)") == told[-2:]
    h100 = compile_plan(graph, COLOCATE, parse_cluster("h100:1", 1)).plan
    assert "products at 72 % of h100's peak (published)" == h100.inputs[-1]
