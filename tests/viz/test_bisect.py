"""`rlflow bisect`: the first action at which two runs differ, on written records and real runs."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from rlflow.batch import ragged, text
from rlflow.runtime.record.edges.names import About
from rlflow.runtime.record.edges.writing import edge_table, write_edge
from tests.conftest import PIPELINES
from tests.documents import graph_document, plan_document

pytestmark = pytest.mark.torch
LARGEST = float(np.finfo("f4").max)
GRPO = PIPELINES / "grpo_arithmetic.py"
SIZES = [1, 3, 2, 2]


def edge(run, node, iteration, fields, *, first=0, total=4, rank=None):
    about = About(
        node=node, iteration=iteration, how="rows", total=total, graph="g", rows_of="actor.rollout"
    )
    rows = np.arange(first, first + len(next(iter(fields.values()))))
    table = edge_table(about, fields, rows, texts=("response",))
    write_edge(run, table, **({} if rank is None else {"rank": rank}))


def rollout():
    """Four rows of two groups."""
    return {
        "group": torch.tensor([0, 0, 1, 1]),
        "response_tokens": ragged(torch.arange(8), torch.tensor(SIZES)),
        "rollout_log_probs": ragged(-torch.arange(8.0), torch.tensor(SIZES)),
        "response": text(["ten", "eleven", "twelve", "nine"]),
        "gap": torch.tensor([0.0, 1.0, float("nan"), 2.0], dtype=torch.bfloat16),
    }


def written(run, iterations=(0, 1), **config):
    """A run of three nodes, whose plan has the reward before the rollout's name in the alphabet."""
    run.mkdir()
    nodes = {
        "actor.rollout": ["response_tokens:int64[token]", "rollout_log_probs:float32[token]"],
        "abacus": ["reward:float32[row]"],
    }
    graph = [{"name": n, "op": n, "outputs": made} for n, made in nodes.items()]
    files = {
        "run": {"name": "grpo", "pipeline": "grpo.py", "command": [], "started": "2025"},
        "config": {"lr": 0.1, "seed": 0, **config},
        "graph": graph_document(*graph),
        "plan": plan_document(*({"id": n, "node": n} for n in nodes)),
    }
    for name, value in files.items():
        (run / f"{name}.json").write_text(json.dumps(value))
    for iteration in iterations:
        edge(run, "actor.rollout", iteration, rollout())
        edge(run, "abacus", iteration, {"reward": torch.zeros(4)})
    figures(run, {n: {"abacus/mean": 0.5, "actor.rollout/length": 2.0} for n in iterations})
    return run


def figures(run, lines):
    """Write metrics.jsonl."""
    rows = [json.dumps({"iteration": n, "metrics": values}) for n, values in lines.items()]
    (run / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))


@pytest.fixture
def runs(tmp_path):
    return written(tmp_path / "a"), written(tmp_path / "b")


def found(rlflow, one, other):
    """What is found, as data."""
    made = rlflow("bisect", one, other, "--json")
    assert 0 == made.code, made.err
    return json.loads(made.out)


def test_runs_that_agree_are_the_same(rlflow, runs):
    made = rlflow("bisect", *runs, "--exit-code")

    assert 0 == made.code
    assert "no difference in what both have left" in made.out
    assert "actor.rollout in 2 iterations" in made.out
    assert found(rlflow, *runs)["same"]


def change(field, place, value):
    """The rollout with one value of a field changed."""
    fields = rollout()
    values = fields[field].values() if fields[field].is_nested else fields[field]
    values[place] = value
    return fields


