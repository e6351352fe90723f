"""Random pipelines, placements and clusters for properties of the compiler.

Pipelines are declared through the public ops, so that they are what a user could write;
the models' configs (`CONFIGS`) are written to disk by conftest. No weights, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import hypothesis.strategies as st
from hypothesis import reject

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph
from rlflow.graph.rules.check import check_graph
from rlflow.graph.trace import Handle, tracing
from rlflow.graph.user.op import UserOp
from rlflow.scheduler.compile import Compiled, compile_plan
from rlflow.scheduler.devices.cluster import KINDS, Cluster, cpu_cluster
from rlflow.scheduler.plan.plan import Backend

Draw = Callable[[st.SearchStrategy], object]


def config(hidden: int, layers: int) -> dict[str, object]:
    """The part of a Hugging Face config that sizes are read from."""
    return {
        "vocab_size": 64,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }


CONFIGS = {"tiny": config(64, 2), "mid": config(256, 2), "wide": config(512, 4)}
PATHS = ("models/tiny", "models/mid", "models/wide", "nobody/has-this")
PLENTY = 1e12


def exact(response: str, answer: str) -> float:
    return float(response == answer)


def length(response: str) -> float:
    return float(len(response))


@rf.op(per="row")
def shaped(reward: rf.Row[float]) -> rf.Row[float]:
    return reward


@rf.op(per="group")
def centred(reward: rf.Row[float]) -> rf.Row[float]:
    return reward


def long_first(tokens: Sequence[int], groups: Sequence[int] | None, parts: int) -> list[list[int]]:
    order = sorted(range(len(tokens)), key=lambda row: -tokens[row])
    return [order[part::parts] for part in range(parts)]


rf.register_dispatch("long_first", long_first)


def judged(name: str, per: str, dispatch: str, uneven: str) -> UserOp:
    """An op of that name that reads rewards, and whose rows are spread as said."""

    def function(reward: rf.Row[float]) -> rf.Row[float]:
        return reward

    function.__name__ = name
    return rf.op(per=per, dispatch=dispatch, uneven=uneven)(function)


def graph_of(declare: Callable[[], object], name: str = "drawn") -> Graph:
    """The graph that a function of ops declares; AssertionError where it is not sound."""
    with tracing() as trace:
        declare()
    graph = Graph(name=name, nodes=tuple(trace.nodes.values()), models=tuple(trace.models.values()))
    findings = [*trace.findings, *check_graph(graph)]
    assert not findings, "\n".join(line for finding in findings for line in finding.lines())
    return graph


@st.composite
def graphs(draw: Draw) -> Graph:
    """A pipeline with an actor that learns from its own samples, and much that is optional."""
    return graph_of(lambda: _declare(draw))


def _declare(draw: Draw) -> None:
    flag = st.booleans()
    adam = rf.AdamW(lr=1e-3)
    path = st.sampled_from(PATHS)
    lora = rf.LoRA(rank=4) if draw(st.integers(0, 4)) == 0 else None
    actor = rf.Model("actor", draw(path), optimizer=adam, lora=lora)
    ref = rf.Model("ref", draw(path))
    if draw(st.integers(0, 3)) == 0:
        ref = rf.Model("ref", actor.path, optimizer=rf.Average(), lora=lora)
        ops.average(ref, actor, every=draw(st.sampled_from([1, 2])))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=draw(st.sampled_from([4, 8])))
    n = draw(st.sampled_from([2, 4]))
    drafter = None
    if draw(st.integers(0, 3)) == 0:
        drafter = rf.Model("drafter", draw(path), optimizer=adam if draw(flag) else None)
    alike = draw(flag)
    samples = ops.rollout(actor, prompts, n=n, max_new_tokens=8, ignore_eos=alike, drafter=drafter)
    reward = ops.reward(exact, samples)
    seen: list[Handle] = []
    if draw(flag):
        seen.append(ops.reward(exact, samples, name="again"))
    if draw(flag):
        seen.append(shaped(reward))
    given = [ops.log_probs(ref, samples)] if draw(flag) else []
    if given and draw(flag):
        ops.metrics(ops.log_probs(ref, samples, name="ref.twice"), name="ref.metrics")
    seen += _judgements(draw, reward, samples)
    kl = draw(st.sampled_from([0.0, 0.1])) if given else 0.0
    correction = draw(st.sampled_from([None, None, rf.ImportanceSampling()]))
    if correction is not None or draw(flag):
        given.append(ops.log_probs(actor, samples))
    _judge(draw, path, samples)
    if drafter is not None and drafter.optimizer is not None:
        ops.train_drafter(drafter, samples, steps=draw(st.sampled_from([1, 2, 4])))
    if draw(flag):
        critic = rf.Model("critic", draw(path), head="value", optimizer=adam)
        values = ops.values(critic, samples)
        advantage = ops.advantage("gae", samples, reward, values)
        ops.update(critic, samples, advantage, values, loss=rf.ValueLoss())
    else:
        advantage = ops.advantage("grpo", samples, reward)
    ops.update(
        actor,
        samples,
        advantage,
        *given,
        loss=rf.PolicyLoss("ppo_clip", kl_coef=kl, correction=correction),
        epochs=draw(st.sampled_from([1, 2])),
        **_steps(draw),
    )
    if draw(st.integers(0, 3)) == 0:
        ops.update(actor, samples, loss=rf.SFTLoss(), name="actor.more", **_steps(draw))
    _second_policy_loss(draw, actor, ref, samples, advantage, given)
    _second_rollout(draw, actor, ref, prompts, samples)
    for number, handle in enumerate(seen):
        ops.metrics(handle, name=f"metrics{number}")
    test = rf.data.arithmetic(digits=2, split="test")
    for number, period in enumerate(draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2))):
        ops.evaluate(
            actor, test, exact, every=period, max_new_tokens=8, limit=16, name=f"eval{number}"
        )


def _second_policy_loss(
    draw: Draw,
    actor: rf.Model,
    ref: rf.Model,
    samples: Handle,
    advantage: Handle,
    given: Sequence[Handle],
) -> None:
    """Another update of the actor by its own samples, of every kind that may read an old policy."""
    weights = draw(st.sampled_from([None, rf.ImportanceSampling()]))
    kind = draw(st.sampled_from(["", "", "", "ppo_clip", "cispo", "reinforce", "distill"]))
    if kind == "distill":
        teacher = draw(st.sampled_from([actor, ref]))
        likely = ops.log_probs(teacher, samples, top_k=4, name="likely")
        distilled = rf.DistillLoss("forward_kl")
        ops.update(actor, samples, likely, loss=distilled, name="actor.again", **_steps(draw))
    elif kind:
        offered = list(given)
        if weights and not any("old_log_probs" in [o.name for o in one.offers] for one in given):
            offered.append(ops.log_probs(actor, samples, name="old_policy"))
        again = rf.PolicyLoss(kind, correction=weights)
        ops.update(
            actor, samples, advantage, *offered, loss=again, name="actor.again", **_steps(draw)
        )


def _steps(draw: Draw) -> dict[str, Any]:
    """How many steps an update makes of the batch, and whether in the order of the rows."""
    count = draw(st.sampled_from([1, 1, 2, 4]))
    return {"mini_batches": count, "shuffle": count == 1 or draw(st.booleans())}


def _judgements(draw: Draw, reward: Handle, samples: Handle) -> list[Handle]:
    """Ops of one's own, one after another, with rows spread in every way."""
    made = []
    for number in range(draw(st.sampled_from([0, 0, 1, 2]))):
        per = draw(st.sampled_from(["row", "group", "batch"]))
        ways = ["", "all", "first", "long_first"] + ([] if per == "batch" else ["split", "parts"])
        uneven = draw(st.sampled_from(["pad", "pad", "refuse"]))
        op = judged(f"judged{number}", per, draw(st.sampled_from(ways)), uneven)
        given = (reward, samples) if per == "group" else (reward,)
        made.append(op(*given))
        if draw(st.booleans()):
            reward = made[-1].rename(reward=f"judged{number}")
    return made


