"""A replica of the real engine in two parts, as on two hosts: both on this one, at loopback."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlflow.engines.process.client.process_memory import members
from rlflow.engines.process.nodes import Nodes, free_port
from rlflow.errors import RunError
from tests.engines.sglang.conftest import (
    GREEDY,
    PROMPTS,
    group,
    needs_sglang,
    options,
    paired,
    same,
    start,
)

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.sglang, pytest.mark.extra]

ADDRESS = "127.0.0.2"


@pytest.fixture(scope="module")
def parts():
    """What two workers have made: model and rollout, the first host's first; nothing is left."""
    needs_sglang()
    port = free_port(ADDRESS)

    def make(rank):
        nodes = Nodes(address=ADDRESS, port=port, rank=rank, count=2)
        return start(options=options(), nodes=nodes, devices=(rank,))

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as threads:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        making = [threads.submit(make, rank) for rank in (0, 1)]
    made = [each.result() for each in making if each.exception() is None]
    leaders = [group(model)[0] for model, _ in made]
    try:
        yield [each.result() for each in making]
    finally:
        for model, _ in made:
            model.close()
    assert [[], []] == [members(leader) for leader in leaders]


@pytest.fixture(scope="module")
def pair(parts):
    """The first part, which answers, and the embedded engine."""
    (model, rollout), _ = parts
    return paired(model, rollout)


def test_an_update_reaches_the_ranks_of_both(pair):
    same(*pair.generate(PROMPTS, GREEDY))
    for version in (1, 2):
        pair.update(version, seed=version)
        same(*pair.generate(PROMPTS, GREEDY))
        assert {} == pair.model.check()
    first, second = pair.model.checksums()
    assert first.keys() == second.keys()
    assert first["model.norm.weight"] == second["model.norm.weight"]
    cut = "model.layers.0.mlp.gate_up_proj.weight"
    assert first[cut] != second[cut]


def test_the_part_of_another_host_holds_no_weights_and_no_rows(parts):
    _, (model, _) = parts
    assert {} == model.shards()
    assert 0 == model.replica.facts["pool_tokens"]


def test_a_part_that_is_lost_is_the_end_of_all(parts, pair):
    """It is the last test: the rank of the second host is killed, and nobody replaces it."""
    (first, _), (second, _) = parts
    groups = [group(first), group(second)]
    os.kill(groups[1][-1], signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(RunError) as caught:
            pair.generate(PROMPTS, GREEDY)
        (finding,) = caught.value.findings
        assert "E675" == finding.code
        assert "'gen' was lost, which lies on several hosts" in finding.what
    with pytest.raises(RunError, match="E675"):
        pair.update(3, seed=3)
    assert 1 == first.replica.starts == second.replica.starts
    with pytest.raises(RunError, match="E675"):
        second.replica.link()
    assert [[], []] == [members(leader) for leader, *_ in groups]
