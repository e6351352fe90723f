from __future__ import annotations

import json

import models
import pytest
from learning import Curve, milestones, table, trained_seconds, unpaused
from models import SIZES, Size, endless_directory
from sides import held_out, iteration_ends, problems, rlflow_side, trl_side
from vs_trl import cases


def span(iteration: int, start: float, end: float, node: str = "actor.update") -> dict[str, object]:
    return {"iteration": iteration, "start": start, "end": end, "node": node}


def test_an_iteration_ends_with_its_last_action():
    spans = [{"origin": 1.0}, span(0, 0, 4), span(1, 1, 2), span(0, 4, 5), span(1, 5, 7)]
    assert [5, 7] == iteration_ends(spans)


def test_a_run_directory_gives_seconds_and_tokens_after_warm_up(tmp_path):
    (tmp_path / "spans").mkdir()
    spans = [span(number, number, number + 0.5 * number) for number in range(4)]
    (tmp_path / "spans" / "main.jsonl").write_text("\n".join(map(json.dumps, spans)))
    lines = [{"iteration": n, "metrics": {"actor.rollout/length": n}} for n in range(4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = rlflow_side(tmp_path, 7.0, 2, rows=128)
    assert (1.5, 1.5) == found.seconds
    assert (256.0, 384.0) == found.tokens


def test_trl_starts_its_clock_before_the_first_iteration():
    result = {"ends": [10.0, 12.0, 15.0, 19.0], "tokens": [1, 2, 3]}
    found = trl_side(result, 7.0, 1)
    assert (3.0, 4.0) == found.seconds
    assert (2, 3) == found.tokens


def test_both_sides_get_what_the_pipeline_draws():
    import rlflow as rf

    drawn = problems(prompts=4, iterations=3, seed=5)
    second = [row["prompt"] for row in rf.data.arithmetic(digits=2).batch(1, 4, 5)]
    assert 12 == len(drawn)
    assert [row["prompt"] for row in drawn[4:8]] == second
    assert drawn != problems(prompts=4, iterations=3, seed=6)


def test_held_out_problems_are_not_trained_on():
    test = {row["prompt"] for row in held_out()}
    assert 512 == len(test)
    assert not test & {row["prompt"] for row in problems(16, 100, 0)}


def test_every_size_is_timed_with_and_without_reference_fixed_and_to_eos():
    names = [case.name for case in cases(list(SIZES))]
    assert ["2x128 fixed", "2x128 fixed ref", "2x128 eos", "2x128 eos ref"] == names[:4]
    assert 8 == len(set(names))


def test_the_endless_twin_has_an_eos_beyond_the_vocabulary(tmp_path):
    base = tmp_path / "model"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"vocab_size": 44, "eos_token_id": 1}))
    eos = {"id": 1, "content": "<eos>", "special": True}
    (base / "tokenizer.json").write_text(json.dumps({"added_tokens": [eos]}))
    (base / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (base / "model.safetensors").write_bytes(b"weights")
    twin = endless_directory(base)
    assert {"vocab_size": 44, "eos_token_id": 44} == models.read(twin / "config.json")
    added = models.read(twin / "tokenizer.json")["added_tokens"]
    assert [eos, {"id": 44, "content": "<never>", "special": True}] == added
    assert "<never>" == models.read(twin / "tokenizer_config.json")["eos_token"]
    assert (twin / "model.safetensors").read_bytes() == b"weights"
    assert 1 == models.read(base / "config.json")["eos_token_id"]


def test_a_cached_model_is_trained_once(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(models, "CACHE", tmp_path)
    monkeypatch.setattr(models, "train", lambda size, path, log: trained.append(path) or 0.5)
    size = Size(name="s", layers=1, hidden=8, intermediate=8, sft_iterations=3, target=1.0)

    def build(command, log):
        models.Path(command[-1]).mkdir(parents=True)

    monkeypatch.setattr(models, "run", build)
    assert models.warm_directory(size) == models.warm_directory(size)
    assert 1 == len(trained)


def test_training_seconds_leave_evaluations_out():
    spans = [
        {"origin": 0.0},
        span(0, 1.0, 3.0, node="eval"),
        span(0, 3.0, 4.0),
        span(1, 4.0, 6.0),
        span(2, 6.0, 9.0, node="eval"),
    ]
    assert 0.0 == trained_seconds(spans, 0)
    assert 1.0 == trained_seconds(spans, 1)
    assert 3.0 == trained_seconds(spans, 2)
    result = {"ends": [0.0, 1.0, 12.0], "paused": [0.0, 10.0, 5.0]}
    assert [unpaused(result, number) for number in range(3)] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [((0, 3, 6), (0, 3, 6)), (tuple(range(0, 301, 25)), (0, 50, 100, 150, 200, 250, 300))],
)
def test_milestones_are_evenly_spread(iterations, expected):
    assert expected == milestones(iterations)


def test_the_learning_table_has_every_run_and_both_means():
    curves = [
        Curve(side=side, seed=seed, iterations=(0, 5), accuracy=(0.0, up), seconds=(0.0, 8.0))
        for side, seed, up in (("rlflow", 0, 0.5), ("rlflow", 1, 0.7), ("TRL", 0, 0.2))
    ]
    header, rows = table(curves)
    assert ("run", "0", "5", "training s") == header
    assert ("rlflow mean", "0.000", "0.600", "8.0") == rows[2]
    assert [row[0] for row in rows[3:]] == ["TRL seed 0", "TRL mean"]