def _judge(draw: Draw, path: st.SearchStrategy[str], samples: Handle) -> None:
    """A frozen model that scores samples, and a student that imitates them."""
    if draw(st.booleans()):
        judge = rf.Model("judge", draw(path), head="value")
        ops.metrics(ops.values(judge, samples), name="judge.metrics")
    if draw(st.integers(0, 3)) == 0:
        student = rf.Model("student", draw(path), optimizer=rf.AdamW(lr=1e-3))
        ops.update(student, samples, loss=rf.SFTLoss())


def _second_rollout(
    draw: Draw, actor: rf.Model, ref: rf.Model, prompts: Handle, samples: Handle
) -> None:
    if draw(st.integers(0, 2)) == 0:
        model = draw(st.sampled_from([actor, ref]))
        given = draw(st.sampled_from([prompts, prompts, samples]))
        alike = draw(st.booleans())
        sampling = {"n": 2, "max_new_tokens": 4, "name": "probe", "ignore_eos": alike}
        first = draw(st.sampled_from([None, None, 1, 3])) if given is prompts else None
        every = draw(st.sampled_from([None, None, 2])) if given is prompts else None
        probe = ops.rollout(model, given, first_groups=first, balance=every, **sampling)
        ops.metrics(centred(ops.reward(length, probe, name="lengths"), probe), name="probe.metrics")


