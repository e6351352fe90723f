from __future__ import annotations

import json
import os
import sys

import pytest
import torch
import vs_verl_handover as bench
from common import HERE, ROOT
from handover_rows import EOS, SHORTEST, answers, sums
from vs_verl_handover import Counts, Line, Report, check

from rlflow.batch import flat, ragged_rows
from rlflow.contract.values import SampleKey, Sampling

pytestmark = pytest.mark.torch
SPEC = {"rows": 6, "prompt": 5, "response": 40, "ragged": True}


@pytest.mark.parametrize("ragged", [False, True])
def test_both_sides_have_the_same_rows_and_those_that_are_short_have_ended(ragged):
    made = list(answers(30, 40, ragged=ragged))
    assert made == list(answers(30, 40, ragged=ragged))
    sizes = [len(tokens) for tokens, _ in made]
    assert sizes == [len(log_probs) for _, log_probs in made]
    assert (SHORTEST <= min(sizes) < 40) if ragged else {40} == set(sizes)
    assert all((tokens[-1] == EOS) == (len(tokens) < 40) for tokens, _ in made)
    assert sums(30, 40, ragged=ragged)[0] == sum(map(sum, (tokens for tokens, _ in made)))


def test_rows_a_second_and_how_many_times_as_many():
    line = Line(
        responses="equal", serialization="", rows=100, ours=(0.5, 1.0, 0.4), theirs=(1.0, 4.0, 1.2)
    )
    assert (2.0, 4.0, 3.0) == pytest.approx(line.ratios)
    assert ("equal", "default", "200", "83", "3.0", "2.0..4.0") == line.row()
    assert len(bench.HEADER) == len(line.row())


def test_a_side_that_has_read_something_else_is_refused():
    tokens, log_probs = sums(6, 40, ragged=True)
    check({"tokens": tokens, "log_probs": log_probs}, SPEC, "verl")
    with pytest.raises(SystemExit, match="verl has read"):
        check({"tokens": tokens + 1, "log_probs": log_probs}, SPEC, "verl")


def test_cases_are_written_in_the_order_in_which_they_came(tmp_path, capsys):
    facts = {
        "date": "d",
        "commit": "c",
        "cpu": "p",
        "flags": [],
        "products": "mkl",
        "cores": 2,
        "memory_gb": 1,
        "python": "3",
    }
    counts = Counts(pairs=2, warmup=0, turns=1, rows=10)
    report = Report({**facts, "load": [0.0]}, counts, tmp_path)
    for _ in range(2):
        for way in bench.SERIALIZATIONS:
            report.add("unequal", way, 0.1, 0.2)
    report.write()
    assert "| unequal | numpy | 100 | 50 | 2.0 |" in (tmp_path / "vs_verl_handover.md").read_text()
    data = json.loads((tmp_path / "vs_verl_handover.json").read_text())
    assert ["", "numpy"] == [case["serialization"] for case in data["cases"]]


def test_what_is_timed_is_the_rollout_a_transfer_and_what_reads_it():
    from handover_side import READ, ROLLOUT, compiled

    plan = compiled({"rows": 4, "prompt": 5, "response": 8})
    (read,) = (action for action in plan.actions if action.id == READ)
    (moved,) = (a for a in plan.actions if a.kind == "transfer" and a.node == ROLLOUT)
    assert {"response_tokens", "rollout_log_probs"} <= set(moved.fields)
    assert moved.id in {dep.action for dep in read.after}


def test_the_engine_answers_what_the_other_side_has(monkeypatch):
    """The real process, which the worker asks as it asks SGLang."""
    sys.path.insert(0, str(HERE / "pipelines"))
    from handover import Answers

    monkeypatch.setitem(os.environ, "HANDOVER", json.dumps(SPEC))
    model, rollout = Answers(max_total_tokens=4096).load(
        str(ROOT / "pipelines" / "assets" / "arith-tiny"),
        name="actor@gen/answers",
        dtype=torch.float32,
        device="cpu",
    )
    try:
        prompts = ragged_rows([[7] * 5] * 6, torch.int64)
        made = rollout.generate(
            prompts,
            Sampling(max_new_tokens=40),
            SampleKey(seed=0, iteration=0, stream="s"),
            torch.arange(6),
        )
    finally:
        model.close()
    rows = list(answers(6, 40, ragged=True))
    assert [token for tokens, _ in rows for token in tokens] == flat(made.response_tokens).tolist()
    assert [p for _, log_probs in rows for p in log_probs] == flat(made.log_probs).tolist()
    assert [len(tokens) < 40 for tokens, _ in rows] == made.finished.tolist()
