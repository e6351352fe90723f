"""Weights of several ranks that train, in buckets that the real vLLM opens in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlflow.graph.user.engines import VLLM
from tests.conftest import TINY
from tests.engines.ranks import World
from tests.engines.sglang.test_sglang_lent import updated
from tests.engines.test_vllm import PYTHON

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.vllm]


def begun(dtype, ranks):
    """The real engine, whose weights come by the device."""
    options = VLLM(python=PYTHON, max_total_tokens=8192, updates="device")
    how = {"dtype": dtype, "device": "cpu", "devices": range(ranks)}
    return options.load(str(TINY), name="gen", **how)[0]


@pytest.mark.parametrize("beside", [(2,), pytest.param((2, 3), marks=pytest.mark.extra)])
def test_vllm_holds_what_two_ranks_have_trained(beside):
    """By hashes of what each of its ranks holds, which its staging has too."""
    if not Path(PYTHON).exists():
        pytest.skip("no environment with vLLM: make test-vllm builds it")
    ranks = World(2 + len(beside))
    try:
        first, second, owner, *others = ranks.run(
            updated, torch.float32, beside, begun, timeout=550.0
        )
    finally:
        ranks.close()
    assert ([({}, True)] * 2, [0, 1]) == first == second
    assert ([(True, {}, True), ({}, True)] * 2, [0, 1]) == owner
    assert all(other == first for other in others)
