"""A run that is stopped: what it saves is what it has done."""

from __future__ import annotations

import pytest
from rich.console import Console

from rlflow.errors import Interrupted
from rlflow.graph.graph import Graph
from rlflow.runtime.display import Display
from rlflow.runtime.execute.executor import Completion
from rlflow.runtime.record.checkpoint import list_checkpoints
from rlflow.runtime.record.metrics import read_metrics
from rlflow.runtime.record.rundir import RunDir
from rlflow.runtime.run import Run, Settings
from rlflow.scheduler.plan.plan import Action, Dep, Plan, Reason

pytestmark = pytest.mark.torch  # TensorBoard's writer

ALONE = Action(
    id="a",
    kind="run",
    node="a",
    reason=Reason(rule="test", text="a test"),
    devices=(-1,),
    pool="host",
    after=(Dep(action="a", distance=1, kind="order"),),
)
PLAN = Plan(
    graph=Graph(name="made", nodes=(), models=()),
    placement="p",
    cluster="cpu:1",
    budgets={},
    backend="local",
    staleness=0,
    pools={},
    actions=(ALONE,),
)


class Instantly:
    """A machine without models whose actions are done as soon as they are asked for."""

    def backend(self, now):
        return self

    def record_notes(self, seconds=None):
        return []

    def submit(self, action, iteration, done):
        clock = float(iteration)
        done(Completion(action=action.id, iteration=iteration, start=clock, end=clock))

    def close(self, *, wait=True):
        """Nothing to close."""

    size, shards = 0, {}

    def snapshot(self):
        return self, {}

    def write(self, directory):
        return {}

    def give_up(self):
        """Nothing is written."""

    def node_states(self):
        return {}

    def restore(self, found, counters):
        """Nothing to restore."""


@pytest.mark.rows(8)
@pytest.mark.parametrize("stop_at", range(6))
@pytest.mark.parametrize("save_every", [2, 3, 4, 5])
def test_a_stop_saves_the_iterations_that_are_done_and_no_more(tmp_path, stop_at, save_every):
    class Stopped(Run):
        def finished(self, action, completion):
            if completion.iteration == stop_at:
                self._stopping.asked = True
                self._executor.stop()
            super().finished(action, completion)

        def iteration_done(self, iteration, metrics):
            super().iteration_done(iteration, {"x": 0.0} if iteration < 50 else metrics)

    settings = Settings(seed=0, iterations=50, threads=1, save_every=save_every)
    with RunDir.create(tmp_path / "run", "made", pipeline="made", command=["made"]) as directory:
        run = Stopped(
            PLAN, settings, Instantly(), directory, Display(Console(stderr=True), quiet=True)
        )
        with pytest.raises(Interrupted) as caught:
            run.execute()

    saved = list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name
    done = int(saved.removeprefix("iteration-"))
    assert f"stopped after {done} of 50" in str(caught.value)
    assert done <= len(read_metrics(tmp_path / "run" / "metrics.jsonl")) <= done + 1
    assert done in (stop_at + 1, stop_at + 2)
