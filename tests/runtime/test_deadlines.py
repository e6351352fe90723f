"""How long actions may be silent: by estimate, past times and progress; who hangs is named."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from rlflow.cli.commands import Target, compile_target
from rlflow.contract.progress import Progress, advance, following
from rlflow.engines.process.client.load import PATIENCE
from rlflow.errors import RunError
from rlflow.graph.graph import Graph, Node
from rlflow.ops.scoring import REWARD, Policy
from rlflow.rewards.bounds import Bounds
from rlflow.runtime.execute import deadlines
from rlflow.runtime.execute.deadlines import FIRST, FLOOR, SLOWEST, UNKNOWN, Deadlines
from rlflow.runtime.execute.executor import Executor
from rlflow.runtime.local import LocalBackend
from rlflow.scheduler.plan.plan import HOST, Cost
from tests.conftest import PIPELINES, ROOT
from tests.runtime.test_local import Calls, action, plan_of

pytestmark = pytest.mark.torch


def costing(seconds, moved=0, devices=(0,)):
    return replace(action("a", *devices), cost=Cost(seconds=seconds, moved=moved))


def allowed(entry, *taken, fixed=None):
    known = Deadlines(plan_of(entry), fixed)
    for seconds in taken:
        known.took(entry.id, seconds)
    return known.of(entry)


def test_a_long_action_is_allowed_ten_times_its_estimate_and_more_at_first():
    assert 10 * 900 + FIRST == allowed(costing(900.0)).seconds
    assert 10 * 900 == allowed(costing(900.0), 700.0).seconds


def test_what_it_has_taken_counts_where_it_is_longer_than_the_estimate():
    found = allowed(costing(30.0), 20.0, 60.0, 10.0)

    assert 600 == found.seconds
    assert "10 times the longest of this run, 60 s" in found.why


def test_a_tiny_action_fails_sooner_than_in_ten_minutes():
    assert FLOOR == allowed(costing(0.01), 0.02).seconds < 600


def test_what_no_table_times_has_the_floor_of_the_unknown():
    assert UNKNOWN == allowed(costing(None), 0.1).seconds
    assert UNKNOWN + FIRST == allowed(costing(0.1, devices=(HOST,))).seconds


def test_what_the_host_has_done_once_tells_how_long_it_takes():
    assert FLOOR == allowed(costing(None, devices=(HOST,)), 0.1).seconds
    assert 500 == allowed(costing(None, devices=(HOST,)), 50.0).seconds


def test_a_reward_may_be_silent_for_as_long_as_its_calls_may_take():
    """Three calls of 400 s, and 2 s and 4 s between them."""
    bounds = Bounds(timeout=400.0, retries=2, backoff=2.0)
    params = (("function", len), ("policy", Policy(bounds=bounds)))
    node = Node(name="judge", op=REWARD, inputs=(), params=params)
    entry = replace(costing(None, devices=(HOST,)), node="judge")
    plan = plan_of(entry)
    known = Deadlines(replace(plan, graph=Graph(name="made", nodes=(node,), models=())))
    known.took(entry.id, 0.1)

    assert FLOOR + 1206 == known.of(entry).seconds


def test_an_action_of_an_engine_waits_for_one_that_replaces_it():
    """An engine may say nothing for its own patience, and then take its `start_seconds`."""
    target = Target(
        pipeline=str(PIPELINES / "grpo_gsm8k.py"),
        placement="sglang",
        devices="h100:8",
        model_shape="qwen2.5-0.5b",
    )
    plan = compile_target(target).compiled.plan
    known = Deadlines(plan)
    rollout, update = plan.action("actor.rollout"), plan.action("actor.update")
    (reshard,) = (a for a in plan.actions if a.kind == "reshard")
    for entry in (rollout, update, reshard):
        known.took(entry.id, 0.1)

    assert [UNKNOWN + 300] * 2 == [known.of(entry).seconds for entry in (rollout, reshard)]
    assert FLOOR <= known.of(update).seconds < UNKNOWN
    assert UNKNOWN + 300 > PATIENCE + 300


def test_the_first_call_also_reads_its_bytes_from_a_slow_disk():
    size = 15 * 10**9

    assert FLOOR + FIRST + size / SLOWEST == allowed(costing(1.0, moved=size)).seconds


def test_deadline_sets_one_limit_for_all():
    known = Deadlines(plan_of(costing(900.0)), 7.0)

    assert (7.0, True) == (known.of(costing(900.0)).seconds, known.of(costing(900.0)).whole)
    assert [7.0] * 4 == [known.answering, known.loading, known.meeting, known.for_files(10**12)]


def test_ranks_wait_for_each_other_longer_than_the_controller_waits_for_them():
    known = Deadlines(plan_of(costing(900.0), costing(2.0)))

    assert known.meeting > known.of(costing(900.0)).seconds


def test_progress_is_that_of_the_thread_and_of_threads_that_nobody_follows():
    mine, other = Progress(), Progress()

    with following(mine):
        advance(64, "tokens")
        advance(64, "tokens")
        with following(other):
            advance(1, "micro-batches")
    assert (2, "128 tokens") == (mine.moves, str(mine))
    assert (1, "1 micro-batches") == (other.moves, str(other))

    helper = threading.Thread(target=advance, args=(1, "messages"))
    helper.start()
    helper.join()
    assert (3, 2) == (mine.moves, other.moves)
    assert 0 == Progress().moves


@pytest.fixture
def soon(monkeypatch):
    """Half a second of silence is too long."""
    for name, value in {"FLOOR": 0.5, "UNKNOWN": 0.5, "FIRST": 0.0, "FACTOR": 0.1}.items():
        monkeypatch.setattr(deadlines, name, value)
    monkeypatch.setattr("rlflow.runtime.local.TICK", 0.05)


def run(plan, body, **more):
    class Silent:
        def started(self, action, iteration):
            pass

        finished = iteration_done = started

    backend = LocalBackend(plan, Calls(body), threads=1, now=time.perf_counter, **more)
    try:
        return Executor(plan, backend, Silent(), start=0, end=1, barrier=1).run()
    finally:
        backend.close()


def test_what_is_slow_but_moves_is_not_given_up(soon):
    def slow(action, iteration):
        for _ in range(12):
            time.sleep(0.1)
            advance(8, "tokens")
        return {}

    assert 1 == run(plan_of(action("rollout", 0)), slow)


def test_what_hangs_is_named_with_what_it_did_last(soon):
    held = threading.Event()

    def hangs(action, iteration):
        advance(8, "tokens")
        held.wait(30)
        return {}

    began = time.monotonic()
    with pytest.raises(RunError) as caught:
        run(plan_of(action("rollout", 0), action("other", 0, after=["rollout"])), hangs)
    held.set()

    assert time.monotonic() - began < 5
    assert "E763" in str(caught.value)
    assert "rollout in iteration 0 showed no progress for 0.5 s" in str(caught.value)
    assert "no answer from this process; before, 8 tokens" in str(caught.value)
    assert "--deadline 1" in str(caught.value)


def test_with_deadline_progress_does_not_count(soon):
    def slow(action, iteration):
        for _ in range(30):
            time.sleep(0.1)
            advance(8, "tokens")
        return {}

    plan = plan_of(action("rollout", 0))
    with pytest.raises(RunError, match=r"took longer than 0\.4 s"):
        run(plan, slow, deadlines=Deadlines(plan, 0.4))


def test_what_waits_behind_it_and_what_comes_later_fails_too(soon):
    held, heard = threading.Event(), queue.SimpleQueue()
    first, second = action("first", 0), action("second", 0)
    backend = LocalBackend(
        plan_of(first, second), Calls(lambda *_: held.wait(30) and {}), threads=1, now=time.time
    )

    for entry in (first, second):
        backend.submit(entry, 0, heard.put)
    found = [heard.get(timeout=5) for _ in range(2)]
    backend.submit(second, 1, heard.put)
    found.append(heard.get(timeout=5))
    held.set()
    backend.close()

    assert ["first", "second", "second"] == [each.action for each in found]
    assert all("first in iteration 0" in str(each.error) for each in found)
    with pytest.raises(queue.Empty):
        heard.get(timeout=0.2)


def test_a_watch_that_fails_ends_the_run_with_what_it_failed_by(soon, monkeypatch):
    held = threading.Event()
    plan = plan_of(action("first", 0), action("other", 0, after=["first"]))

    def late(*_, **__):
        raise ZeroDivisionError("odd")

    known = Deadlines(plan)
    monkeypatch.setattr(known, "late", late)
    with pytest.raises(RunError, match=r"(?s)E782.*ZeroDivisionError\('odd'\)"):
        run(plan, lambda *_: held.wait(30) and {}, deadlines=known)
    held.set()


@pytest.mark.slow
def test_a_reward_that_hangs_ends_the_run_and_its_process(tmp_path):
    """Without Ray: the thread that hangs is left behind, and the process ends all the same."""
    text = (PIPELINES / "grpo.py").read_text()
    held = text.replace(
        "    return float(response == answer)", "    time.sleep(600)\n    return 0.0"
    )
    assert held != text
    file = tmp_path / "hangs.py"
    file.write_text(held.replace("import rlflow as rf", "import time\n\nimport rlflow as rf"))
    words = ["--set", f"model={PIPELINES / 'assets' / 'arith-tiny'}", "--set", "group_size=2"]
    words += ["--set", "prompts_per_iteration=2", "--set", "eval_every=100", "--threads", "1"]
    words += ["--deadline", "4", "--run-dir", "run"]
    run = [sys.executable, "-c", "from rlflow.cli.main import main; main()", "run", str(file)]

    done = subprocess.run(
        [*run, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert 1 == done.returncode, done.stderr
    assert "error[E763]" in done.stderr
    assert "took longer than 4 s" in done.stderr
    assert "continue with: rlflow run" in done.stderr
