"""Plans in chunks that are wrong in one place: each is rejected by a rule of the verifier."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.scheduler.plan.plan import Chunk, Plan, Spread
from rlflow.scheduler.verify.verify import verify
from tests.scheduler.examples import APART, compiled_with, grpo, ppo
from tests.scheduler.strategies import graph_of
from tests.scheduler.test_stream import THREE, cut, runs, streamed


@pytest.mark.rows(4)
@pytest.mark.parametrize("backend", ["local", "ray"])
@pytest.mark.parametrize(
    ("ignore_eos", "steps", "epochs"),
    [(False, 1, 2), (True, 1, 2), (False, 4, 1), (False, 1, 1)],
)
def test_a_plan_with_a_wrong_chunk_is_rejected(backend, ignore_eos, steps, epochs):
    """After `transfer`, so that no device's order stands in for a dependency."""
    graph = grpo(epochs=epochs, ignore_eos=ignore_eos, steps=steps)
    compiled = compiled_with(graph, streamed(THREE, 2), backend=backend)
    plan = dict(compiled.stages)["transfer"]
    assert [] == verify(plan, "transfer")
    survivors = [name for name, mutant in wrong_chunks(plan) if not verify(mutant, "transfer")]
    assert [] == survivors


def wrong_chunks(plan: Plan):
    """The plan with one chunk less, doubled, renumbered, or fed from another chunk."""
    other = {"[1/2]": "[2/2]", "[2/2]": "[1/2]"}
    for action in plan.actions:
        if action.chunk is None:
            continue
        rest = tuple(a for a in plan.actions if a.id != action.id)
        bridged = tuple(
            replace(
                a,
                after=tuple(d for d in a.after if d.action != action.id)
                + tuple(d for d in action.after if d.action not in (a.id, action.id)),
            )
            if any(d.action == action.id for d in a.after)
            else a
            for a in rest
        )
        yield f"no {action.id}", replace(plan, actions=bridged)
        by = action.chunk.by
        others = [Chunk(index=1 - action.chunk.index, count=2, by=by), Chunk(index=0, count=4)]
        ways = ("prompts", "finish", "groups")
        others += [replace(action.chunk, by=way) for way in ways if way != by]
        for chunk in (None, *others):
            changed = replace(action, chunk=chunk)
            actions = tuple(changed if a.id == action.id else a for a in plan.actions)
            yield f"{action.id} as {chunk}", replace(plan, actions=actions)
        if action.takes is not None and action.kind == "run":
            moved = replace(action, takes=Spread(parts=((97,),)))
            actions = tuple(moved if a.id == action.id else a for a in plan.actions)
            yield f"{action.id} takes elsewhere", replace(plan, actions=actions)
    for action in plan.actions:
        swapped = tuple(
            replace(dep, action=dep.action[:-5] + other[dep.action[-5:]])
            if dep.kind == "data" and dep.action[-5:] in other and action.chunk is not None
            else dep
            for dep in action.after
        )
        last = action.chunk is not None and action.chunk.index == 1
        if swapped != action.after and last:
            actions = tuple(
                replace(a, after=swapped) if a.id == action.id else a for a in plan.actions
            )
            yield f"{action.id} after the other chunk", replace(plan, actions=actions)


@pytest.mark.parametrize("backend", ["local", "ray"])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_who_does_not_wait_for_the_last_chunk_is_rejected(backend, ignore_eos):
    graph = grpo(epochs=2, ignore_eos=ignore_eos)
    compiled = compiled_with(graph, streamed(THREE, 2), backend=backend)
    plan = dict(compiled.stages)["transfer"]
    nodes = ("ref.log_probs", "advantage" if ignore_eos else "reward")
    checked = 0
    for name in (f"{node}[2/2]" for node in nodes):
        for reader in plan.actions:
            after = tuple(dep for dep in reader.after if dep.action != name or dep.kind != "data")
            if after == reader.after:
                continue
            early = replace(reader, after=after)
            actions = tuple(early if a.id == reader.id else a for a in plan.actions)
            broken = verify(replace(plan, actions=actions), "transfer")
            assert any(f"may start before {name}" in text for text in broken), (name, reader.id)
            checked += 1
    assert len(nodes) == checked


def test_chunks_of_what_is_read_whole_are_rejected():
    plan = dict(compiled_with(grpo(ignore_eos=True), streamed(THREE, 2)).stages)["stream"]
    pieces = ("actor.rollout[1/2]", "actor.rollout[2/2]")

    def after(action):
        named = [replace(d, action="actor.rollout") if d.action in pieces else d for d in action]
        return tuple(dict.fromkeys(named))

    whole = {"id": "actor.rollout", "chunk": None, "begins": False}
    actions = tuple(
        replace(a, after=after(a.after), **(whole if a.id in pieces else {}))
        for a in plan.actions
        if a.id != pieces[1]
    )
    broken = verify(replace(plan, actions=actions), "stream")
    assert "reward is cut, and not all of what it reads is, or otherwise" in broken


def test_a_chunk_on_another_instance_is_rejected():
    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        ref = rf.Model("ref", "models/mid")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        ops.metrics(ops.log_probs(ref, samples, name="here"), name="one")
        ops.metrics(ops.log_probs(ref, samples, temperature=0.5, name="there"), name="two")
        ops.update(actor, samples, loss=rf.SFTLoss())

    placement = rf.Placement(
        pools={"train": 1, "gen": 1, "look": 1},
        assign={"*": rf.on("train"), "here": rf.on("gen"), "there": rf.on("look")},
        stream=2,
    )
    plan = dict(compiled_with(graph_of(declare), placement).stages)["stream"]
    last, other = plan.action("here[2/2]"), plan.action("there[2/2]")
    moved = replace(
        last,
        pool=other.pool,
        devices=other.devices,
        instance=other.instance,
        needs=other.needs,
        reads=other.reads,
        takes=other.takes,
        makes=other.makes,
    )
    actions = tuple(moved if a.id == last.id else a for a in plan.actions)
    broken = verify(replace(plan, actions=actions), "stream")
    assert ["here[2/2] is done otherwise than here[1/2]"] == broken


def test_chunks_within_a_group_are_rejected():
    made = compiled_with(grpo(every=0, ignore_eos=True), streamed(THREE, 2))
    plan = dict(made.stages)["stream"]
    nodes = tuple(
        replace(node, params=tuple({**dict(node.params), "batch": 7}.items()))
        if node.name == "prompts"
        else node
        for node in plan.graph.nodes
    )
    broken = verify(replace(plan, graph=replace(plan.graph, nodes=nodes)), "stream")
    assert "reward is cut into 2 chunks, within the groups of its 7 prompts" in broken


def test_a_batch_op_in_chunks_is_rejected():
    whole = cut(ppo(), APART, 1)
    stages = dict(compiled_with(ppo(), APART).stages)
    plan = stages["bind"]
    (advantage,) = runs(plan, "advantage")
    actions = []
    for action in plan.actions:
        if action.id == "advantage":
            actions += [
                replace(advantage, id=f"advantage[{n}/2]", chunk=Chunk(index=n - 1, count=2))
                for n in (1, 2)
            ]
        else:
            after = tuple(
                replace(dep, action=f"advantage[{n}/2]") if dep.action == "advantage" else dep
                for dep in action.after
                for n in (1, 2)
            )
            actions.append(replace(action, after=tuple(dict.fromkeys(after))))
    broken = verify(replace(plan, actions=tuple(actions)), "bind")
    assert any("takes its batch at once" in text for text in broken)
    assert [] == verify(whole, "timing")
