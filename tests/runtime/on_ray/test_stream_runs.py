"""Chunks on Ray: rows go from rank to rank chunk by chunk, and make the numbers of one process."""

from __future__ import annotations

import pytest

from tests.runtime.whole_runs import CHUNKS, agree, chunked, compiled, on_ray, played

pytestmark = [pytest.mark.ray, pytest.mark.torch]


def cut(count, placement="split", *, ordered, backend="local"):
    settings = ("n=4", f"ordered={ordered}")
    return compiled(CHUNKS, placement, *settings, stream=str(count), backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [pytest.param(False, marks=pytest.mark.extra), True])
def test_chunks_between_processes_have_the_bits_of_one_process_and_one_piece(ordered):
    from rlflow.runtime.local import LocalMachine
    from rlflow.runtime.worker.worker import Worker

    local = []
    for count in (1, 2):
        plan, file = cut(count, ordered=ordered)
        worker = Worker(plan, seed=0, near=file)
        local.append(played(plan, LocalMachine(plan, worker, threads=1)))
        assert 0 == len(worker.store)
    plan, file = cut(2, ordered=ordered, backend="ray")
    there, left = on_ray(plan, file)

    assert {"actor.rollout", "prompts"} <= chunked(plan, "transfer")
    assert ordered is ("actor.update" in chunked(plan, "run"))
    assert {0} == set(left.values())
    whole, here = local
    assert here == there
    assert 3 == len(whole)
    agree(whole, here, exact="", joined="/(mean|std)$")


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize("ordered", [False, True])
def test_chunks_over_sharded_ranks_make_the_same_tokens_and_losses(ordered):
    one, _ = on_ray(*cut(1, "fsdp", ordered=ordered, backend="ray"))
    plan, file = cut(2, "fsdp", ordered=ordered, backend="ray")
    two, left = on_ray(plan, file)

    assert {"actor.rollout", "ref.log_probs", "bonus", "centred"} <= chunked(plan, "run")
    assert {0} == set(left.values())
    agree(one, two, exact="digest")
