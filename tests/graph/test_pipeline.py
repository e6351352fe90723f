"""Configs, settings, placements: what a user types around a graph."""

from __future__ import annotations

import dataclasses

import pytest
from pydantic import Field, ValidationError

import rlflow as rf
from rlflow import ops
from rlflow.errors import GraphError, PlanError, UsageError
from rlflow.graph import graph as graph_module
from rlflow.graph import op as op_module
from rlflow.graph.headline import headline
from rlflow.graph.pipeline import make_config


class Settings(rf.Config):
    group_size: int = 8
    lr: float = 1e-3
    name: str = "a"
    sizes: list[int] = Field(default=[1])
    limit: int | None = None


def test_settings_are_parsed_by_the_fields_type():
    config = make_config(
        Settings, ["group_size=16", "lr=3e-4", "name=7", "sizes=[2, 3]", "limit=5"]
    )

    assert (16, 3e-4, "7", [2, 3], 5) == (
        config.group_size,
        config.lr,
        config.name,
        config.sizes,
        config.limit,
    )


def test_the_last_setting_wins():
    assert 3 == make_config(Settings, ["group_size=2", "group_size=3"]).group_size


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("grup_size=2", "did you mean 'group_size'"),
        ("group_size=many", "--set group_size: Input should be a valid integer"),
        ("group_size", "has no '='"),
        ("iterations=0", "greater than or equal to 1"),
    ],
)
def test_a_wrong_setting_is_a_usage_error(setting, text):
    with pytest.raises(UsageError) as caught:
        make_config(Settings, [setting])

    assert text in str(caught.value)
    assert 2 == caught.value.exit_code


def test_a_pipeline_without_a_config_type():
    with pytest.raises(GraphError, match=r"does not say what its config is"):

        @rf.pipeline()
        def bad(cfg):
            pass


def test_an_unknown_placement_names_near_ones():
    @rf.pipeline(placements={"split": rf.Placement(pools={"a": 1}, assign={"*": rf.on("a")})})
    def declared(cfg: rf.Config) -> None:
        pass

    with pytest.raises(UsageError, match="did you mean 'split'"):
        declared.placement("spilt")


def test_a_wrong_model_points_at_its_line():
    @rf.pipeline()
    def declared(cfg: rf.Config) -> None:
        rf.Model("actor", "x", optimizer=rf.AdamW(lr=-1))

    with pytest.raises(GraphError) as caught:
        declared.trace()

    (found,) = caught.value.findings
    assert "lr: Input should be greater than 0" == found.what
    assert 'rf.Model("actor"' in found.where.text


def test_pools_by_count_take_the_free_numbers():
    placement = rf.Placement(pools={"a": 2, "b": [0, 3], "c": 1}, assign={"*": rf.on("a")})

    assert {"a": (1, 2), "b": (0, 3), "c": (4,)} == placement.devices()
    assert 5 == placement.num_devices()


@pytest.mark.parametrize(
    ("pools", "count", "expected"),
    [
        ({"train": "3/4", "gen": "1/4"}, 64, {"train": 48, "gen": 16}),
        ({"all": "*"}, 7, {"all": 7}),
        ({"a": "2/3", "b": "*"}, 9, {"a": 6, "b": 3}),
        ({"a": "1/2", "b": 1, "c": "*", "d": [0, 1]}, 8, {"a": 4, "b": 1, "c": 1, "d": 2}),
    ],
)
def test_shares_take_whole_devices_of_all_there_are(pools, count, expected):
    placement = rf.Placement(pools=pools, assign={})
    found = placement.at(count).devices()

    assert expected == {name: len(devices) for name, devices in found.items()}
    assert sum(expected.values()) == len({d for devices in found.values() for d in devices})
    assert placement.num_devices() <= count


@pytest.mark.parametrize(
    ("pools", "count", "nearest"),
    [
        ({"train": "3/4", "gen": "1/4"}, 10, "8 or 12"),
        ({"train": "3/4", "gen": "1/4"}, 3, "4"),
        ({"a": "1/2", "b": "1/3"}, 8, "6 or 12"),
        ({"a": "1/2", "b": 2, "c": "*"}, 4, "6"),
    ],
)
def test_shares_that_do_not_divide_the_devices_name_counts_that_work(pools, count, nearest):
    placement = rf.Placement(pools=pools, assign={})
    with pytest.raises(PlanError, match="E255") as caught:
        placement.at(count, "mine", "h100")

    (finding,) = caught.value.findings
    assert finding.expected.endswith(f": of {nearest}")
    assert finding.fix.startswith("--devices h100:")
    for works in nearest.split(" or "):
        assert int(works) >= placement.at(int(works)).num_devices()


@pytest.mark.parametrize(
    ("pools", "why"),
    [
        ({"a": "3/4", "b": "1/2"}, "add up to 5/4"),
        ({"a": "*", "b": "*"}, "two pools"),
        ({"a": "1/1", "b": 1}, "leave none"),
        ({"a": "1/1", "b": [0]}, "leave none"),
        ({"a": "4"}, "a number of devices: 4"),
        ({"a": "0/4"}, "no share"),
        ({"a": "4/0"}, "no share"),
        ({"a": "0.75"}, "no share"),
    ],
)
def test_shares_that_no_number_of_devices_has_are_refused_where_they_are_written(pools, why):
    with pytest.raises(ValidationError, match=why):
        rf.Placement(pools=pools, assign={})


@pytest.mark.parametrize(
    "options",
    [
        {"pools": {"a": []}, "assign": {}},
        {"pools": {"a": [0, 0]}, "assign": {}},
        {"pools": {"a": [-1]}, "assign": {}},
        {"pools": {"a": 0}, "assign": {}},
        {"pools": {}, "assign": {}},
        {"pools": {"a": 1}, "assign": {}, "stalenes": 1},
    ],
)
def test_impossible_placements_are_refused(options):
    with pytest.raises(ValidationError):
        rf.Placement(**options)


def test_a_pool_that_a_placement_does_not_have_is_told():
    with pytest.raises(GraphError, match=r"E134.*names pool 'b'"):
        rf.Placement(pools={"a": 1}, assign={"*": rf.On(pool="b")})


def test_what_the_scheduler_touches_is_frozen():
    for module in (graph_module, op_module):
        kinds = [k for k in vars(module).values() if dataclasses.is_dataclass(k)]
        assert all(kind.__dataclass_params__.frozen for kind in kinds)


def test_a_schedule_needs_its_end():
    with pytest.raises(ValidationError, match="needs total_steps="):
        rf.AdamW(lr=1e-3, schedule="cosine")
    with pytest.raises(ValidationError, match="does nothing"):
        rf.AdamW(lr=1e-3, total_steps=10)


def one(response: str) -> float:
    return 1.0


def test_a_headline_is_what_is_shown_and_names_a_node():
    def declare(cfg: rf.Config) -> None:
        actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=2)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
        reward = ops.reward(one, samples, name="won")
        ops.update(actor, samples, ops.advantage("grpo", samples, reward), loss=rf.PolicyLoss())

    assert ("won/mean",) == headline(rf.pipeline()(declare).trace()).training
    said = rf.pipeline(headline=["actor.update/kl", "won/max"])(declare).trace()
    assert ("actor.update/kl", "won/max") == headline(said).training
    with pytest.raises(GraphError, match=r"E133.*'wom/mean'") as caught:
        rf.pipeline(headline="wom/mean")(declare).trace()
    assert ("won",) == caught.value.findings[0].near
