"""`rlflow simulate`, and `rlflow diff` of plans that were saved."""

from __future__ import annotations

import json

import pytest

from tests.conftest import PIPELINES

GRPO = PIPELINES / "grpo_arithmetic.py"
GSM8K = PIPELINES / "grpo_gsm8k.py"
SPLIT = ("--placement", "split", "--devices", "cpu:2@4GB", "--threads", "1")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_simulate_tells_period_idle_time_and_its_causes(rlflow):
    result = rlflow("simulate", GRPO, *SPLIT)
    assert 0 == result.code, result.err
    assert "placement split on cpu:2" in result.out
    assert "waiting for" in result.out
    assert "% actor.update" in result.out
    assert "train[0] |" in result.out
    assert "next: rlflow simulate" in result.err


def test_simulate_json_is_all_there_is_on_standard_output(rlflow):
    texts = {rlflow("simulate", GRPO, *SPLIT, "--iterations", 5, "--json").out for _ in range(2)}
    (text,) = texts
    found = json.loads(text)
    assert 5 == found["iterations"]
    assert ["train[0]", "gen[1]", "host"] == [use["label"] for use in found["devices"]]


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("gantt.svg", b"<svg "),
        ("gantt.png", b"\x89PNG"),
        ("gantt.pdf", b"%PDF"),
        ("page.html", b"<!doctype html>"),
        ("found.json", b"{"),
        ("found.txt", b"grpo"),
    ],
)
def test_simulate_writes_what_the_suffix_says(rlflow, tmp_path, name, head):
    result = rlflow("simulate", GRPO, *SPLIT, "--iterations", 4, "-o", name)
    assert 0 == result.code, result.err
    assert f"wrote {name}\n" == result.err
    assert (tmp_path / name).read_bytes().startswith(head)


@pytest.mark.parametrize("name", ["gantt.gif", "gantt"])
def test_a_suffix_that_is_no_format_is_refused_before_anything_is_played(rlflow, name):
    result = rlflow("simulate", "nothing.py", "-o", name)
    assert 2 == result.code
    assert f"error[E238]: -o {name} names no format" in result.err


def test_a_file_that_cannot_be_written_is_named(rlflow):
    result = rlflow("simulate", GRPO, *SPLIT, "-o", "no/such/gantt.svg")
    assert 2 == result.code
    assert "error[E238]: cannot write no/such/gantt.svg: No such file or directory" in result.err


def test_a_plan_of_unknown_cost_is_refused_with_the_models_to_name(rlflow, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    result = rlflow("simulate", GSM8K, "--devices", "h100:8")
    assert 4 == result.code
    assert "error[E236]: 4 of " in result.err
    assert "actor=Qwen/Qwen2.5-0.5B-Instruct" in result.err
    assert "--model-shape" in result.err


def save(rlflow, placement, name):
    devices = "cpu:1@4GB" if placement == "colocate" else "cpu:2@4GB"
    words = ("--placement", placement, "--devices", devices, "--threads", "1", "-o", name)
    assert 0 == rlflow("plan", GRPO, *words).code


def test_saved_plans_are_compared_as_the_placements_are(rlflow):
    save(rlflow, "colocate", "a.json")
    save(rlflow, "split", "b.json")
    result = rlflow("diff", "a.json", "b.json")
    assert 0 == result.code, result.err
    assert "only in split\n    reshard actor@train -> actor@gen" in result.out
    assert 1 == rlflow("diff", "a.json", "b.json", "--exit-code").code
    assert 0 == rlflow("diff", "a.json", "a.json", "--exit-code").code
    found = json.loads(rlflow("diff", "a.json", "b.json", "--json").out)
    assert ["colocate", "split"] == found["placements"]


def test_saved_plans_of_one_placement_are_called_by_their_files(rlflow):
    save(rlflow, "split", "before.json")
    save(rlflow, "split", "after.json")
    assert ["before", "after"] == rlflow("diff", "before.json", "after.json").out.split()[:2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a.json", "b.json", "--devices", "cpu:2"), "without --devices"),
        (("a.json", "b.json", "--placement", "x"), "without --placement"),
        (("a.json", "b.json", "c.json"), "two saved plans, got 3"),
        (("a.json", GRPO), "two saved plans, got 2"),
    ],
    ids=["devices", "placement", "three", "mixed"],
)
def test_other_pairs_are_refused(rlflow, words, said):
    result = rlflow("diff", *words)
    assert 2 == result.code
    assert "error[E239]: " in result.err
    assert said in result.err


def test_a_saved_plan_that_was_changed_is_refused(rlflow, tmp_path):
    save(rlflow, "split", "a.json")
    text = (tmp_path / "a.json").read_text()
    (tmp_path / "b.json").write_text(text.replace('"placement": "split"', '"placement": "mine"'))
    result = rlflow("diff", "a.json", "b.json")
    assert 2 == result.code
    assert "error[E237]: b.json is not a saved plan of this version" in result.err
