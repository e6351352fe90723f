"""Pipelines with loops, as plain functions and drawn, for tests of plans and of runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st

import rlflow as rf
from rlflow import ops
from rlflow.graph.graph import Graph
from rlflow.graph.trace import Handle, merged_handles
from tests.scheduler.examples import APART, COLOCATE, OWN, SPLIT
from tests.scheduler.strategies import exact, graph_of, length

Draw = Callable[[st.SearchStrategy], Any]
TWO = rf.Placement(
    pools={"train": 2, "gen": 2},
    assign={"*": rf.on("train"), "actor.rollout": rf.on("gen"), "reward": rf.on("gen")},
)
THREE = rf.Placement(
    pools={"train": 1, "gen": 1, "look": 1},
    assign={"actor": rf.on("train"), "actor.rollout": rf.on("gen"), "ref": rf.on("look")},
)
ENDED = rf.Placement(
    pools={"train": 2, "gen": 1},
    assign={"*": rf.on("train"), "actor.rollout": rf.on("gen"), "enough": rf.on("train")},
)
PLACEMENTS = {
    "colocate": COLOCATE,
    "own": OWN,
    "split": SPLIT,
    "apart": APART,
    "two": TWO,
    "three": THREE,
    "ended": ENDED,
}


@rf.op(per="row")
def grown(count: rf.Row[float]) -> rf.Row[float]:
    return count + 1


@rf.op(per="row")
def begun(row_id: rf.Row[int]) -> rf.Row[float]:
    return 0.0 * row_id


@rf.op(per="row")
def done(count: rf.Row[float]) -> rf.Row[bool]:
    return count > 1


@rf.op(per="group")
def mixed(reward: rf.Row[float]) -> rf.Row[bool]:
    return reward < reward.max()


def dapo(
    *,
    at_most: int = 3,
    expected: float | None = None,
    surplus: str = "drop",
    reference: bool = True,
    unread: bool = False,
    every: int = 0,
    ignore_eos: bool = False,
    again: bool = False,
    prompts_of: str = "models/mid",
) -> Graph:
    """Prompts are drawn until 8 groups of 2 are informative; some of it is optional.

    `unread` puts ops in the body whose fields nobody reads, `again` the policy's own log-probs
    and a group op, `reference` log-probs of a second model.
    """

    def declare() -> None:
        actor = rf.Model("actor", prompts_of, optimizer=rf.AdamW(lr=1e-3))
        ref = rf.Model("ref", prompts_of) if reference else None

        def attempt() -> tuple[Handle, ...]:
            prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
            samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8, ignore_eos=ignore_eos)
            reward = ops.reward(exact, samples)
            given = [samples, reward, ops.informative(samples, reward)]
            if ref is not None:
                given.append(ops.log_probs(ref, samples))
            if again:
                given += [ops.log_probs(actor, samples), mixed(reward, samples)]
            if unread:
                given.append(ops.reward(length, samples, name="unread").rename(other="reward"))
            return tuple(given)

        batch = ops.repeat(
            attempt,
            until="mixed" if again else "informative",
            groups=8,
            at_most=at_most,
            expected=expected,
            surplus=surplus,  # type: ignore[arg-type]
            name="enough",
        )
        advantage = ops.advantage("grpo", batch)
        loss = rf.PolicyLoss(
            "ppo_clip",
            kl_coef=0.1 if reference else 0.0,
            correction=rf.ImportanceSampling() if again else None,
        )
        ops.update(actor, batch, advantage, loss=loss, epochs=2 if again else 1)
        if every:
            test = rf.data.arithmetic(digits=2, split="test")
            ops.evaluate(actor, test, exact, every=every, max_new_tokens=8, limit=16, name="eval")

    return graph_of(declare, "dapo")


def counting(*, at_most: int = 3, expected: float | None = None, model: bool = False) -> Graph:
    """A number of every sample goes round until it is large enough; then the actor learns."""

    def declare() -> None:
        actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        first = begun(samples).rename(count="begun")

        def step(state: Handle) -> tuple[Handle, ...]:
            seen = [ops.log_probs(rf_judge, samples)] if model else []
            after = grown(state).rename(count="grown")
            return after, done(after), *seen

        rf_judge = rf.Model("ref", "models/tiny") if model else None
        counted = ops.repeat(step, first, until="done", at_most=at_most, expected=expected)
        ops.metrics(counted.only("count"), name="counted")
        if model:
            ops.metrics(counted.only("ref_log_probs"), name="scored")
        reward = counted.rename(reward="count").only("reward")
        ops.update(actor, samples, ops.advantage("grpo", samples, reward), loss=rf.PolicyLoss())

    return graph_of(declare, "counting")


def nested(
    kind: str = "counts",
    *,
    outer: int = 2,
    inner: int = 2,
    expected: tuple[float | None, float | None] = (None, None),
    surplus: str = "drop",
    model: bool = False,
) -> Graph:
    """A loop in each trip of another, by `kind`.

    "counts": rows go round in both. "drawn": rows are drawn until enough count, and those of a
    trip go round. "groups": of rows that are drawn until some count, others are drawn until
    more do. The inner loop has a `model` in it where that is said.
    """
    build = {"counts": _counted_twice, "drawn": _drawn_and_counted, "groups": _drawn_twice}[kind]

    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        ref = rf.Model("ref", "models/mid") if model else None
        said = {"at_most": outer, "expected": expected[0], "name": "enough"}
        batch = build(actor, _step(ref, at_most=inner, expected=expected[1]), said, surplus)
        loss = rf.PolicyLoss(kl_coef=0.1 if model else 0.0)
        ops.update(actor, batch, ops.advantage("grpo", batch), loss=loss)

    return graph_of(declare, f"nested_{kind}")


def _step(ref: rf.Model | None, **said: Any) -> Callable[..., Handle]:
    """A loop in which `body` is repeated, after it a model has looked at the samples."""

    def inner(body: Callable[..., tuple[Handle, ...]], *state: Handle, **more: Any) -> Handle:
        def looked(*handles: Handle) -> tuple[Handle, ...]:
            made = body(*handles)
            seen = handles or made
            scored = [ops.log_probs(ref, *seen)] if ref is not None else []
            return (*made, *scored)

        return ops.repeat(looked, *state, name="inner", **said, **more)

    return inner


def _counted_twice(
    actor: rf.Model, inner: Callable[..., Handle], said: dict[str, Any], surplus: str
) -> Handle:
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
    first = begun(samples).rename(count="begun")

    def step(state: Handle) -> tuple[Handle, ...]:
        after = grown(state).rename(count="grown")
        return after, done(after)

    def turn(state: Handle) -> tuple[Handle, ...]:
        drafted = inner(step, state, until="done")
        after = grown(drafted, name="further").rename(count="grown")
        seen = [offer.name for offer in drafted.offers if offer.name == "ref_log_probs"]
        return after, done(after, name="all_done"), *([drafted.only(*seen)] if seen else [])

    counted = ops.repeat(turn, merged_handles(samples, first), until="done", **said)
    return counted.rename(reward="count")


def _drawn_and_counted(
    actor: rf.Model, inner: Callable[..., Handle], said: dict[str, Any], surplus: str
) -> Handle:
    def step(state: Handle) -> tuple[Handle, ...]:
        after = grown(state).rename(count="grown")
        return after, done(after)

    def attempt() -> tuple[Handle, ...]:
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        first = begun(samples).rename(count="begun")
        counted = inner(step, merged_handles(samples, first), until="done")
        reward = ops.reward(exact, counted).rename(right="reward")
        rewarded = merged_handles(counted.rename(reward="count"), reward)
        return rewarded, ops.informative(rewarded)

    return ops.repeat(attempt, until="informative", groups=8, surplus=surplus, **said)


def _drawn_twice(
    actor: rf.Model, inner: Callable[..., Handle], said: dict[str, Any], surplus: str
) -> Handle:
    def attempt() -> tuple[Handle, ...]:
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        reward = ops.reward(exact, samples)
        return samples, reward, ops.informative(samples, reward)

    def chosen() -> tuple[Handle, ...]:
        few = inner(attempt, until="informative", groups=4)
        return few.only(*(f.name for f in few.offers if f.name != "informative")), mixed(few)

    return ops.repeat(chosen, until="mixed", groups=8, surplus=surplus, **said)


@st.composite
def nested_loops(draw: Draw) -> Graph:
    """A graph with a loop in a loop, with few or many trips of each."""
    outer, inner = draw(st.sampled_from([(1, 2), (2, 1), (2, 2), (2, 2), (2, 3), (3, 2)]))
    kind = draw(st.sampled_from(["counts", "drawn", "groups"]))
    return nested(
        kind,
        outer=max(outer, 2) if kind == "groups" else outer,
        inner=inner,
        expected=(draw(st.none() | st.floats(1, outer)), draw(st.none() | st.floats(1, inner))),
        surplus="drop" if kind == "counts" else draw(st.sampled_from(["drop", "keep"])),
        model=draw(st.booleans()),
    )


@st.composite
def loops(draw: Draw) -> Graph:
    """A graph with one of the loops, with few or many trips."""
    at_most = draw(st.sampled_from([1, 2, 2, 3, 4]))
    expected = draw(st.none() | st.floats(1, at_most))
    flag = st.booleans()
    if draw(st.integers(0, 3)) == 0:
        return counting(at_most=at_most, expected=expected, model=draw(flag))
    return dapo(
        at_most=at_most,
        expected=expected,
        surplus=draw(st.sampled_from(["drop", "keep"])),
        reference=draw(flag),
        unread=draw(flag),
        every=draw(st.sampled_from([0, 2])),
        ignore_eos=draw(flag),
        again=draw(flag),
    )


@st.composite
def modes(draw: Draw, graph: Graph) -> rf.Placement:
    """One of the placements, with some staleness, chunks and a pause."""
    placement = PLACEMENTS[draw(st.sampled_from(sorted(PLACEMENTS)))]
    newest = any(n.loop and n.name == "actor.log_probs" for n in graph.nodes)
    kept = any(dict(n.params).get("surplus") == "keep" for n in graph.nodes)
    staleness = draw(st.sampled_from([0, 0, 1, 1 if newest and kept else 2]))
    said = {
        "staleness": staleness,
        "stream": draw(st.sampled_from([1, 1, 2, 4])),
        "pause_at": draw(st.sampled_from([None, None, 4])) if staleness else None,
    }
    return fitting(graph, placement).model_copy(update=said)


def fitting(graph: Graph, placement: rf.Placement) -> rf.Placement:
    """The placement without what it assigns that the graph has not."""
    known = {"*", *(node.name for node in graph.nodes), *(model.name for model in graph.models)}
    assign = {key: on for key, on in placement.assign.items() if key in known}
    return placement.model_copy(update={"assign": assign})
