"""What fits some devices fits twice as many, in pieces or not; and what is refused needs too much.

Twice as many devices hold fewer rows each, and a smaller share of what is trained. What a plan
chooses of itself, and what others leave on a device, has to keep that true.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import hypothesis.strategies as st
from hypothesis import example, given, reject, settings

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.verify.verify import verify
from tests.budget import examples
from tests.scheduler.strategies import exact, graph_of

# More ranks than devices, than prompts, or than key-value heads; the memory of hosts.
OTHERS = {"E212", "E213", "E214", "E405"}
LEAST: dict[str, Any] = {"micro": 1024, "recompute": True, "offload": "optimizer"}


class Task(NamedTuple):
    """A pipeline of models of one shape, and its rows."""

    shape: str
    critic: bool
    prompts: int
    new: int

    def graph(self) -> Graph:
        def declare() -> None:
            path, adam = f"shape:{self.shape}", rf.AdamW(lr=1e-6)
            actor = rf.Model("actor", path, dtype="bfloat16", optimizer=adam)
            ref = rf.Model("ref", path, dtype="bfloat16")
            prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=self.prompts)
            samples = ops.rollout(actor, prompts, n=4, max_new_tokens=self.new)
            reward, ref_lp = ops.reward(exact, samples), ops.log_probs(ref, samples)
            if not self.critic:
                adv = ops.advantage("grpo", samples, reward)
                ops.update(actor, samples, adv, ref_lp, loss=rf.PolicyLoss("ppo_clip", kl_coef=0.1))
                return
            critic = rf.Model("critic", path, dtype="bfloat16", head="value", optimizer=adam)
            values = ops.values(critic, samples)
            adv = ops.advantage("gae", samples, reward, values, ref_lp, kl_coef=0.1)
            ops.update(critic, samples, values, adv, loss=rf.ValueLoss())
            ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))

        return graph_of(declare)


class Way(NamedTuple):
    """How ranks share models, and in how many pieces rows are sampled."""

    tp: int | None
    rollout: dict[str, Any] | None
    stream: int

    def placement(self, devices: int, **said: Any) -> rf.Placement:
        assign = {"*": rf.on("all", tp=self.tp)}
        if said:
            assign |= {
                f"{name}.train": rf.on("all", tp=self.tp, **said) for name in ("actor", "critic")
            }
        if self.rollout is not None:
            assign["actor.rollout"] = rf.on("all", **self.rollout)
        return rf.Placement(pools={"all": devices}, assign=assign, stream=self.stream)


def planned(task: Task, way: Way, kind: str, devices: int, **said: Any) -> Plan | None:
    """The plan; None where devices have too little memory."""
    cluster = parse_cluster(kind.format(devices), 1)
    placement = way.placement(devices, **said)
    if not task.critic:
        placement.assign.pop("critic.train", None)
    try:
        return compile_plan(task.graph(), placement, cluster, verified=False).plan
    except PlanError as refused:
        if {finding.code for finding in refused.findings} == {"E401"}:
            return None
        raise


TASKS = st.builds(
    Task,
    shape=st.sampled_from(
        ["qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen3-30b-a3b"]
    ),
    critic=st.booleans(),
    prompts=st.sampled_from([64, 256, 1024]),
    new=st.sampled_from([512, 2048, 8192]),
)
ROLLOUTS = [None, {"tp": 2}, {"tp": 4, "engine": "sglang"}, {"tp": 1}, {"tp": 2, "engine": "vllm"}]
WAYS = st.builds(
    Way,
    tp=st.sampled_from([None, 2, 4]),
    rollout=st.sampled_from(ROLLOUTS),
    stream=st.sampled_from([1, 2, 4]),
)
KINDS = st.sampled_from(["h100:{}", "h100:{}@40GB", "a100:{}@24GB"])


EIGHTHS = Way(tp=8, rollout=None, stream=4)


@settings(max_examples=examples(40), deadline=None)
@example(Task("qwen2.5-32b", True, 256, 1024), EIGHTHS, "h100:{}", 8)
@example(Task("qwen2.5-14b", False, 512, 1024), EIGHTHS, "h100:{}", 16)
@given(task=TASKS, way=WAYS, kind=KINDS, devices=st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
def test_what_fits_some_devices_fits_twice_as_many(
    task: Task, way: Way, kind: str, devices: int
) -> None:
    """And what does not fit does not either in the smallest micro-batches, all computed again."""
    try:
        if planned(task, way, kind, devices) is None:
            assert planned(task, way, kind, devices, **LEAST) is None
            return
        many = planned(task, way, kind, 2 * devices)
        assert many is not None
        assert [] == verify(many, "timing")
    except PlanError as refused:
        if {finding.code for finding in refused.findings} <= OTHERS:
            reject()
        raise


def test_an_engine_that_keeps_its_memory_has_a_pool_that_leaves_room() -> None:
    task = Task("qwen2.5-7b", False, 1024, 8192)
    tokens = []
    for saver in (True, False):
        engine = rf.SGLang(memory_saver=saver)
        way = Way(tp=None, rollout={"tp": 2, "engine": engine}, stream=1)
        plan = planned(task, way, "h100:{}", 8)
        assert plan is not None
        assert [] == verify(plan, "timing")
        tokens.append(plan.instance("actor@all/sglang").engine_plan.settings.max_total_tokens)
    assert task.new < tokens[1] < tokens[0]
