"""Rows in chunks, carried as numbers: every action gets its rows, and none is kept for nobody."""

from __future__ import annotations

from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rlflow as rf
from rlflow.errors import PlanError, RunError
from rlflow.runtime.execute.flow import Flow
from rlflow.runtime.execute.rows import chunk_rows
from rlflow.runtime.ray.made import Made
from rlflow.runtime.ray.row_ledger import RowLedger, _gathered
from rlflow.runtime.worker.store import Stored, joined_fields
from rlflow.scheduler.plan.plan import Action, Chunk, Plan
from tests.budget import examples
from tests.scheduler.conftest import write_models
from tests.scheduler.examples import MESH, SPLIT, TWICE, compiled_with, grpo
from tests.scheduler.player import play
from tests.scheduler.strategies import PLENTY, Case, cluster, graphs, placements
from tests.scheduler.test_episode_plans import compiled as episodes


@pytest.fixture(autouse=True, scope="module")
def models(tmp_path_factory):
    """A working directory with the models of the scheduler's tests."""
    home = tmp_path_factory.mktemp("rows")
    write_models(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("HF_HUB_CACHE", str(home / "hub"))
        yield home


CROSSED = rf.Placement(
    pools={"train": 2, "gen": 3},
    assign={
        "*": rf.on("train"),
        "actor.rollout": rf.on("gen"),
        "ref": rf.on("train"),
        "reward": rf.on("gen"),
    },
)


class Ranks:
    """What every device holds of one iteration: row numbers by action, until they are read."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan = plan
        self.flow = Flow(plan)
        self.lying = RowLedger(plan)
        self.random = np.random.default_rng(seed)
        self.held: dict[tuple[int, str], np.ndarray] = {}
        self.pieces: dict[tuple[str, Chunk], list[np.ndarray]] = defaultdict(list)
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
        """The rows of a node that lie on a device for an action, joined as a worker does."""
        found = [torch.tensor(self.held[device, o]) for o in self.flow.origins(action.id, node)]
        total = self.totals[node] * (pieces_of(action) if action.kind == "run" else 1)
        pieces = [Stored(fields={"row": rows}, total=total, rows=rows) for rows in found]
        return joined_fields(pieces, ("row",)).fields["row"].numpy()

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
        shares = pieces_of(action)
        factor = node.param("n") // shares if node.op.rows == "expand" else 1
        for device in self.lying.asked(action):
            rows = np.empty(0, dtype=np.int64)
            for source in node.sources:
                found = self.read(device, action, source)
                found = found[np.isin(found, self.wanted(action, source))]
                assert source == node.sources[0] or found.tolist() == rows.tolist()
                rows = taken[device] = found
            self.release(device, action)
            made[device] = self.left_by(action, device, rows, kept, factor)
        if node.sources:
            self.check(action, taken, self.wanted(action, node.sources[0]))
            self.totals[node.name] = self.totals[node.sources[0]] * shares * factor
        else:
            self.totals[node.name] = dict(node.params).get("batch", 0)
        self.lying.note(action, 0, made)

    def wanted(self, action: Action, source: str) -> np.ndarray:
        """The rows of a node that an action works on, ascending."""
        chunk = action.piece_read
        if chunk is None or chunk.by == "prompts":
            return np.arange(*chunk_rows(self.totals[source] * pieces_of(action), chunk))
        return np.unique(np.concatenate(self.pieces[self.origin(source), chunk]))

    def origin(self, name: str) -> str:
        """The node that has made the rows which a node works on."""
        return str(self.plan.graph.node(name).rows_of)

    def left_by(self, action, device, rows, kept, factor):
        node = self.plan.graph.node(str(action.node))
        if node.op.rows == "new":
            rows = np.arange(node.param("batch"))
        rows = rows[kept[device]] if device in kept else rows
        rows = (rows[:, None] * factor + np.arange(factor)).reshape(-1)
        numbers = None
        if action.ends_first:
            rows = numbers = ended(rows, action.chunk)
            self.pieces[node.name, action.chunk].append(rows)
        if node.op.outputs:
            self.keep(device, action, rows)
        tokens = sizes(rows) if node.op.rows == "expand" else None
        return SimpleNamespace(rows=len(rows), tokens=tokens, numbers=numbers, groups=None)

    def check(self, action: Action, taken, wanted: np.ndarray) -> None:
        """All rows of the chunk are read, parts alike on their devices; groups stay together."""
        together = []
        for part in action.takes.parts:
            for device in part:
                assert taken[device].tolist() == taken[part[0]].tolist()
            together.append(taken[part[0]])
        rows = np.concatenate(together)
        assert wanted.tolist() == np.unique(rows).tolist()
        if action.takes.rule in ("whole", "balanced", "balanced samples", "generated"):
            assert len(wanted) == len(rows)
        if action.takes.rule == "whole":
            assert wanted.tolist() == rows.tolist()

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
            shares = action.makes.pieces
            assert self.totals[node] * shares == total
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
            assert (numbers // shares).tolist() == rows.tolist()
            arrived[device] = numbers
        for device in moves.sends:
            self.release(device, action)
        for device, rows in arrived.items():
            self.keep(device, action, rows)
        self.lying.note(action, 0, {})

    @staticmethod
    def picked(rows: np.ndarray, places: np.ndarray | None) -> np.ndarray:
        return rows if places is None else rows[places]


def pieces_of(action: Action) -> int:
    """How many times each row that an action reads is laid out."""
    return 1 if action.takes is None else action.takes.pieces


# Samples of each prompt in `grpo`.
N = 2


def sizes(rows: np.ndarray) -> np.ndarray:
    """How long responses are, in an order that is not that of the rows."""
    return rows * 5 % 7 + 3


def ended(rows: np.ndarray, chunk: Chunk) -> np.ndarray:
    """Those of a rank's rows that are a piece by who ends first, or is complete, ascending."""
    each = N if chunk.by == "groups" else 1
    longest = sizes(rows).reshape(-1, each).max(-1, initial=0)
    first, last = chunk_rows(len(longest), chunk)
    order = np.argsort(longest, kind="stable")[first:last]
    return np.sort(rows.reshape(-1, each)[order].flatten())


@pytest.mark.rows(10)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("by", ["prompts", "finish", "groups"])
@pytest.mark.parametrize(
    "placement", [MESH, TWICE, SPLIT, CROSSED], ids=["mesh", "twice", "split", "crossed"]
)
def test_rows_of_chunks_arrive_on_a_mesh(placement, by, count, monkeypatch):
    monkeypatch.setattr("rlflow.scheduler.compile.estimated_period", lambda plan: 0.0)
    cut = placement.model_copy(update={"stream": count})
    graph = grpo(epochs=1 if by == "groups" else 2, ignore_eos=by == "prompts")
    plan = compiled_with(graph, cut, backend="ray").plan
    chunks = {a.chunk for a in plan.actions if a.chunk}
    if by == "groups" and not {"groups"} & {chunk.by for chunk in chunks}:
        assert count == 1 or placement is MESH  # where the rollout has the devices of the update
        return
    if count > 1 and (placement, by) != (TWICE, "finish"):  # of which no row op is elsewhere
        assert {(by, count)} == {(chunk.by, chunk.count) for chunk in chunks}
    Ranks(plan, seed=count).play()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("placement", [MESH, SPLIT, CROSSED], ids=["mesh", "split", "crossed"])
def test_rows_of_a_paused_rollout_arrive(placement, count):
    cut = placement.model_copy(update={"stream": count, "staleness": 1, "pause_at": 4})
    plan = compiled_with(grpo(), cut, backend="ray").plan
    resumed = [a for a in plan.actions if a.node == "actor.rollout.resumed" and a.kind == "run"]
    assert count == len(resumed)
    Ranks(plan, seed=count).play()


FEW = [(1, 8, 2), (1, 8, 3), (1, 8, 4), (2, 4, 3), (3, 6, 8), (5, 8, 8), (6, 2, 8)]


@pytest.mark.rows(10)
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("stream", [1, 2])
@pytest.mark.parametrize(("prompts", "n", "gen"), FEW)
def test_samples_of_fewer_prompts_than_ranks_arrive(prompts, n, gen, stream, staleness):
    """Each sample is drawn once, on ranks of which none idles and few have more than others."""
    pools = {"train": 2, "gen": gen}
    assign = {"*": rf.on("train"), "actor.rollout": rf.on("gen"), "reward": rf.on("gen")}
    placement = rf.Placement(pools=pools, assign=assign, stream=stream, staleness=staleness)
    plan = compiled_with(grpo(prompts=prompts, n=n), placement, backend="ray").plan
    (takes,) = {a.takes for a in plan.actions if a.kind == "run" and a.node == "actor.rollout"}
    assert "balanced samples" == takes.rule
    assert -(-prompts * n // gen) * 3 / 2 >= -(-prompts * takes.pieces // gen) * n / takes.pieces
    assert [] == play(plan, seed=gen)
    ranks = Ranks(plan, seed=prompts)
    ranks.play()
    assert prompts * n == ranks.totals["actor.rollout"]


@pytest.mark.slow
@settings(max_examples=examples(20))
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


@pytest.mark.rows(3)
@pytest.mark.parametrize("gen", [2, 4, 8])
@pytest.mark.parametrize("stream", [1, 2])
@pytest.mark.parametrize("engine", ["torch", "sglang"])
def test_rows_of_later_turns_arrive(engine, stream, gen):
    """Where an engine has them in its cache they stay, and what others add comes to them."""
    plan = episodes(gen=gen, engine=engine, stream=stream).plan
    for seed in range(5):
        Ranks(plan, seed).play()


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


def test_rows_that_were_gathered_have_their_tokens():
    node = SimpleNamespace(op=SimpleNamespace(rows="gather"))
    groups, tokens = np.array([0, 0, 1]), np.array([5, 7, 2])
    counted = _gathered(Made(start=0.0, end=1.0, rows=3, groups=groups, tokens=tokens), node)
    assert [5, 7, 2] == counted.tokens.tolist()
    assert [0, 0, 0] == _gathered(
        Made(start=0.0, end=1.0, rows=3, groups=groups), node
    ).tokens.tolist()


def test_rows_of_rollouts_ahead_are_kept_for_those_behind():
    plan = compiled_with(grpo(), SPLIT.model_copy(update={"staleness": 2}), backend="ray").plan
    ahead = max(action.ahead for action in plan.actions)
    ledger, times = RowLedger(plan), {"start": 0.0, "end": 1.0}
    prompts, rollout = plan.action("prompts"), plan.action("actor.rollout")
    moved = next(a for a in plan.actions if a.kind == "transfer" and a.node == "actor.rollout")
    for iteration in range(ahead + 1):
        made = Made(rows=8, **times)
        ledger.note(prompts, iteration, dict.fromkeys(ledger.answering(prompts), made))
        ledger.note(plan.action("transfer:prompts->gen"), iteration, {})
        made = Made(rows=16, tokens=np.full(16, 3), **times)
        ledger.note(rollout, iteration, dict.fromkeys(ledger.answering(rollout), made))

    assert 2 <= ahead
    assert ledger.exchange(moved, 0).sends.keys() == set(rollout.devices)
