"""`rlflow samples`: what a run recorded, chosen, sorted and shown."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from rlflow.batch import ragged, text
from rlflow.report.interactive import samples
from rlflow.report.interactive.samples import sample_table
from rlflow.runtime.record.edges.names import About
from rlflow.runtime.record.edges.writing import edge_table, write_edge

pytestmark = pytest.mark.torch
WORDS = ["ten", "<b>eleven</b>", "twelve", "nine"]


def edge(run, node, iteration, fields):
    about = About(
        node=node, iteration=iteration, how="rows", total=8, graph="g", rows_of="actor.rollout"
    )
    rows = np.arange(len(next(iter(fields.values()))))
    write_edge(run, edge_table(about, fields, rows, texts=("prompt", "response")))


@pytest.fixture
def run(tmp_path):
    """A run in progress: rewards of the iteration that goes on are not there yet."""
    facts = {"name": "grpo", "pipeline": "grpo.py", "started": "2025"}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    for iteration in (3, 4):
        sizes = torch.tensor([1, 3, 2, 2])
        log_probs = ragged(-torch.arange(8.0), sizes)
        rollout = {
            "group": torch.tensor([0, 0, 1, 1]),
            "prompt": text(["5+5", "5+6", "6+6", "4+5"]),
            "response": text(WORDS),
            "response_tokens": ragged(torch.arange(8), sizes),
            "rollout_log_probs": log_probs,
            "finished": torch.tensor([True, True, False, True]),
        }
        edge(tmp_path, "actor.rollout", iteration, rollout)
    edge(tmp_path, "reward", 3, {"reward": torch.tensor([0.5, 1.0, 0.0, float("nan")])})
    edge(tmp_path, "advantage", 3, {"advantages": torch.tensor([0.0, 1.0, -1.0, 0.0])})
    return tmp_path


def shown(rlflow, run, *words):
    """The responses that are shown, in order."""
    made = rlflow("samples", run, "--json", *words)
    return [sample["response"] for sample in json.loads(made.out or "[]")]


def test_the_worst_sample_of_an_iteration_is_one_command_away(rlflow, run):
    worst = shown(rlflow, run, "--iteration", "3", "--sort", "reward", "--limit", "1")
    best = shown(rlflow, run, "--iteration", "3", "--sort=-reward", "--limit", "1")

    assert ["twelve"] == worst
    assert ["<b>eleven</b>"] == best


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), WORDS),
        (("--iteration", "all", "--limit", "20"), [*WORDS, *WORDS]),
        (("--iteration", "3", "--reward", "0.2:"), WORDS[:2]),
        (("--length", ":1"), WORDS[:1]),
        (("--text", "^(TEN|4.5)$"), ["ten", "nine"]),
        (("--group", "1"), WORDS[2:]),
        (("--reward", "0:1"), []),
    ],
)
def test_samples_are_chosen(rlflow, run, words, expected):
    assert expected == shown(rlflow, run, *words)


def test_a_sample_has_the_fields_of_all_edges_of_its_row(rlflow, run):
    made = rlflow("samples", run, "--iteration", "3", "--json")
    first, *_, last = json.loads(made.out)

    assert (0.5, 0.0, [-0.0]) == (
        first["reward"],
        first["advantages"],
        first["rollout_log_probs"],
    )
    assert "nan" == last["reward"]


@pytest.mark.parametrize("words", [(), ("--group", "1"), ("--tokens", "--colour", "ratio")])
def test_it_is_printed_for_a_terminal(rlflow, run, words):
    made = rlflow("samples", run, "--iteration", "3", *words)

    assert 0 == made.code
    assert "twelve" in made.out or "no ratio is recorded" in made.out
    assert "cut" in made.out


def test_a_page_has_everything_within_it_and_runs_nothing_that_was_sampled(rlflow, run, tmp_path):
    page = tmp_path / "samples.html"
    made = rlflow("samples", run, "--iteration", "3", "--html", page)
    text = page.read_text()

    assert 0 == made.code
    assert "&lt;b&gt;eleven&lt;/b&gt;" in text
    assert "<b>eleven" not in text
    assert "http" not in text
    assert 4 == text.count("<article")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--sort", "rewrd"), "E320"),
        (("--reward", "a:b"), "E320"),
        (("--text", "("), "E320"),
        (("--iteration", "9"), "E734"),
        (("--node", "advantag"), "E734"),
        (("--html", "/no/such/folder/x.html"), "E321"),
    ],
)
def test_what_cannot_be_shown_is_an_error_with_a_code(rlflow, run, words, said):
    made = rlflow("samples", run, *words)

    assert 2 == made.code
    assert said in made.err


def test_a_run_without_a_record_says_how_to_have_one(rlflow, tmp_path):
    facts = {"name": "grpo", "pipeline": "grpo.py", "started": "2025"}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    made = rlflow("samples", tmp_path)

    assert 2 == made.code
    assert "has no recorded rows" in made.err
    assert "rlflow run PIPELINE" in made.err


def test_the_page_of_a_run_has_its_samples(run):
    """Newest and oldest; a number that is none is left out, a field that another repeats too."""
    table = sample_table(run)

    assert table is not None
    assert "8 samples of 2 recorded iterations." == table.remark
    assert {"iteration", "group", "length", "advantage", "reward", "response"} <= {*table.columns}
    assert "advantages" not in table.columns
    made = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [(3, text) for text in WORDS] + [(4, text) for text in WORDS] == [
        (row["iteration"], row["response"]) for row in made
    ]
    assert [0.5, 1, 0, None] == [row["reward"] for row in made[:4]]
    assert [1, 3, 2, 2] == [row["length"] for row in made[:4]]


def test_of_many_iterations_the_page_has_some_spread_evenly(run, monkeypatch):
    monkeypatch.setattr(samples, "MOST_SAMPLES", 5)
    monkeypatch.setattr(samples, "LONGEST_TEXT", 3)
    table = sample_table(run)

    assert table is not None
    assert {4} == {row[0] for row in table.rows}
    assert "4 samples of 1 recorded iterations of 2, spread evenly." == table.remark
    assert "<b>…" == table.rows[1][table.columns.index("response")]


def test_a_run_without_records_has_none_on_its_page(tmp_path):
    assert sample_table(tmp_path) is None
