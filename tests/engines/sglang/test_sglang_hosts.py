"""A replica of the real engine in two parts, as on two hosts: both on this one, at loopback."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from rlflow.engines.nodes import Nodes, free_port
from rlflow.engines.sglang.held import members
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
    port, made = free_port(ADDRESS), {}

    def make(rank):
        nodes = Nodes(address=ADDRESS, port=port, rank=rank, count=2)
        made[rank] = start(options=options(), nodes=nodes, devices=(rank,))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        threads = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    leaders = [group(model)[0] for model, _ in made.values()]
    yield made[0], made[1]
    for model, _ in made.values():
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
