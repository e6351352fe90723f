"""Buckets that an engine is to take: what it is asked, what is kept, and what goes wrong."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pytest
import torch

from rlflow.engines.process.client.link import LostError, RefusedError
from rlflow.engines.process.client.shared_weights import SharedWeights
from rlflow.engines.process.client.taking import BucketTaker
from rlflow.engines.process.server.rlflow_engine_process.sglang_ways import Lent
from rlflow.engines.reshard.ipc import lend

pytestmark = pytest.mark.torch

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
ROWS = [("a", "float32", (2, 3), 0)]


class Asked:
    """An engine that answers each request by what `answer` makes of its name."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def ask(self, do, fields):
        self.asked.append((do, fields))
        return SimpleNamespace(result=lambda: self.answer(do))


def fails(at, error):
    def answer(do):
        if do == at:
            raise error
        return "7"

    return answer


def run(link):
    taker = BucketTaker(SharedWeights(WEIGHTS), lambda: link)
    taker.open()
    for handle in ("one", "two"):
        taker.take(ROWS, [handle])()
    taker.keep({"a": WEIGHTS["a"] + 1})
    assert taker.begun
    return taker


def test_an_engine_is_asked_bucket_by_bucket_and_then_for_the_version():
    link = Asked(lambda do: 7)
    taker = run(link)
    assert "7" == taker.shut(7)
    assert not taker.begun
    buckets = [{"bucket": ROWS, "handles": [handle]} for handle in ("one", "two")]
    assert [("open", {}), *(("take", each) for each in buckets), ("shut", {"version": 7})] == (
        link.asked
    )
    kept = taker.wanted()
    assert (WEIGHTS["a"] + 1).tolist() == kept["a"].tolist()
    assert WEIGHTS["b"].tolist() == kept["b"].tolist()


@pytest.mark.parametrize("at", ["open", "take"])
@pytest.mark.parametrize("error", [LostError("killed"), RefusedError("no room")])
def test_what_goes_wrong_waits_for_the_end_and_nothing_more_is_asked(at, error):
    """Other ranks wait in the same broadcasts, so that they all go on to the last one."""
    link = Asked(fails(at, error))
    taker = run(link)
    assert ["open", "take"][: 1 + (at == "take")] == [do for do, _ in link.asked]
    with pytest.raises(type(error), match=str(error)):
        taker.shut(7)
    assert not taker.begun
    taker.open()
    assert "open" == link.asked[-1][0]


def test_an_update_that_is_lost_at_its_end_is_lost():
    taker = run(Asked(fails("shut", LostError("killed"))))
    with pytest.raises(LostError):
        taker.shut(7)


def test_what_is_sent_of_a_handle_opens_the_memory_as_it_is_read():
    """As a rank of SGLang reads it: a pickle of names and numbers, with no weight in it."""
    memory = torch.arange(250, dtype=torch.uint8).repeat(4000)
    sent = bytes(ForkingPickler.dumps({"flattened_tensor": Lent(lend(memory, 500_000))}))
    assert len(sent) < 1000
    found = pickle.loads(sent)["flattened_tensor"]
    assert (500_000, torch.uint8) == (found.numel(), found.dtype)
    assert torch.equal(memory[:500_000], found)
    memory[7] = 99
    assert 99 == int(found[7])
