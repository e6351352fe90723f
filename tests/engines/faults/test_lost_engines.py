"""An engine that is killed or stopped, and a worker that is: what goes on, and what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from rlflow.batch import ragged_rows
from rlflow.contract.values import Reach, SampleKey, Sampling
from rlflow.engines.process.client.link import Link
from rlflow.engines.process.client.process_memory import members
from rlflow.errors import RunError
from tests.engines.faults.conftest import for_each
from tests.engines.sglang.conftest import ROOT, TINY, group, same

pytestmark = [pytest.mark.torch, pytest.mark.slow, for_each("sglang", "vllm")]

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10], [11, 3], [9, 12, 4, 13, 5, 14]]
LONG = Sampling(max_new_tokens=100, temperature=0.0, n=32)
GREEDY = Sampling(max_new_tokens=12, temperature=0.0)
KEY = SampleKey(seed=1, iteration=0, stream="gen")
# Seconds that an engine which is stopped is waited for.
PATIENCE = 4.0


class InFlight:
    """A call in a thread of its own; `disturb` is called once the engine works on it.

    With the first answer the process that computes is stopped, lest the last one comes before.
    From then on what is asked of this engine may stand still for `PATIENCE`; until then it may for
    however long a busy machine takes.
    """

    def __init__(self, model, call, disturb):
        self.made, self.error, self.held = None, None, False
        link = model.replica.link()
        link.patience, before = PATIENCE, link.moved
        link._pass = self.holding(model, link._pass)
        began = time.monotonic()
        self.thread = threading.Thread(target=self.run, args=(call,))
        self.thread.start()
        while link.moved == before and self.thread.is_alive():
            # Who waits looks at it again whenever what it was has passed.
            link.patience = PATIENCE + time.monotonic() - began
            time.sleep(0.001)  # A loop that only asks would take a core from the engine.
        link.patience = PATIENCE
        disturb(model)

    def holding(self, model, pass_on):
        def passed(*words, **more):
            if not self.held:
                self.held = True
                os.kill(group(model)[-1], signal.SIGSTOP)
            pass_on(*words, **more)

        return passed

    def run(self, call):
        try:
            self.made = call()
        except RunError as error:
            self.error = error

    def wait(self):
        self.thread.join(240)
        assert not self.thread.is_alive()
        return self


def kill(model):
    os.kill(model.replica.facts["pid"], signal.SIGKILL)


def kill_guardian(model):
    os.kill(group(model)[0], signal.SIGKILL)


def stop(model):
    """Stop every process of the engine."""
    model.replica.link().patience = PATIENCE
    os.killpg(group(model)[0], signal.SIGSTOP)


def stop_scheduler(model):
    """Stop the last process only, which computes: the socket goes on answering."""
    for pid in group(model)[2:]:
        os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize(
    "disturb",
    [
        kill,
        *(
            pytest.param(how, marks=pytest.mark.extra)
            for how in (kill_guardian, stop, stop_scheduler)
        ),
    ],
)
def test_unanswered_rows_are_asked_of_a_new_engine(pair, disturb):
    pair.update(3, seed=3)
    old, starts = group(pair.model), pair.model.replica.starts
    prompts = ragged_rows(PROMPTS, torch.int64)
    found = InFlight(
        pair.model,
        lambda: pair.rollout.generate(prompts, LONG, KEY, torch.arange(128)),
        disturb,
    ).wait()
    assert found.error is None
    same(found.made, pair.plain.generate(prompts, LONG, KEY, torch.arange(128)))
    assert starts + 1 == pair.model.replica.starts
    assert {} == pair.model.check()
    assert not {*old} & {*group(pair.model)}
    assert [] == members(old[0])


def test_pieces_of_an_engine_that_is_killed_make_every_row_once(pair, monkeypatch):
    """It is killed as soon as more rows have come than the first piece has, but not all."""
    prompts = ragged_rows(PROMPTS, torch.int64)
    sampling = Sampling(max_new_tokens=110, temperature=1.5, n=64, stop_tokens=(1,))
    came, pass_on, starts = [], Link._pass, pair.model.replica.starts

    def watched(link, number, message, *, last):
        came.extend(["row"] * ("row" in message))
        if len(came) == 150 and "row" in message:
            kill(pair.model)
        pass_on(link, number, message, last=last)

    monkeypatch.setattr(Link, "_pass", watched)
    rows = []
    for piece in range(4):
        reach = Reach(piece=piece, pieces=4)
        made = pair.rollout.generate(prompts, sampling, KEY, torch.arange(256), reach)
        rows += made.rows.tolist()
    assert list(range(256)) == sorted(rows)
    assert starts + 1 == pair.model.replica.starts


@pytest.mark.parametrize("disturb", [kill, pytest.param(stop, marks=pytest.mark.extra)])
def test_an_engine_lost_before_an_update_comes_back_with_the_update(pair, disturb):
    disturb(pair.model)
    pair.update(8, seed=8)
    same(*pair.generate(PROMPTS, GREEDY))
    assert {} == pair.model.check()


def test_an_engine_lost_while_it_takes_weights_comes_back_with_them(pair):
    found = InFlight(pair.model, lambda: pair.update(9, seed=9), kill).wait()
    assert found.error is None
    same(*pair.generate(PROMPTS, GREEDY))
    assert {} == pair.model.check()


def test_an_engine_lost_asleep_is_started_when_it_wakes(pair):
    pair.rollout.sleep("discard")
    starts = pair.model.replica.starts
    lost = pair.model.replica.link().lost
    kill(pair.model)
    assert lost.wait(60)
    assert pair.model.replica.present() is None
    assert starts == pair.model.replica.starts
    assert [] == group(pair.model)
    pair.model.wake()
    pair.update(10, seed=10)
    pair.model.wake_pool()
    assert starts + 1 == pair.model.replica.starts
    same(*pair.generate(PROMPTS, GREEDY))


def test_a_second_loss_is_one_error(kind):
    model, rollout = kind.start()
    prompts = ragged_rows(PROMPTS, torch.int64)
    leaders = [group(model)[0]]

    def disturb(_):
        """Kill it, and its replacement as soon as that is there."""
        kill(model)
        while model.replica.starts < 2:
            time.sleep(0.01)
        leaders.append(group(model)[0])
        os.killpg(leaders[1], signal.SIGSTOP)
        model.replica.link().lose("killed by this test")

    long = Sampling(max_new_tokens=120, temperature=0.0, n=64)
    call = lambda: rollout.generate(prompts, long, KEY, torch.arange(256))  # noqa: E731
    found = InFlight(model, call, disturb).wait()
    assert ["E584"] == [finding.code for finding in found.error.findings]
    assert "killed by this test" in found.error.findings[0].got
    model.close()
    assert [[], []] == [members(leader) for leader in leaders]


WORKER = """
import json, sys, torch
from rlflow.graph.user import engines
name, given, path = sys.argv[1:]
options = getattr(engines, name)(**json.loads(given))
model, rollout = options.load(path, name="gen", dtype=torch.float32, device="cpu")
print(model.replica._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "how",
    [
        "killed",
        *(pytest.param(how, marks=pytest.mark.extra) for how in ("stopped, killed", "ended")),
    ],
)
def test_no_process_is_left_of_a_worker_that_is_gone(kind, how):
    words = [kind.options.__name__, json.dumps(kind.given), TINY]
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, *words],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    leader = int(worker.stdout.readline())
    assert 3 <= len(members(leader))
    if how == "ended":
        worker.communicate("", timeout=60)
    else:
        if "stopped" in how:
            os.killpg(leader, signal.SIGSTOP)
        worker.kill()
        worker.wait(60)
        worker.stdin.close()
    worker.stdout.close()
    end = time.monotonic() + 20
    while members(leader) and time.monotonic() < end:
        time.sleep(0.05)
    assert [] == members(leader)


def test_no_process_is_left_after_closing(kind):
    model, _ = kind.start()
    leader, wrote = group(model)[0], model.replica._process.directory
    model.close()
    assert [] == members(leader)
    assert not wrote.exists()
    assert not Path(model.replica.launch.directory).exists()