@pytest.mark.parametrize(
    ("field", "place", "value", "row", "at", "values"),
    [
        ("response_tokens", 5, 9, 2, 1, ["5", "9"]),
        ("rollout_log_probs", 0, 0.0, 0, 0, ["-0.0 (0x80000000)", "0.0 (0x00000000)"]),
        (
            "rollout_log_probs",
            5,
            LARGEST,
            2,
            1,
            ["-5.0 (0xc0a00000)", "3.4028235e+38 (0x7f7fffff)"],
        ),
        ("rollout_log_probs", 5, 0.1, 2, 1, ["-5.0 (0xc0a00000)", "0.1 (0x3dcccccd)"]),
        ("gap", 1, 1.0078125, 1, None, ["1.0 (0x3f80)", "1.0078125 (0x3f81)"]),
        ("group", 3, 2, 3, None, ["1", "2"]),
        ("response", 4, ord("E"), 1, 1, ["'eleven'", "'eEeven'"]),
    ],
)
def test_one_bit_is_found_in_its_row_and_field(rlflow, runs, field, place, value, row, at, values):
    edge(runs[1], "actor.rollout", 1, change(field, place, value))
    edge(runs[1], "abacus", 1, {"reward": torch.ones(4)})
    first = found(rlflow, *runs)["difference"]

    assert (1, "actor.rollout", row, field) == tuple(
        first[key] for key in ("iteration", "node", "row", "field")
    )
    assert (at, values) == (first["place"], first["values"])
    assert (1, 4) == (first["rows"], first["compared"])


def test_iterations_come_before_nodes_and_nodes_stand_as_in_the_plan(rlflow, runs):
    edge(runs[1], "actor.rollout", 1, change("response_tokens", 0, 9))
    edge(runs[1], "abacus", 0, {"reward": torch.ones(4)})
    first = found(rlflow, *runs)["difference"]

    assert (0, "abacus", 4) == (first["iteration"], first["node"], first["rows"])


def test_within_a_row_the_fields_stand_as_the_op_declares_them(rlflow, runs):
    fields = change("response_tokens", 3, 9)
    fields["group"][1] = 5
    edge(runs[1], "actor.rollout", 0, fields)
    first = found(rlflow, *runs)["difference"]

    assert ["response_tokens", "group"] == first["fields"]
    assert ("token", 2) == (first["places"], first["place"])


def test_nan_is_equal_to_itself_and_ranks_are_joined(rlflow, runs):
    shutil.rmtree(runs[1] / "records" / "abacus")
    for rank, first in enumerate((0, 2)):
        half = {"reward": torch.zeros(2)}
        for iteration in (0, 1):
            edge(runs[1], "abacus", iteration, half, first=first, rank=rank)

    assert found(rlflow, *runs)["same"]


def test_a_longer_response_differs_where_the_other_ends(rlflow, runs):
    fields = rollout()
    fields["response_tokens"] = ragged(torch.tensor([0, 7]), torch.tensor([2, 0, 0, 0]))
    edge(runs[1], "actor.rollout", 0, fields)
    first = found(rlflow, *runs)["difference"]

    assert (1, ["the end of the row", "7"]) == (first["place"], first["values"])


def test_rows_that_one_has_recorded_are_compared_and_their_number_is_too(rlflow, runs):
    edge(runs[1], "abacus", 0, {"reward": torch.zeros(2)})
    assert found(rlflow, *runs)["same"]

    edge(runs[1], "abacus", 0, {"reward": torch.zeros(2)}, total=6)
    first = found(rlflow, *runs)["difference"]
    assert (None, ["4", "6"]) == (first["field"], first["values"])
    assert "their number is not" in rlflow("bisect", *runs).out


def test_another_dtype_is_a_difference(rlflow, runs):
    edge(runs[1], "abacus", 1, {"reward": torch.zeros(4, dtype=torch.float64)})

    assert ["float32", "float64"] == found(rlflow, *runs)["difference"]["values"]


def test_what_is_found_is_printed_with_what_is_to_be_typed_next(rlflow, tmp_path, runs):
    other = written(tmp_path / "c", lr=0.2)
    edge(other, "actor.rollout", 1, change("response_tokens", 5, 9))
    figures(other, {0: {"abacus/mean": 0.5}, 1: {"abacus/mean": 0.75}})
    made = rlflow("bisect", runs[0], other, "--exit-code")

    assert 1 == made.code
    assert [
        "first difference: iteration 1, actor.rollout",
        "row 2, group 1, response_tokens, token 1",
        f"{runs[0]}  5",
        f"{other}  9",
        "1 of 4 rows differ",
        "first metric that differs: iteration 1, abacus/mean",
        f"{runs[0]}  0.5",
        f"{other}  0.75",
        "config: lr is 0.1 and 0.2",
    ] == [line.strip() for line in made.out.splitlines()[:9]]
    assert f"rlflow samples {runs[0]} --iteration 1 --group 1 --tokens" in made.out


