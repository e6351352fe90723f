"""Weights that reach the real engine through files, by broadcasts and in memory that it opens."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from rlflow.contract.values import Shard
from rlflow.engines.process.client.link import Link
from rlflow.engines.process.client.process_memory import members
from rlflow.engines.process.client.updates import Broadcast
from rlflow.engines.reshard.streaming import BucketStream, Lending
from tests.engines.sglang.conftest import (
    GREEDY,
    PROMPTS,
    Pair,
    group,
    needs_sglang,
    options,
    paired,
    same,
    start,
)
from tests.engines.sglang.updating import generates_with_updates, leaves_nothing_in_the_cache

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.sglang]


WAYS = ("disk", "group", "device")


@pytest.fixture(scope="module", params=WAYS)
def reached(request):
    """An engine that weights reach in this way, the embedded one beside it; nothing is left."""
    needs_sglang()
    model, rollout = start(options=options(updates=request.param))
    pair = paired(model, rollout)
    yield pair if request.param != "device" else Lent(*pair)
    leader, directory = group(model)[0], Path(model.replica.facts["directory"])
    model.close()
    assert [] == members(leader)
    assert not directory.exists()


class Lent(Pair):
    """Weights come as a reshard in one process brings them: in buckets that the engine opens."""

    def bring(self, weights, version, *, limit=200_000):
        source = {
            name: Shard(shape=tuple(t.shape), box=tuple((0, n) for n in t.shape), tensor=t)
            for name, t in weights.items()
        }
        lent, device = [Lending((0,), self.model.taker())], torch.device("cpu")
        made = BucketStream(source, lent, None, device=device, limit=limit, check=True)
        made.run()
        self.model.loaded(version)
        assert {} == made.check()


def written(model):
    return [*Path(model.replica.facts["directory"]).glob("version-*")]


def test_an_update_is_what_it_generates_with(reached):
    generates_with_updates(reached)
    assert [] == written(reached.model)


def test_an_update_right_after_generation_leaves_nothing_in_the_cache(reached):
    leaves_nothing_in_the_cache(reached)


def test_several_buckets_are_one_update(reached, monkeypatch):
    if not isinstance(reached.model.way, Broadcast):
        pytest.skip("a file has no buckets, and other buckets are several in any case")
    table = reached.model.staging.table
    monkeypatch.setattr(reached.model.way, "_buckets", [table[:1], table[1:9], table[9:]])
    reached.update(3, seed=33)
    same(*reached.generate(PROMPTS, GREEDY))
    assert {} == reached.model.check()


def test_it_sleeps_and_is_filled_before_its_pool_is_there(reached):
    reached.model.sleep_pool()
    reached.model.sleep("discard")
    reached.model.wake()
    reached.update(4, seed=4)
    reached.model.wake_pool()
    same(*reached.generate(PROMPTS, GREEDY))
    reached.rollout.sleep("offload")
    reached.rollout.wake()
    assert ("ready", 4) == (reached.model.state, reached.model.version)
    same(*reached.generate(PROMPTS, GREEDY))


def kill(model):
    os.kill(model.replica.facts["pid"], signal.SIGKILL)


def stop(model):
    """Stop every process of the engine."""
    os.killpg(group(model)[0], signal.SIGSTOP)


@pytest.mark.parametrize(
    ("reached", "disturb"),
    [
        pytest.param(way, how, marks=[pytest.mark.extra] * ((way, how) != ("device", kill)))
        for way in WAYS
        for how in (kill, stop)
    ],
    indirect=["reached"],
)
def test_an_engine_lost_while_it_takes_weights_comes_back_with_them(reached, disturb, monkeypatch):
    """All but its guardian and its socket are held, and it is disturbed once it has been asked.

    Nothing of it may stand still for ten seconds.
    """
    model, asked, ask = reached.model, threading.Event(), Link.ask

    def watched(link, do, fields, **more):
        call = ask(link, do, fields, **more)
        if do in {"update", "open"}:
            asked.set()
        return call

    reached.update(7, seed=7)
    model.replica.link().patience = 10.0
    monkeypatch.setattr(Link, "ask", watched)
    starts, first = model.replica.starts, group(model)
    directory = Path(model.replica.facts["directory"])
    for pid in first[2:]:
        os.kill(pid, signal.SIGSTOP)
    updating = threading.Thread(target=reached.update, args=(8, 8))
    updating.start()
    assert asked.wait(60)
    disturb(model)
    updating.join(200)
    assert not updating.is_alive()
    assert (starts + 1, 8) == (model.replica.starts, model.version)
    same(*reached.generate(PROMPTS, GREEDY))
    assert {} == model.check()
    assert not {*first} & {*group(model)}
    assert [] == members(first[0]) == written(model)
    assert not directory.exists()
    reached.update(9, seed=9)
    same(*reached.generate(PROMPTS, GREEDY))
