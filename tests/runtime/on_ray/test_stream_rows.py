"""Rows in chunks, carried as numbers: every action gets its rows, and none is kept for nobody."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rlflow as rf
from rlflow.errors import PlanError, RunError
from rlflow.runtime.flow import Flow
from rlflow.runtime.on_ray.lying import Lying
from rlflow.runtime.rows import chunk_rows
from rlflow.scheduler.plan import Action, Plan
from tests.scheduler.conftest import write_models
from tests.scheduler.examples import MESH, TWICE, compiled_with, grpo
from tests.scheduler.strategies import PLENTY, Case, cluster, graphs, placements


@pytest.fixture(autouse=True, scope="module")
def models(tmp_path_factory):
    """A working directory with the models of the scheduler's tests."""
    home = tmp_path_factory.mktemp("rows")
    write_models(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("HF_HUB_CACHE", str(home / "hub"))
        yield home


class Ranks:
    """What every device holds of one iteration: row numbers by action, until they are read."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan = plan
        self.flow = Flow(plan)
        self.lying = Lying(plan)
        self.random = np.random.default_rng(seed)
        self.held: dict[tuple[int, str], np.ndarray] = {}
        self.left: Counter[tuple[int, str]] = Counter()
        self.totals: dict[str, int] = {}

    def play(self) -> None:
        """Every action whose sources are there, until all have run."""
        waiting = [a for a in self.plan.actions if a.kind in ("run", "transfer")]
        done: set[str] = set()
        while waiting:
            ready = [a for a in waiting if set(self.flow.sources(a.id)) <= done]
            assert ready
            action = ready[self.random.integers(len(ready))]
            if action.kind == "run":
                self.run(action)
            else:
                self.transfer(action)
            waiting.remove(action)
            done.add(action.id)
        assert {} == self.held

    def read(self, device: int, action: Action, node: str) -> np.ndarray:
        """The rows of a node that lie on a device for an action, pieces joined."""
        return np.concatenate([self.held[device, o] for o in self.flow.origins(action.id, node)])

    def release(self, device: int, action: Action) -> None:
        for source in self.flow.sources(action.id):
            self.left[device, source] -= 1
            if not self.left[device, source]:
                del self.held[device, source], self.left[device, source]

    def keep(self, device: int, action: Action, rows: np.ndarray) -> None:
        readers = self.flow.readers(action.id, 0)
        if readers:
            self.held[device, action.id] = rows
            self.left[device, action.id] = readers

    def run(self, action: Action) -> None:
        """Read, check whose rows they are, and leave rows of one's own."""
        node = self.plan.graph.node(str(action.node))
        made, taken = {}, {}
        kept = self.lying.keep(action, 0)
        factor = node.param("n") if node.op.rows == "expand" else 1
        for device in self.lying.asked(action):
            rows = np.empty(0, dtype=np.int64)
            for source in node.sources:
                found = self.read(device, action, source)
                first, last = chunk_rows(self.totals[source], action.chunk)
                found = found[(found >= first) & (found < last)]
                assert source == node.sources[0] or found.tolist() == rows.tolist()
                rows = taken[device] = found
            self.release(device, action)
            made[device] = self.left_by(action, device, rows, kept, factor)
        if node.sources:
            self.check(action, taken, *chunk_rows(self.totals[node.sources[0]], action.chunk))
            self.totals[node.name] = self.totals[node.sources[0]] * factor
        else:
            self.totals[node.name] = dict(node.params).get("batch", 0)
        self.lying.note(action, 0, made)

    def left_by(self, action, device, rows, kept, factor):
        node = self.plan.graph.node(str(action.node))
        if node.op.rows == "new":
            rows = np.arange(node.param("batch"))
        rows = rows[kept[device]] if device in kept else rows
        rows = (rows[:, None] * factor + np.arange(factor)).reshape(-1)
        if node.op.outputs:
            self.keep(device, action, rows)
        tokens = rows % 7 + 3 if node.op.rows == "expand" else None
        return SimpleNamespace(rows=len(rows), tokens=tokens)

    def check(self, action: Action, taken, first: int, last: int) -> None:
        """All rows of the chunk are read, parts alike on their devices; groups stay together."""
        together = []
        for part in action.takes.parts:
            for device in part:
                assert taken[device].tolist() == taken[part[0]].tolist()
            together.append(taken[part[0]])
        rows = np.concatenate(together)
        assert list(range(first, last)) == np.unique(rows).tolist()
        if action.takes.rule in ("whole", "balanced", "generated"):
            assert last - first == len(rows)
        if action.takes.rule == "whole":
            assert list(range(first, last)) == rows.tolist()

    def transfer(self, action: Action) -> None:
        """Move pieces as the controller says, and compare with the numbers it states."""
        node, moves = str(action.node), self.lying.exchange(action, 0)
        sent = {
            device: [self.picked(self.read(device, action, node), places) for places in wanted]
            for device, wanted in moves.sends.items()
        }
        arrived = {}
        for device, pieces in moves.takes.items():
            numbers, total = self.lying.rows(action, 0, device)
            assert self.totals[node] == total
            numbers = np.arange(total) if numbers is None else numbers
            rows = np.full(len(numbers), -1)
            for piece in pieces:
                own = piece.sender is None
                found = (
                    self.picked(self.read(device, action, node), piece.source)
                    if own
                    else sent[piece.sender][piece.index]
                )
                rows[slice(None) if piece.target is None else piece.target] = found
            assert numbers.tolist() == rows.tolist()
            arrived[device] = rows
        for device in moves.sends:
            self.release(device, action)
        for device, rows in arrived.items():
            self.keep(device, action, rows)
        self.lying.note(action, 0, {})

    @staticmethod
    def picked(rows: np.ndarray, places: np.ndarray | None) -> np.ndarray:
        return rows if places is None else rows[places]


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("placement", [MESH, TWICE], ids=["mesh", "twice"])
def test_rows_of_chunks_arrive_on_a_mesh(placement, count):
    cut = placement.model_copy(update={"stream": count})
    plan = compiled_with(grpo(epochs=2), cut, backend="ray").plan
    assert count == max(a.chunk.count if a.chunk else 1 for a in plan.actions)
    Ranks(plan, seed=count).play()


@settings(max_examples=50)
@given(st.data(), st.sampled_from([2, 4]), st.integers(0, 2**16))
def test_rows_of_chunks_arrive_whatever_the_graph(data, count, seed):
    graph = data.draw(graphs())
    placement = data.draw(placements(graph)).model_copy(update={"stream": count, "staleness": 0})
    case = Case(graph, placement, cluster("cpu", placement.num_devices(), PLENTY), "ray")
    try:
        plan = case.compile().plan
    except PlanError:
        assume(False)
    try:
        Ranks(plan, seed).play()
    except RunError as error:  # a rule that tears a group apart for an op that needs it whole
        if error.findings[0].code != "E761":
            raise


def test_a_rollout_of_rows_that_were_made_whole_takes_its_slice():
    placement = rf.Placement(
        pools={"train": 1, "gen": 1},
        assign={"*": rf.on("train"), "actor.rollout": rf.on("gen"), "prompts": rf.on("gen")},
        stream=2,
    )
    plan = compiled_with(grpo(), placement, backend="ray").plan
    read = {source for n in (1, 2) for source in Flow(plan).sources(f"actor.rollout[{n}/2]")}
    assert {"prompts"} == read
    Ranks(plan, seed=0).play()
