"""An instance's devices, by what they share."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow.scheduler.plan.instance import Instance
from rlflow.scheduler.plan.row_layout import Place

MESH = Instance(
    name="actor@all",
    model="actor",
    pool="all",
    devices=(3, 1, 4, 0, 5, 9, 2, 6),
    uses=("rollout",),
    trained=False,
    tp=2,
    fsdp=2,
)
ENGINE = replace(MESH, fsdp=1, options=rf.SGLang())
DRAFTER = replace(MESH, fsdp=1, inside=ENGINE.name)
PAIRS = ((3, 1), (4, 0), (5, 9), (2, 6))


@pytest.mark.parametrize("instance", [MESH, ENGINE, DRAFTER])
def test_tensor_parallel_groups_are_neighbours_in_the_pool(instance):
    assert PAIRS == instance.row_groups
    assert len(PAIRS) == instance.row_parts
    alone = replace(instance, tp=1)
    assert tuple((device,) for device in MESH.devices) == alone.row_groups == alone.processes


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ({"pp": 2, "fsdp": 1}, ((3, 1, 4, 0), (5, 9, 2, 6))),
        ({"pp": 2, "fsdp": 2}, ((3, 1, 5, 9), (4, 0, 2, 6))),
        ({"pp": 4, "fsdp": 2, "tp": 1}, ((3, 4, 5, 2), (1, 0, 9, 6))),
        ({"pp": 2, "fsdp": 1, "tp": 1, "cp": 2}, ((3, 1, 4, 0), (5, 9, 2, 6))),
    ],
)
def test_stages_see_the_rows_of_the_first(sizes, groups):
    """Stages lie outside of `fsdp`: what passes between them is least."""
    instance = replace(MESH, **sizes)
    assert groups == instance.row_groups
    assert len(groups) == instance.row_parts
    assert {device for part in groups for device in part} == set(MESH.devices)


@pytest.mark.parametrize(
    ("instance", "processes", "owners"),
    [
        (MESH, tuple((device,) for device in MESH.devices), MESH.devices),
        (ENGINE, PAIRS, (3, 4, 5, 2)),
        (DRAFTER, PAIRS, (3, 4, 5, 2)),
    ],
)
def test_a_replica_of_an_engine_is_one_process(instance, processes, owners):
    assert processes == instance.processes
    assert owners == instance.owners


@pytest.mark.parametrize(
    ("instance", "parts"),
    [
        (MESH, PAIRS),
        (ENGINE, ((3,), (4,), (5,), (2,))),
        (None, tuple((device,) for device in MESH.devices)),
    ],
)
def test_rows_lie_with_those_that_share_layers_or_with_the_owner(instance, parts):
    assert parts == Place(pool="all", devices=MESH.devices, instance=instance).row_parts
