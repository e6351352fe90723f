"""What is logged of an engine with what it generates, of each of its devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import rlflow as rf
from rlflow.scheduler.plan.plan import Instance

pytestmark = pytest.mark.torch


def logged(tp: int, **told: float) -> dict[str, float]:
    from rlflow.runtime.worker.loaded import Loaded

    instance = Instance(
        name="actor@gen/sglang",
        model="actor",
        pool="gen",
        devices=tuple(range(tp)),
        uses=("rollout",),
        trained=False,
        tp=tp,
        options=rf.SGLang(),
    )
    model = SimpleNamespace(measured=lambda: told)
    loaded = Loaded(instance, model, None, None, None, ())
    return {name: stat.total for name, stat in loaded.figures().items()}


@pytest.mark.parametrize(("here", "each"), [(4, 1e9), (2, 2e9)])
def test_what_an_engine_keeps_is_of_the_ranks_of_its_host(here: int, each: float) -> None:
    """4 GB of all four ranks, or of the two that this host has of them."""
    assert each == logged(4, residual_bytes=4e9, ranks_here=here)["asleep_bytes"]


def test_what_an_engine_keeps_is_of_all_ranks_where_it_does_not_say() -> None:
    assert 1e9 == logged(4, residual_bytes=4e9)["asleep_bytes"]


def test_tokens_of_a_pool_are_those_of_a_replica() -> None:
    found = logged(2, pool_tokens=8192.0, start_seconds=20.0)
    assert {"pool_tokens": 8192.0, "start_seconds": 20.0} == found