def test_metrics_tell_what_no_record_does_and_it_is_said(rlflow, runs):
    figures(runs[1], {0: {"abacus/mean": 0.5}, 1: {"abacus/mean": 0.25}})
    made = rlflow("bisect", *runs, "--exit-code")
    assert 1 == made.code
    assert "first difference, by metrics: iteration 1, abacus/mean" in made.out
    assert "in rows that are not recorded" in made.out

    shutil.rmtree(runs[1] / "records")
    made = rlflow("bisect", *runs)
    assert f"note: {runs[1]} has no recorded rows: compared by metrics alone" in made.out
    assert "iteration 1, abacus/mean" in made.out


def test_records_of_other_iterations_are_named_and_metrics_tell(rlflow, tmp_path, runs):
    later = written(tmp_path / "c", iterations=(2, 3))
    figures(later, {1: {"abacus/mean": 0.5}})
    made = rlflow("bisect", runs[0], later)

    assert "actor.rollout 2 to 3" in made.out
    assert "compared by metrics alone" in made.out


def test_what_was_dropped_before_the_first_common_iteration_is_said(rlflow, tmp_path):
    one, other = (written(tmp_path / name, iterations=(4, 5)) for name in "ab")

    assert "rows before iteration 4 are not recorded in both" in rlflow("bisect", one, other).out


def test_runs_without_an_iteration_in_common_are_an_error(rlflow, tmp_path, runs):
    later = written(tmp_path / "c", iterations=(2, 3))
    made = rlflow("bisect", runs[0], later)
    assert 2 == made.code
    assert "error[E337]" in made.err
    assert "metrics of 2 to 3" in made.err

    shutil.rmtree(later / "records")
    (later / "metrics.jsonl").unlink()
    assert f"{later}: no metrics" in rlflow("bisect", runs[0], later).err


def test_runs_of_different_graphs_are_an_error_that_names_the_nodes(rlflow, runs):
    graph = json.loads((runs[1] / "graph.json").read_text())
    graph["nodes"][1]["name"] = "critic.values"
    graph["nodes"][0]["inputs"] = {"prompt": "prompts.prompt"}
    (runs[1] / "graph.json").write_text(json.dumps(graph))
    made = rlflow("bisect", *runs)

    assert 2 == made.code
    assert "error[E338]" in made.err
    assert "critic.values in it alone" in made.err
    assert "read something else: actor.rollout" in made.err


def test_what_is_no_run_is_an_error(rlflow, runs, tmp_path):
    made = rlflow("bisect", runs[0], tmp_path / "bb")

    assert 2 == made.code
    assert "is not a run directory" in made.err


@pytest.mark.slow
def test_real_runs_of_one_seed_agree_and_another_learning_rate_shows_in_the_next_rollout(
    rlflow, tmp_path
):
    """The update of iteration 0 differs; what it makes is first seen in rollouts of 1."""
    sizes = ("--set", "prompts_per_iteration=8", "--set", "group_size=4", "--threads", 1)
    for name, changed in {"a": (), "b": (), "c": ("--set", "lr=1e-2")}.items():
        words = (*sizes, *changed, "--iterations", 3, "--run-dir", tmp_path / name)
        made = rlflow("run", GRPO, "--track", "none", *words)
        assert 0 == made.code, made.err
    same = found(rlflow, tmp_path / "a", tmp_path / "b")
    parted = found(rlflow, tmp_path / "a", tmp_path / "c")

    assert (True, [0, 1, 2]) == (same["same"], same["edges"]["actor.rollout"])
    first = parted["difference"]
    assert (1, "actor.rollout") == (first["iteration"], first["node"])
    assert {"lr": [0.0002, 0.01]} == parted["config"]
    assert (0, "actor.update/lr") == (parted["metric"]["iteration"], parted["metric"]["name"])
