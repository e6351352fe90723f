"""The learning of all pipelines: what counts as learning, what is kept, what is watched."""

from __future__ import annotations

import argparse
import math

import learning_all
import pytest
from learning_all import LEARNED, Learned, Series, gathered, names, watched


def series(*values: tuple[float, ...], metric: str = "eval/reward", held_out: bool = True):
    iterations = tuple(range(len(values[0])))
    return Series(metric=metric, held_out=held_out, iterations=iterations, values=values)


def test_the_gain_is_that_of_each_seed_and_its_error_that_of_their_mean():
    # Gains 0.2, 0.3, 0.4: mean 0.3, deviation 0.1, error 0.1 / sqrt 3.
    found = series((0.1, 9.0, 0.3), (0.5, 9.0, 0.8), (0.0, 9.0, 0.4))
    gain, error = found.gain()
    assert 0.3 == pytest.approx(gain)
    assert 0.1 / math.sqrt(3) == pytest.approx(error)
    assert found.learns()


@pytest.mark.parametrize(
    ("values", "learns"),
    [
        (((0.0, 0.1), (0.0, 0.1)), True),
        (((0.1, 0.0), (0.1, 0.0)), False),
        (((0.5, 0.5), (0.5, 0.5)), False),
        (((0.0, 0.4), (0.0, 0.0)), False),
        (((0.0, 0.4),), None),
    ],
    ids=["rises", "falls", "stays", "by chance", "one seed"],
)
def test_learning_is_more_than_twice_the_error(values, learns):
    assert learns is series(*values).learns()


def test_of_a_loss_less_is_more():
    assert series((2.0, 1.0), (2.1, 1.0), metric="actor.update/loss").learns()
    assert not series((1.0, 2.0), (1.0, 2.1), metric="actor.update/loss").learns()


def test_noisy_series_are_compared_by_ten_values_at_each_end():
    row = (*[0.0] * 5, *[1.0] * 5, *[7.0] * 5, *[1.0] * 5, *[2.0] * 5)
    assert ((0.5,), (1.5,)) == series(row, held_out=False).ends()
    assert ((0.0,), (2.0,)) == series(row).ends()
    assert ((0.0,), (1.0,)) == series((0.0, 0.0, 9.0, 1.0, 1.0), held_out=False).ends()


def test_a_pipeline_is_judged_by_held_out_data_where_there_is_any():
    train, test = series((0.0, 1.0), held_out=False), series((0.0, 1.0))
    assert (test,) == learned(train, test).judged
    assert (train,) == learned(train).judged


def learned(*found: Series, **changed) -> Learned:
    given = {"pipeline": "p", "backend": "local", "placement": "colocate", "seeds": (0,)}
    given |= {"iterations": 2, "digest": "d", "machine": {}, "series": found}
    return Learned(**given | changed)


def test_rewards_and_evaluations_are_watched():
    logged = ["reward/mean", "reward/std", "eval/reward", "actor.update/loss"]
    assert {"reward/mean": False, "eval/reward": True} == watched("grpo", logged)


def test_without_a_reward_what_is_logged_is_watched():
    logged = ["student.update/loss", "eval/reward", "sampled/reward"]
    found = watched("sft_arithmetic", logged)
    assert {"student.update/loss": False, "eval/reward": True, "sampled/reward": True} == found
    assert ["episodes/reward"] == list(watched("multi_turn", ["episodes/reward", "x/loss"]))


def test_curves_are_rows_by_seed():
    runs = [
        [{"iteration": i, "metrics": {"r": float(i * seed)} | ({"e": 1.0} if i else {})}
         for i in range(3)]
        for seed in (1, 2)
    ]  # fmt: skip
    rewards, evaluations = gathered(runs, {"r": False, "e": True})
    assert ((0.0, 1.0, 2.0), (0.0, 2.0, 4.0)) == rewards.values
    assert ((1, 2), ((1.0, 1.0), (1.0, 1.0))) == (evaluations.iterations, evaluations.values)


@pytest.mark.slow
def test_what_is_finished_is_kept_and_what_differs_runs_again(tmp_path, monkeypatch):
    ran = []

    def run_once(name, seed, wanted):
        ran.append(seed)
        return [{"iteration": i, "metrics": {"reward/mean": 0.25 * i}} for i in range(2)]

    monkeypatch.setattr(learning_all, "run_once", run_once)
    options = argparse.Namespace(backend="local", seeds=2, iterations=2, again=False)
    first = learning_all.measured("grpo", options, tmp_path)
    assert [0, 1] == ran
    assert first == learning_all.measured("grpo", options, tmp_path)
    assert [0, 1] == ran
    assert first == LEARNED.validate_json((tmp_path / "grpo.json").read_bytes())
    learning_all.measured("grpo", argparse.Namespace(**vars(options) | {"iterations": 3}), tmp_path)
    assert [0, 1, 0, 1] == ran
    learning_all.measured("grpo", argparse.Namespace(**vars(options) | {"again": True}), tmp_path)
    assert 6 == len(ran)


def test_pipelines_of_the_hub_are_left_out():
    assert {"grpo", "remax", "sft_arithmetic"} <= set(names(""))
    assert not {name for name in names("") if "gsm8k" in name}
    assert ["remax"] == names("remax")