@st.composite
def placements(draw: Draw, graph: Graph) -> rf.Placement:
    """Pools of one to four devices, apart or overlapping, and assignments at every level.

    Half of them have pools of one device only, as one process can run. Most pauses are within
    the 8 tokens of a response, and most chunks divide 4 prompts.
    """
    names = ("red", "green", "blue")[: draw(st.integers(1, 3))]
    if draw(st.booleans()):
        pools = dict.fromkeys(names, 1)
    else:
        sizes = st.sampled_from([2, 2, 1, 4])
        lists = st.sampled_from([[0, 1], [1, 0], [0, 1, 2, 3], [1, 2], [2], [0, 2, 3]])
        pools = {name: draw(sizes | lists) for name in names}
    assign = {"*": draw(_ons(pools))}
    for model in graph.models:
        if draw(st.booleans()):
            assign[model.name] = draw(_ons(pools, frozen=model.optimizer is None))
    for use in ("train", "forward", "rollout"):
        if draw(st.integers(0, 2)) == 0:
            assign[f"actor.{use}"] = draw(_ons(pools))
    if draw(st.integers(0, 3)) == 0:
        assign["actor.rollout"] = draw(engines_on(pools))
    for node in graph.nodes:
        if draw(st.integers(0, 1 if node.name.startswith("judged") else 5)) == 1:
            assign[node.name] = draw(_ons(pools))
    staleness = draw(st.sampled_from([0, 0, 0, 1, 1, 2, 3]))
    pause_at = draw(st.sampled_from([None, None, 1, 4, 4, 8])) if staleness else None
    stream = draw(st.sampled_from([1, 1, 1, 2, 2, 4, 3]))
    return rf.Placement(
        pools=pools, assign=assign, staleness=staleness, stream=stream, pause_at=pause_at
    )


@st.composite
def engines_on(draw: Draw, pools: dict[str, int | list[int]]) -> rf.On:
    """An engine of its own on a pool, with a pool of keys and values as said or derived."""
    pool = draw(st.sampled_from(sorted(pools)))
    devices = pools[pool]
    count = devices if isinstance(devices, int) else len(devices)
    options = [{}, {}, {"max_total_tokens": 300}, {"memory_saver": False}]
    engine = draw(st.sampled_from(["sglang", *(rf.SGLang(**said) for said in options)]))
    tp = draw(st.sampled_from([1, 2])) if count % 2 == 0 else 1
    return rf.on(pool, engine=engine, tp=tp)


@st.composite
def _ons(draw: Draw, pools: dict[str, int | list[int]], *, frozen: bool = False) -> rf.On:
    """A pool and a layout, which mostly fits it."""
    pool = draw(st.sampled_from(sorted(pools)))
    devices = pools[pool]
    count = devices if isinstance(devices, int) else len(devices)
    options: dict[str, object] = {}
    if draw(st.integers(0, 2)) == 0:
        options["weights"] = draw(st.sampled_from(["own", "shared"]))
    if count > 1 and draw(st.integers(0, 2)) == 0:
        options["tp"] = tp = draw(st.sampled_from([2, 2, 1] if count % 2 == 0 else [1, 1, 2]))
        if draw(st.booleans()):
            options["fsdp"] = draw(st.sampled_from([1, max(1, count // tp)]))
    elif count > 1 and draw(st.integers(0, 2)) == 0:
        options["fsdp"] = draw(st.sampled_from([1, 2, count]))
    if draw(st.integers(0, 7)) == 5:
        options["recompute"] = True
    if draw(st.integers(0, 3 if frozen else 40)) == 3:
        options["offload"] = "layers"
    return rf.on(pool, **options)


def cluster(kind: str, count: int, memory: float) -> Cluster:
    """`count` devices of a kind with `memory` bytes each; CPU devices have one thread."""
    if kind == "cpu":
        made = cpu_cluster(count, threads=1, memory=memory)
        return replace(made, kind=replace(made.kind, host_memory=PLENTY))
    return Cluster(kind=replace(KINDS[kind], memory=memory, reserve=0.0), count=count)


class Case(NamedTuple):
    """What a plan is compiled from."""

    graph: Graph
    placement: rf.Placement
    devices: Cluster
    backend: Backend | None = None

    def compile(self) -> Compiled:
        return compile_plan(self.graph, self.placement, self.devices, backend=self.backend)

    def with_memory(self, memory: float) -> Case:
        kind = replace(self.devices.kind, memory=memory)
        return self._replace(devices=replace(self.devices, kind=kind))


@st.composite
def cases(draw: Draw) -> Case:
    """A graph, a placement, and a cluster with plenty, just enough or too little memory."""
    graph = draw(graphs())
    placement = draw(placements(graph))
    kind = draw(st.sampled_from(["cpu", "cpu", "h100"]))
    devices = cluster(kind, placement.num_devices(), PLENTY)
    hosts = draw(st.sampled_from([1, 1, 2]))
    backend = draw(st.sampled_from([None, "ray"]))
    case = Case(graph, placement, replace(devices, hosts=hosts), backend)
    share = draw(st.sampled_from([2.0, 1.0, 0.98, 0.9, 0.8, 0.7, 0.6, 0.5, 0.3]))
    try:
        most = max(case.compile().plan.peaks.values())
    except PlanError:
        return case
    return case.with_memory(max(1, int(share * most)))


@st.composite
def compiled(draw: Draw) -> Compiled:
    """A case that compiles, as compiled."""
    return compiled_or_rejected(draw(cases()))


def compiled_or_rejected(case: Case) -> Compiled:
    """What is compiled of a drawn case; another one is drawn where it is refused."""
    try:
        return case.compile()
    except PlanError:
        reject()
