"""A plan's printed form: the same bytes in every process, and as the golden files have it.

`RLFLOW_GOLDEN=1 pytest tests/scheduler/test_plan_text.py` writes the golden files anew.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import rlflow as rf
from rlflow.scheduler.compile import dump_plan
from rlflow.scheduler.plan.explain import explain
from rlflow.scheduler.plan.plan import Cost, Plan, Timing
from rlflow.scheduler.plan.text import cycle_text, duration, numbers, plan_text
from tests.runtime.kernels import lagging, sleeping
from tests.scheduler.examples import EXAMPLES, SPLIT, compiled_with, grpo

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[2]


def stale(placement: rf.Placement, lag: int) -> rf.Placement:
    return placement.model_copy(update={"staleness": lag})


@pytest.mark.parametrize("name", EXAMPLES)
def test_plans_print_as_the_golden_files_have_them(name: str) -> None:
    text = plan_text(EXAMPLES[name]().plan) + "\n"
    file = GOLDEN / f"{name}.txt"
    if "RLFLOW_GOLDEN" in os.environ:
        file.write_text(text)
    assert file.read_text() == text


SCRIPT = """
from rlflow.scheduler.compile import dump_plan
from rlflow.scheduler.plan.text import plan_text
from tests.scheduler.examples import EXAMPLES
for make in EXAMPLES.values():
    plan = make().plan
    print(plan_text(plan), dump_plan(plan))
import sys
assert not {"torch", "ray"} & set(sys.modules)
"""


@pytest.mark.slow
def test_every_process_gives_the_same_bytes(models: Path) -> None:
    """Sets and dicts of strings come in another order under another hash seed."""
    printed = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=models,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2, 3)
    }
    (text,) = printed
    assert "reshard" in text


@pytest.mark.parametrize("name", EXAMPLES)
def test_json_names_what_the_text_names(name: str) -> None:
    plan = EXAMPLES[name]().plan
    document = json.loads(dump_plan(plan))
    assert plan.hash == document["hash"]
    assert [a.id for a in plan.actions] == [a["id"] for a in document["actions"]]
    text = plan_text(plan)
    assert all(a.reason.text in text for a in plan.actions)


def shown(plan: Plan) -> str:
    """The lines below the table."""
    return plan_text(plan).rpartition("\n\n")[2]


def test_the_footer_names_bounds_critical_cycle_idle_share_and_sources() -> None:
    plan = compiled_with(grpo(every=0), SPLIT, name="split").plan
    text = shown(plan)
    cycle = "actor.rollout -> ref.log_probs"
    assert f"critical cycle: {cycle}" in text or "critical cycle: actor.update" in text
    assert " again\n" in text
    assert "idle " in text
    assert "% of device time" in text
    assert "chain " in text
    assert "samples: rollout weights are the newest: proven on-policy" in text
    counts = re.findall(r"\((\d+) actions?\)", text)
    assert len(plan.actions) == sum(map(int, counts))


@pytest.mark.parametrize("lag", [1, 2])
def test_staleness_is_told_and_what_runs_ahead_is_marked(lag: int) -> None:
    plan = compiled_with(grpo(every=0), stale(SPLIT, lag), name="split").plan
    age = "1 update" if lag == 1 else "2 updates"
    assert f"samples: rollout weights at most {age} old" in plan_text(plan)
    ahead = {action.id: action.ahead for action in plan.actions}
    assert f"actor.rollout  ({ahead['actor.rollout']} ahead)" in plan_text(plan)
    assert "actor.update  (" not in plan_text(plan)
    assert 0 == ahead["actor.update"]


def test_memory_is_told_for_every_device_and_for_hosts_that_keep_what_sleeps() -> None:
    plan = replace(
        lagging(0),
        budgets={0: 8 * 10**9, 1: 8 * 10**9, -1: 10**12},
        peaks={0: 3 * 10**9, 1: 10**9, -1: 0},
    )
    assert "peak memory: train[0] 3.0 GB, gen[1] 1.0 GB   of 8.0 GB each\n" in plan_text(plan)
    plan = replace(plan, peaks={**plan.peaks, -1: 2 * 10**9})
    assert "of 8.0 GB each; host 2.0 GB of 1000.0 GB\n" in plan_text(plan)
    plan = replace(plan, budgets={**plan.budgets, 1: 4 * 10**9})
    line = "train[0] 3.0 GB of 8.0 GB, gen[1] 1.0 GB of 4.0 GB; host 2.0 GB of 1000.0 GB"
    assert f"peak memory: {line}\n" in plan_text(plan)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "?"), (-1.0, "?"), (float("nan"), "?"), (0.25, "250.0 ms"), (41.0, "41.0 s")],
)
def test_seconds_that_nobody_knows_are_a_question_mark(seconds: float | None, text: str) -> None:
    assert text == duration(seconds)


def test_long_cycles_lose_their_middle() -> None:
    names = [f"a{number}" for number in range(40)]
    text = cycle_text(names)
    assert text.startswith("a0 -> a1 -> ")
    assert "a6 -> (26 more) -> a33" in text
    assert text.endswith("a39 -> a0 again")


def test_device_numbers_in_a_row_are_a_range() -> None:
    assert ["0", "0:4", "1,3"] == [numbers(d) for d in ((0,), (0, 1, 2, 3), (1, 3))]


def test_an_action_is_explained_with_versions_waits_memory_slack_and_what_is_beside() -> None:
    plan = compiled_with(grpo(every=3), stale(SPLIT, 1), name="split").plan
    text = explain(plan, plan.action("actor.rollout"))
    assert "reads      actor@gen version i-1   (at most 1 update old)" in text
    assert "of 2 iterations before   (weights)" in text
    assert "ahead " in text
    assert "compute lane" in text
    assert re.search(r"\n  (slack|estimate) ", text)
    text = explain(plan, plan.action("reshard:actor@train->actor@gen"))
    assert "reads      actor@train version i+1   (after this iteration's update)" in text
    assert "writes     actor@gen version i+1" in text
    assert "of 1 iteration later   (order)" in text
    assert "every 3 iterations, where i mod 3 = 0" in explain(plan, plan.action("eval"))
    assert "ref@gen, which is frozen" in explain(plan, plan.action("ref.log_probs"))


def test_memory_is_explained_piece_by_piece() -> None:
    plan = lagging(0)
    cost = Cost(seconds=1.0, transient=3000, holds=(("KV cache", 2000), ("logits", 1000)))
    action = replace(plan.action("actor.rollout"), cost=cost)
    text = explain(plan, action)
    assert "memory     3.0 kB while it runs" in text
    assert "of which   2.0 kB KV cache, 1.0 kB logits" in text
    unknown = replace(action, cost=Cost(transient=None))
    assert "memory     not known while it runs" in explain(plan, unknown)


def test_copies_are_explained_with_what_they_run_beside() -> None:
    plan = sleeping()
    timing = Timing(
        resource_bound=2.0,
        recurrence_bound=2.8,
        period=2.8,
        busiest="p[0]",
        binding="recurrence",
        critical=("use.a", "sleep.a"),
        slack=(("wake.b", 0.5),),
    )
    plan = replace(plan, timing=timing)
    text = explain(plan, plan.action("wake.b"))
    assert "due        in every turn" in text
    assert "copy lane" in text
    assert "slack      500.0 ms later makes no iteration longer" in text
    assert "slack      none: it is on the critical cycle" in explain(plan, plan.action("use.a"))
    assert "part       optimizer of , 10 B on each device" in text
